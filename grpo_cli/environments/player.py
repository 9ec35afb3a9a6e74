"""The loop of an episode: sample an answer, run its calls, append what comes back, until the episode ends.

Token in, token out: what the model wrote is never tokenized again. A mask says which tokens are the model's, and
the loss leaves out all others.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_cli.data.images import fill_images, images_of, without_images
from grpo_cli.environments.calls import (
    BrokenEnvironmentError,
    Caller,
    Chain,
    Content,
    Outcome,
    T,
    decode_row,
    find_place,
    read_reward,
    run_call,
    run_chains,
)
from grpo_cli.environments.contract import (
    Environment,
    EnvironmentSource,
    EpisodeError,
    Tool,
    find_repeated,
)
from grpo_cli.environments.dialogue import Answer, Dialogue, Message, append_content
from grpo_cli.environments.episode import Episode, Sampled, Sampler, is_clipped
from grpo_cli.environments.registry import open_kind
from grpo_cli.errors import GrpoError
from grpo_cli.fast.completions import Completion
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.recipe.episode import EpisodeConfig, KindConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.contract import Batch, completion_text
from grpo_cli.rewards.scoring import Condition
from grpo_cli.runs.metrics import STEP

RESET_S, _CLOSE_S = 120.0, 10.0
"""Time limits of `reset` and `reward`, since an environment may have to start a process, and of `close`."""
_TRY = "try it without a model by `grpo env test RECIPE`"
Agree = Callable[[int, int], tuple[int, int]]
"""Returns the largest first and the largest second number over all processes."""


def _explain(what: str, outcome: Outcome, fix: str = "") -> EpisodeError:
    """Return that something failed as an outcome says; with its error's own fix, if none is better."""
    own = outcome.error if isinstance(outcome.error, GrpoError) else None
    error = EpisodeError(
        f"{what}: {own.seen if own else outcome.fault}", fix or (own and own.fix) or _TRY
    )
    error.__cause__ = outcome.error
    return error


def _alone(count: int, longest: int) -> tuple[int, int]:
    return count, longest


@dataclass(eq=False)
class Player:
    """Plays episodes of one recipe; `open_player` makes one."""

    config: EpisodeConfig
    dialogue: Dialogue
    tools: Sequence[tuple[Tool, str | None]]
    """Those without a state, each with the condition of the rows that it is for, if it has one."""
    sources: Sequence[tuple[EnvironmentSource, str | None]]
    """As `tools`."""
    max_tokens: int
    """Of an episode, results included."""
    seed: int
    waited_s: float = 0.0
    """Seconds spent so far on waiting for tools and environments."""
    has_warned: bool = False

    def __post_init__(self) -> None:
        self._caller = Caller(self.dialogue.reads_images)
        self.reads_images = self.dialogue.reads_images
        self.tool_names = [tool.name for tool, _ in self.tools]

    # --- beginning and end ---------------------------------------------------------------------

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Episode]:
        """Reset an environment for each row, and add what it says to the row's prompt.

        Raises `EpisodeError` if one cannot be made or reset; all are closed then.
        """
        offers = [(tool, find_rows(when, rows)) for tool, when in self.tools]
        episodes = []
        for number, row in enumerate(rows):
            tools = [tool for tool, places in offers if number in places]
            own = decode_row(row)
            prompt = fill_images(row["prompt"], own[IMAGES]) if IMAGES in row else row["prompt"]
            episodes.append(Episode(own, list(prompt), tools, None))
        try:
            self._reset(episodes, rows)
            for episode in episodes:
                filled = episode.prompt
                episode.prompt_ids = self.dialogue.encode_prompt(filled, episode.tools)
                episode.prompt, episode.images = without_images(filled), images_of(filled)
                episode.images_read = episode.prompt_images = len(episode.images)
        except BaseException:
            self.close(episodes)
            raise
        return episodes

    def _reset(self, episodes: Sequence[Episode], rows: Sequence[Mapping[str, Any]]) -> None:
        """Make and reset the environments of episodes: for each row the first that is for it."""
        chosen: dict[int, EnvironmentSource] = {}
        for source, when in reversed(self.sources):
            chosen |= dict.fromkeys(find_rows(when, rows), source)
        pairs = [(episodes[number], chosen[number]) for number in sorted(chosen)]

        def reset(episode: Episode, source: EnvironmentSource) -> Content:
            # Before the reset, so that it is closed if that fails.
            episode.environment = source.make()
            return self._caller.reset(episode.environment, episode.row, self.seed)

        outcomes = self._run([partial(reset, *pair) for pair in pairs])
        if faults := [outcome for outcome in outcomes if outcome.fault]:
            if isinstance(faults[0].error, BrokenEnvironmentError):
                raise faults[0].error
            where = find_place(faults[0].error)
            what = f"the environment cannot be reset for {len(faults)} of {len(episodes)} episodes"
            raise _explain(what, faults[0], f"correct {where}" if where else "")
        for (episode, _), outcome in zip(pairs, outcomes, strict=True):
            own = episode.environment.tools if episode.environment else ()
            episode.prompt = append_content(episode.prompt, outcome.value)
            if not str(episode.prompt[-1]["content"]).strip():
                seen = "reset() returned no text, and the dataset has no prompt"
                raise EpisodeError(seen, "return the question from reset()")
            episode.tools = [*episode.tools, *own]
            if name := find_repeated(episode.tools):
                raise EpisodeError(f"a tool and the environment both offer {name!r}", "rename one")

    def close(self, episodes: Sequence[Episode]) -> None:
        """Close the environments of episodes, each once; only the first failure is printed."""
        opened = [each for each in episodes if each.environment is not None and not each.is_closed]
        for episode in opened:
            episode.is_closed = True
        closers = [each.environment.close for each in opened if each.environment is not None]
        faults = [each.fault for each in self._run(closers, _CLOSE_S) if each.fault]
        if faults and not self.has_warned:
            self.has_warned = True
            print(f"warning: an environment's close() failed: {faults[0]}", file=sys.stderr)

    def _read_rewards(self, episodes: Sequence[Episode]) -> None:
        """Ask the environments for their rewards, but for episodes of which the state is not known."""
        read = [each for each in episodes if each.environment is not None and each.end != "failed"]
        functions = [partial(read_reward, each.environment) for each in read if each.environment]
        outcomes = self._run(functions)
        faults = [outcome for outcome in outcomes if outcome.fault]
        if faults and (len(faults) == len(read) or self.config.on_tool_error == "raise"):
            what = (
                f"the environment's reward cannot be read for {len(faults)} of {len(read)} episodes"
            )
            raise _explain(what, faults[0])
        for episode, outcome in zip(read, outcomes, strict=True):
            episode.reward = outcome.value
            if outcome.fault:
                episode.add_call("reward", outcome.failure, outcome.seconds)
                episode.end = "failed"

    def _run(
        self, functions: Sequence[Callable[[], Any]], timeout_s: float = RESET_S
    ) -> list[Outcome]:
        return self._run_chains(list(map(run_call, functions)), timeout_s)

    def _run_chains(self, chains: Sequence[Chain[T]], timeout_s: float) -> list[T]:
        started = time.perf_counter()
        try:
            return run_chains(chains, parallel=self.config.parallel, timeout_s=timeout_s)
        finally:
            self.waited_s += time.perf_counter() - started

    # --- turns ---------------------------------------------------------------------------------

    def play(self, episodes: Sequence[Episode], sample: Sampler, agree: Agree = _alone) -> None:
        """Play episodes side by side to their ends, and close their environments.

        `agree` makes all processes sample equally many answers at a time, since with vLLM all take part.

        Raises `EpisodeError` if a call failed, and `on_tool_error` is `raise`; or no reward can be read.
        """
        active = list(episodes)
        try:
            while True:
                longest = max((self._room(each) for each in active), default=1)
                count, longest = agree(len(active), longest)
                if count == 0:
                    break
                contexts = [each.prompt_ids + each.token_ids for each in active]
                # A process whose episodes have ended samples along.
                fillers = [episodes[0]] * (count - len(active))
                asked = [*contexts, *(each.prompt_ids for each in fillers)]
                options = {}
                if self.reads_images:
                    again = [each.images[: each.prompt_images] for each in fillers]
                    options["images"] = [*(each.images for each in active), *again]
                self._take_turn(active, contexts, sample(asked, longest, **options))
                active = [each for each in active if each.end is None]
            self._read_rewards(episodes)
        finally:
            self.close(episodes)

    def _room(self, episode: Episode) -> int:
        left = self.max_tokens - len(episode.token_ids)
        return min(self.config.max_turn_tokens or left, left)

    def _take_turn(
        self, active: Sequence[Episode], contexts: Sequence[list[int]], sampled: Sampled
    ) -> None:
        answers = [
            self._add_answer(episode, contexts[number], sampled, number)
            for number, episode in enumerate(active)
        ]
        acting = [pair for pair in zip(active, answers, strict=True) if pair[0].end is None]
        chains = [self._act(*pair) for pair in acting]
        replies = self._run_chains(chains, self.config.tool_timeout_s)
        for (episode, _), messages in zip(acting, replies, strict=True):
            self._reply(episode, messages)

    def _add_answer(
        self, episode: Episode, context: list[int], sampled: Sampled, number: int
    ) -> Answer:
        """Append an answer's tokens and its message; one that was cut off ends the episode."""
        ids = sampled.token_ids[number][: self._room(episode)]
        episode.turns += 1
        episode.token_ids += ids
        episode.mask += [1] * len(ids)
        if sampled.logprobs is not None:
            episode.logprobs = [*(episode.logprobs or []), *sampled.logprobs[number][: len(ids)]]
        if sampled.entropies is not None:
            episode.entropies += sampled.entropies[number][: len(ids)]
        is_complete = self.dialogue.reader.is_complete(ids, context)
        if not is_complete:
            episode.end = "tokens" if len(episode.token_ids) >= self.max_tokens else "cut_off"
        answer = self.dialogue.read_answer(ids, context, episode.tools if is_complete else ())
        episode.messages.append(answer.message)
        return answer

    def _reply(self, episode: Episode, messages: list[Message]) -> None:
        """Append replies for the next turn, if there is one."""
        episode.messages += without_images(messages)
        episode.images += images_of(messages)
        if episode.end is None and episode.turns >= self.config.max_turns:
            episode.end = "turns"
        if episode.end is not None:
            return
        has_end = episode.token_ids[-1] in self.dialogue.stops
        ids = self.dialogue.encode_replies(messages, has_end=has_end)
        # At least one token of an answer has to fit.
        if len(episode.token_ids) + len(ids) >= self.max_tokens:
            episode.end = "tokens"
            return
        episode.images_read = len(episode.images)
        episode.token_ids += ids
        episode.mask += [0] * len(ids)
        if episode.logprobs is not None:
            episode.logprobs += [0.0] * len(ids)

    # --- calls ---------------------------------------------------------------------------------

    def _act(self, episode: Episode, answer: Answer) -> Chain[list[Message]]:
        """Run what an answer asks for; return the messages that reply to it.

        An answer without a call goes to an environment that takes text, and ends every other episode.
        """
        if answer.fault:
            episode.add_call("", "malformed")
            if self.config.on_malformed_call == "end":
                episode.end = "malformed"
            text = self._shorten(episode, f"Error: the call cannot be read: {answer.fault}")
            return [{"role": "tool", "name": "unknown", "content": text}]
        replies: list[Message] = []
        for call in answer.calls:
            text = yield from self._call(episode, call["name"], call["arguments"])
            replies.append({"role": "tool", "name": call["name"], "content": text})
            if episode.end is not None:
                return replies
        if not answer.calls:
            if episode.environment is None or not episode.environment.takes_text:
                episode.end = "answer"
                return []
            text = yield from self._step(episode, episode.environment, answer.said)
            replies.append({"role": "user", "content": text})
        return replies

    def _call(self, episode: Episode, name: str, arguments: Mapping[str, Any]) -> Chain[Content]:
        tools = {tool.name: tool for tool in episode.tools}
        if name not in tools:
            episode.add_call(name, "unknown")
            text = f"Error: there is no tool {name!r}; the tools are {', '.join(tools)}"
            return self._shorten(episode, text)
        tool = tools[name]
        # A coroutine is cancelled once its call was given up.
        patience_s = self.config.tool_timeout_s + 1
        outcome = yield partial(self._caller.call, tool, arguments, patience_s)
        is_own = episode.environment is not None and tool in episode.environment.tools
        return self._read_outcome(episode, name, outcome, may_change=is_own)

    def _step(self, episode: Episode, environment: Environment, answer: str) -> Chain[Content]:
        outcome = yield partial(self._caller.step, environment, answer)
        if not outcome.fault:
            outcome.value, is_done = outcome.value
            episode.end = "done" if is_done else None
        return self._read_outcome(episode, STEP, outcome, may_change=True)

    def _read_outcome(
        self, episode: Episode, name: str, outcome: Outcome, *, may_change: bool
    ) -> Content:
        """Return what the model reads of a call; decide what a failure means.

        A call that `may_change` the environment ends the episode if it is late: that may still happen at any time.
        """
        failure = outcome.failure
        episode.add_call(name, failure, outcome.seconds)
        if isinstance(outcome.error, BrokenEnvironmentError):
            raise outcome.error
        if failure and self.config.on_tool_error == "raise":
            raise EpisodeError(
                f"{name} failed: {outcome.fault}",
                "correct it, or set `episode.on_tool_error: tell`",
            ) from outcome.error
        if failure and (self.config.on_tool_error == "zero" or (may_change and outcome.is_late)):
            episode.end = "failed"
        elif episode.environment is not None and episode.environment.is_done:
            episode.end = "done"
        return self._shorten(episode, f"Error: {outcome.fault}" if failure else outcome.value)

    def _shorten(self, episode: Episode, content: Content) -> Content:
        shortened, was_long = self.dialogue.shorten(content, self.config.max_result_tokens)
        episode.shortened += was_long
        return shortened


def find_rows(when: str | None, rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the places of the rows for which a condition holds; all of them without one."""
    places = set(range(len(rows)))
    if when is None or not rows:
        return places
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    batch = Batch([""] * len(rows), [""] * len(rows), columns=columns)
    condition = Condition(when)
    return {number for number in places if condition.holds(batch, number)}


@contextmanager
def open_player(
    recipe: Recipe, processing_class: Any, *, stops: Sequence[int] | None = None
) -> Iterator[Player]:
    """Open the tools and environments of a recipe, and close them on the way out.

    The processing class is the tokenizer, or the processor if the recipe has images; `stops` are by default the
    tokenizer's end tokens.

    Raises `EpisodeError` if a kind cannot be opened, or the chat template will not do, and `SetupError` if a
    package is missing.
    """
    with ExitStack() as stack:
        tools: list[tuple[Tool, str | None]] = []
        for index, config in enumerate(recipe.tools):
            opened = _open(stack, "tools", index, config)
            tools += [(tool, config.when) for tool in opened.tools]
        sources = [
            (_open(stack, "environment", index, config), config.when)
            for index, config in enumerate(recipe.environment)
        ]
        if name := find_repeated([tool for tool, _ in tools]):
            raise EpisodeError(f"two tools have the name {name!r}", "rename one", path="tools")
        dialogue = Dialogue(
            processing_class,
            has_tools=bool(tools) or any(source.has_tools for source, _ in sources),
            template_kwargs=recipe.setting("chat_template_kwargs"),
            stops=stops,
            **recipe.generation.reading,
        )
        yield Player(
            recipe.episode,
            dialogue,
            tools,
            sources,
            max_tokens=recipe.generation.max_completion_length,
            seed=recipe.seed,
        )


def _open(stack: ExitStack, section: str, index: int, config: KindConfig) -> Any:
    """Open an entry, which `stack` will close; an error has its path in the recipe."""
    try:
        source = open_kind(section, config)
    except GrpoError as error:
        error.path = f"{section}.{index}.{error.path}".rstrip(".")
        raise
    stack.callback(source.close)
    return source


def sample_episodes(
    player: Player,
    rows: Sequence[Mapping[str, Any]],
    draw: Callable[..., list[list[int]]],
    *,
    samples_per_prompt: int = 1,
    batch_size: int = 32,
    agree: Agree = _alone,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[list[Completion]]:
    """Play `samples_per_prompt` episodes of each row outside of training, `batch_size` side by side.

    `draw` returns answers to prompts of token ids, each of at most so many tokens; it gets `images` as a
    `Sampler`. `on_progress` is called after each batch with the episodes played and their total.
    """
    queue = [row for row in rows for _ in range(samples_per_prompt)]
    played: list[Completion] = []
    for start in range(0, len(queue), batch_size):
        episodes = player.begin(queue[start : start + batch_size])

        def sample(ids: list[list[int]], most: int, **options: Any) -> Sampled:
            return Sampled(draw(ids, most, **options))

        player.play(episodes, sample, agree)
        played += [_as_completion(each, player.reads_images) for each in episodes]
        if on_progress is not None:
            on_progress(len(played), len(queue))
    return [
        played[place : place + samples_per_prompt]
        for place in range(0, len(played), samples_per_prompt)
    ]


def _as_completion(episode: Episode, reads_images: bool) -> Completion:
    return Completion(
        completion_text(episode.messages),
        tuple(episode.own_ids),
        clipped=is_clipped(episode.end),
        prompt=episode.prompt,
        messages=tuple(episode.messages),
        episode=episode.as_json(),
        sequence=(episode.prompt_ids, episode.token_ids, episode.mask),
        images=tuple(episode.images) if reads_images else None,
    )
