"""The loop of an episode: sample an answer, run its calls, append what comes back, until the episode ends.

Token in, token out: what the model wrote is never tokenized again. A mask says which tokens are the model's, and
the loss leaves out all others.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from grpo_cli.environments.calls import Outcome, run_calls
from grpo_cli.environments.contract import (
    Environment,
    EnvironmentSource,
    EpisodeError,
    Tool,
)
from grpo_cli.environments.dialogue import Answer, Dialogue, Message
from grpo_cli.environments.episode import Call, Episode, Failure, Sampled, Sampler
from grpo_cli.environments.registry import find_kind
from grpo_cli.fast.completions import Completion
from grpo_cli.recipe.episode import EpisodeConfig, KindConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.conditions import Condition
from grpo_cli.rewards.contract import Batch, completion_text

_RESET_S = 120.0
"""Time limit of `reset` and of `close`: an environment may have to start a process."""


class Player:
    """Plays episodes of one recipe."""

    def __init__(
        self,
        config: EpisodeConfig,
        dialogue: Dialogue,
        tools: Sequence[tuple[Tool, Condition | None]],
        sources: Sequence[tuple[EnvironmentSource, Condition | None]],
        *,
        max_tokens: int,
        seed: int,
    ) -> None:
        """Make a player; `open_player` makes one of a recipe.

        Args:
            config: The section of the recipe.
            dialogue: Renders and parses.
            tools: Tools without a state, each with the rows that it is for.
            sources: Environments, as `tools`.
            max_tokens: Most tokens of an episode, results included.
            seed: Of the recipe; with a row's number it seeds the row's environment.
        """
        self.config = config
        self._dialogue = dialogue
        self._tools = tools
        self._sources = sources
        self._max_tokens = max_tokens
        self._seed = seed
        self.waited_s = 0.0
        """Seconds spent so far on waiting for tools and environments."""

    @property
    def tool_names(self) -> list[str]:
        """The names of the tools without a state."""
        return [tool.name for tool, _ in self._tools]

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Episode]:
        """Reset an environment for each row, and add what it says to the row's prompt.

        Raises:
            EpisodeError: One cannot be made or reset; all are closed then.
        """
        batch = Batch([""] * len(rows), [""] * len(rows), columns=_columns(rows))
        chosen = [_first(self._sources, batch, row) for row in range(len(rows))]
        outcomes = self._run(
            [partial(self._reset, source, row) for source, row in zip(chosen, rows, strict=True)],
            _RESET_S,
        )
        episodes = []
        for number, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
            environment, said = outcome.value or (None, None)
            shared = [
                tool for tool, when in self._tools if when is None or when.holds(batch, number)
            ]
            own = environment.tools if environment else ()
            prompt = _append(list(row["prompt"]), said)
            episodes.append(Episode(row, prompt, [*shared, *own], environment))
        if faults := [outcome.fault for outcome in outcomes if outcome.fault]:
            self.close(episodes)
            raise EpisodeError(
                f"the environment cannot be reset for {len(faults)} of {len(rows)} episodes: {faults[0]}. "
                "Fix: try it without a model by `grpo env test RECIPE`"
            )
        for episode in episodes:
            episode.prompt_ids = self._dialogue.encode_prompt(episode.prompt, episode.tools)
        return episodes

    def _reset(
        self, source: EnvironmentSource | None, row: Mapping[str, Any]
    ) -> tuple[Environment, str | None] | None:
        if source is None:
            return None
        environment = source.make()
        try:
            said = environment.reset(row, row_seed(row, self._seed))
            if said is not None and not isinstance(said, str):
                raise TypeError(f"reset() returned {type(said).__name__}, not text")
            return environment, said
        except BaseException:
            environment.close()
            raise

    def close(self, episodes: Sequence[Episode]) -> None:
        """Close the environments of episodes; what that raises is ignored."""
        environments = [each.environment for each in episodes if each.environment is not None]
        self._run([each.close for each in environments], _RESET_S)

    def play(
        self,
        episodes: Sequence[Episode],
        sample: Sampler,
        widest: Callable[[int], int] = lambda count: count,
    ) -> None:
        """Play episodes side by side to their ends, and close their environments.

        Args:
            episodes: As `begin` made them.
            sample: Samples the answers of a turn.
            widest: Returns the largest number of episodes that any process still plays: all sample together.

        Raises:
            EpisodeError: A call failed, and `on_tool_error` is `raise`; or a reward cannot be read.
        """
        try:
            active = list(episodes)
            while count := widest(len(active)):
                # A process whose episodes have ended samples along: with vLLM's server all take part.
                filled = [*active, *[episodes[0]] * (count - len(active))]
                self._take_turn(active, filled, sample)
                active = [each for each in active if each.end is None]
            self._read_rewards(episodes)
        finally:
            self.close(episodes)

    def _take_turn(
        self, active: Sequence[Episode], filled: Sequence[Episode], sample: Sampler
    ) -> None:
        rooms = [self._max_tokens - len(each.token_ids) for each in active] or [1]
        most = min(self.config.max_turn_tokens or self._max_tokens, max(rooms))
        contexts = [each.prompt_ids + each.token_ids for each in filled]
        sampled = sample(contexts, most)
        answers: list[Answer] = []
        for number, episode in enumerate(active):
            room = rooms[number]
            ids = sampled.token_ids[number][:room]
            self._add_answer(episode, ids, sampled, number)
            complete = bool(ids) and ids[-1] in self._dialogue.stops
            read = episode.tools if complete else ()
            answer = self._dialogue.read_answer(ids, contexts[number], read)
            episode.messages.append(answer.message)
            answers.append(answer)
            if not complete:
                episode.end = "tokens" if len(ids) >= room else "cut_off"
        acting = [
            (episode, answer)
            for episode, answer in zip(active, answers, strict=True)
            if episode.end is None
        ]
        replies = self._act(acting)
        for (episode, _), messages in zip(acting, replies, strict=True):
            self._reply(episode, messages)

    def _add_answer(self, episode: Episode, ids: list[int], sampled: Sampled, number: int) -> None:
        episode.turns += 1
        episode.token_ids += ids
        episode.mask += [1] * len(ids)
        if sampled.logprobs is not None:
            before = episode.logprobs or []
            episode.logprobs = [*before, *sampled.logprobs[number][: len(ids)]]
        if sampled.entropies is not None:
            episode.entropies += sampled.entropies[number][: len(ids)]

    # --- calls ---------------------------------------------------------------------------------

    def _act(self, acting: Sequence[tuple[Episode, Answer]]) -> list[list[Message]]:
        """Run what the answers ask for; return the messages that reply to each."""
        replies: list[list[Message]] = [[] for _ in acting]
        for number, (episode, answer) in enumerate(acting):
            if answer.fault:
                episode.calls.append(Call("", "malformed"))
                if self.config.on_malformed_call == "end":
                    episode.end = "malformed"
                fault = f"Error: the call cannot be read: {answer.fault}"
                replies[number].append({"role": "tool", "name": "unknown", "content": fault})
        rounds = max((len(answer.calls) for _, answer in acting), default=0)
        for place in range(rounds):
            numbers = [
                number
                for number, (episode, answer) in enumerate(acting)
                if place < len(answer.calls) and episode.end is None
            ]
            calls = [acting[number][1].calls[place] for number in numbers]
            self._call(
                [acting[number][0] for number in numbers], calls, [replies[n] for n in numbers]
            )
        self._step(acting, replies)
        return replies

    def _call(
        self,
        episodes: Sequence[Episode],
        calls: Sequence[Mapping[str, Any]],
        replies: Sequence[list[Message]],
    ) -> None:
        """Run one call of each episode side by side."""
        by_name = [{tool.name: tool for tool in episode.tools} for episode in episodes]
        known = [number for number, call in enumerate(calls) if call["name"] in by_name[number]]
        functions = [
            partial(by_name[number][calls[number]["name"]].call, **calls[number]["arguments"])
            for number in known
        ]
        outcomes = dict(zip(known, self._run(functions, self.config.tool_timeout_s), strict=True))
        for number, (episode, call) in enumerate(zip(episodes, calls, strict=True)):
            name = call["name"]
            if number not in outcomes:
                names = ", ".join(by_name[number])
                self._note(episode, Call(name, "unknown"))
                text = f"Error: there is no tool {name!r}; the tools are {names}"
            else:
                text = self._read_outcome(episode, name, outcomes[number])
            replies[number].append({"role": "tool", "name": name, "content": text})

    def _step(
        self, acting: Sequence[tuple[Episode, Answer]], replies: Sequence[list[Message]]
    ) -> None:
        """Give answers without a call to environments that take text; other episodes end with them."""
        numbers = []
        for number, (episode, answer) in enumerate(acting):
            if answer.calls or answer.fault or episode.end is not None:
                continue
            if episode.environment is not None and episode.environment.takes_text:
                numbers.append(number)
            else:
                episode.end = "answer"
        functions = [
            partial(acting[number][0].environment.step, acting[number][1].message["content"])  # type: ignore[union-attr]
            for number in numbers
        ]
        for number, outcome in zip(
            numbers, self._run(functions, self.config.tool_timeout_s), strict=True
        ):
            episode = acting[number][0]
            said, is_done = "", False
            if not outcome.fault:
                try:
                    said, is_done = outcome.value
                except (TypeError, ValueError):
                    problem = (
                        f"step() returned {outcome.value!r:.100}, not a text and whether it is over"
                    )
                    outcome = Outcome(error=TypeError(problem), seconds=outcome.seconds)
            text = self._read_outcome(episode, "step", replace(outcome, value=said))
            replies[number].append({"role": "user", "content": text})
            if is_done and episode.end is None:
                episode.end = "done"

    def _read_outcome(self, episode: Episode, name: str, outcome: Outcome) -> str:
        """Return what the model is told of a call; decide what a failure means."""
        failure: Failure = "late" if outcome.is_late else "failed" if outcome.error else ""
        self._note(episode, Call(name, failure, outcome.seconds))
        if not failure:
            text, was_long = self._dialogue.shorten(
                as_text(outcome.value), self.config.max_result_tokens
            )
            episode.shortened += was_long
            if episode.environment is not None and episode.environment.is_done:
                episode.end = "done"
            return text
        if self.config.on_tool_error == "raise":
            raise EpisodeError(
                f"{name} failed: {outcome.fault}. Fix: correct it, or set `episode.on_tool_error: tell`"
            ) from outcome.error
        # What is late may still change its environment, at any time.
        own = episode.environment is not None and name in {
            "step",
            *(tool.name for tool in episode.environment.tools),
        }
        if self.config.on_tool_error == "zero" or (own and outcome.is_late):
            episode.end = "failed"
        return f"Error: {outcome.fault}"[:2000]

    @staticmethod
    def _note(episode: Episode, call: Call) -> None:
        episode.calls.append(call)
        episode.tool_s += call.seconds

    def _reply(self, episode: Episode, messages: list[Message]) -> None:
        """Append replies for the next turn, if there is one."""
        episode.messages += messages
        if episode.end is None and episode.turns >= self.config.max_turns:
            episode.end = "turns"
        if episode.end is not None:
            return
        ids = self._dialogue.encode_replies(messages)
        # At least one token of an answer has to fit.
        if len(episode.token_ids) + len(ids) >= self._max_tokens:
            episode.end = "tokens"
            return
        episode.token_ids += ids
        episode.mask += [0] * len(ids)
        if episode.logprobs is not None:
            episode.logprobs += [0.0] * len(ids)

    def _read_rewards(self, episodes: Sequence[Episode]) -> None:
        """Ask the environments for their rewards; 0 for episodes that end with one whose state is not known."""
        read = [each for each in episodes if each.environment is not None and each.end != "failed"]
        functions = [each.environment.reward for each in read if each.environment is not None]
        for episode, outcome in zip(
            read, self._run(functions, self.config.tool_timeout_s), strict=True
        ):
            if outcome.fault:
                raise EpisodeError(
                    f"the environment's reward cannot be read: {outcome.fault}. "
                    "Fix: try it without a model by `grpo env test RECIPE`"
                ) from outcome.error
            episode.reward = outcome.value

    def _run(self, calls: Sequence[Callable[[], Any]], timeout_s: float) -> list[Outcome]:
        started = time.perf_counter()
        try:
            return run_calls(calls, parallel=self.config.parallel, timeout_s=timeout_s)
        finally:
            self.waited_s += time.perf_counter() - started


def _append(prompt: list[Message], said: str | None) -> list[Message]:
    """Add what an environment says first to the end of a prompt."""
    if not said:
        return prompt
    last = prompt[-1]
    content = f"{last['content']}\n\n{said}" if last["content"] else said
    return [*prompt[:-1], {**last, "content": content}]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _first(
    sources: Sequence[tuple[EnvironmentSource, Condition | None]], batch: Batch, row: int
) -> EnvironmentSource | None:
    for source, when in sources:
        if when is None or when.holds(batch, row):
            return source
    return None


def row_seed(row: Mapping[str, Any], seed: int) -> int:
    """Return the seed of a row's environment, the same for all completions of the row."""
    if isinstance(row.get("seed"), int):
        return int(row["seed"])
    digest = hashlib.sha256(f"{seed}:{row.get('row_id', 0)}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def as_text(value: Any) -> str:
    """Return a result as the model reads it: text as it is, everything else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def open_kind(section: str, config: KindConfig) -> Any:
    """Validate an entry's parameters and open it: a `ToolSource` or an `EnvironmentSource`."""
    return find_kind(section, config.kind).model_validate(config.params).open()


@contextmanager
def open_player(
    recipe: Recipe, tokenizer: Any, *, stops: Sequence[int] | None = None
) -> Iterator[Player]:
    """Open the tools and environments of a recipe, and close them on the way out.

    Args:
        recipe: With `tools` or an `environment`.
        tokenizer: With a chat template.
        stops: Tokens that end an answer; None for the tokenizer's.

    Raises:
        EpisodeError: A kind cannot be opened, or the chat template will not do.
        SetupError: A package is missing.
    """
    with ExitStack() as stack:
        tools: list[tuple[Tool, Condition | None]] = []
        sources = []
        for config in recipe.tools:
            source = open_kind("tools", config)
            stack.callback(source.close)
            tools += [(tool, _condition(config)) for tool in source.tools]
        for config in recipe.environment:
            source = open_kind("environment", config)
            stack.callback(source.close)
            sources.append((source, _condition(config)))
        repeated = [
            name for name, count in Counter(tool.name for tool, _ in tools).items() if count > 1
        ]
        if repeated:
            raise EpisodeError(
                f"two tools have the name {repeated[0]!r}. Fix: rename one of them", "tools"
            )
        dialogue = Dialogue(
            tokenizer,
            has_tools=bool(tools) or any(source.has_tools for source, _ in sources),
            template_kwargs=recipe.generation.extras.get("chat_template_kwargs"),
            stops=stops,
        )
        yield Player(
            recipe.episode,
            dialogue,
            tools,
            sources,
            max_tokens=recipe.generation.max_completion_length,
            seed=recipe.seed,
        )


def sample_episodes(
    player: Player,
    rows: Sequence[Mapping[str, Any]],
    sample: Sampler,
    *,
    samples_per_prompt: int = 1,
    batch_size: int = 32,
    widest: Callable[[int], int] = lambda count: count,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[list[Completion]]:
    """Play episodes outside of training; return those of each row.

    Args:
        player: Of the recipe.
        rows: With `prompt` and `row_id`.
        sample: Samples the answers of a turn.
        samples_per_prompt: Episodes of each row.
        batch_size: Episodes played side by side.
        widest: As for `Player.play`.
        on_progress: Called after each batch with the episodes played and their total.
    """
    queue = [row for row in rows for _ in range(samples_per_prompt)]
    played: list[Completion] = []
    for start in range(0, len(queue), batch_size):
        episodes = player.begin(queue[start : start + batch_size])
        player.play(episodes, sample, widest)
        played += [_as_completion(each) for each in episodes]
        if on_progress is not None:
            on_progress(len(played), len(queue))
    return [
        played[place : place + samples_per_prompt]
        for place in range(0, len(played), samples_per_prompt)
    ]


def _as_completion(episode: Episode) -> Completion:
    return Completion(
        completion_text(episode.messages),
        tuple(episode.own_ids),
        clipped=episode.end in ("tokens", "cut_off"),
        prompt=episode.prompt,
        messages=tuple(episode.messages),
        episode=episode.as_json(),
    )


def _condition(config: KindConfig) -> Condition | None:
    return Condition(config.when) if config.when else None
