"""Scripted agents: they play a recipe's episodes in place of a model, right, wrong and degenerate."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from grpo_cli.data.images import in_parts
from grpo_cli.environments.contract import Tool
from grpo_cli.environments.episode import Episode, Sampled
from grpo_cli.environments.instances import WRONG, Row, example_arguments
from grpo_cli.environments.player import Player
from grpo_cli.fast.prompts import apply_template

Answers = Callable[[Episode], str | None]
"""Returns an agent's next answer; None for one that never ends."""
Totals = Callable[[Sequence[Episode]], Sequence[float | None]]
"""Returns the recipe's reward for each episode; None if none applies."""
GOLD = "gold"
_LOOP = "let me think again "
_UNKNOWN = "no_such_tool"


@dataclass(frozen=True)
class AgentResult:
    """What became of one agent's episodes."""

    name: str
    episodes: int
    reward: float | None
    """Mean of the recipe's rewards; None if none applies."""
    turns: float
    ends: dict[str, int]
    """Episodes by why they ended."""
    failures: dict[str, int]
    """Calls that failed, by how."""
    answer: str
    """The first answer of the first episode."""


@dataclass
class Script:
    """Writes the answers of agents with a model's tokenizer."""

    tokenizer: Any
    stops: Sequence[int]
    """Tokens that end an answer."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    processor: Any = None
    """Of a model that reads images; otherwise None or the tokenizer."""

    def encode(self, text: str | None, most: int) -> list[int]:
        """Return the tokens of an answer; at most so many."""
        if text is None:
            ids = self.tokenizer(_LOOP, add_special_tokens=False)["input_ids"] or [0]
            return [token for token in ids * most if token not in self.stops][:most]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        own = self.tokenizer.eos_token_id
        return [*ids, own if own in self.stops else self.stops[0]][:most]

    def count(self, text: str) -> int:
        """Return how many tokens a text is."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return a call as the chat template writes it; None if it cannot be cut out of the dialogue."""
        call = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        question = {"role": "user", "content": "q"}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        start = self._render([question], add_generation_prompt=True)
        whole = self._render([question, calling], add_generation_prompt=False)
        if not whole.startswith(start):
            return None
        text = whole[len(start) :]
        return text.rpartition(self.tokenizer.eos_token)[0] or text

    def _render(self, messages: list[Any], **options: Any) -> str:
        options = {"tokenize": False, **self.template_kwargs, **options}
        renderer = self.processor or self.tokenizer
        if renderer is not self.tokenizer:
            messages = in_parts(messages)
        return str(apply_template(renderer, messages, **options))

    def break_call(self, tool: Tool) -> str | None:
        """Return a call that cannot be parsed: its argument is cut out of the middle."""
        key, value = "key_b9d4f5", "value_d6e7a9"
        text = self.write_call(tool.name, {key: value})
        if text is None or key not in text or value not in text:
            return None
        return text[: text.index(key)] + text[text.index(value) + len(value) :]


def make_agents(script: Script, *, has_tools: bool) -> dict[str, Answers]:
    """Return the agents that make sense for a recipe."""

    def repeat(episode: Episode) -> str:
        if not episode.tools:
            return WRONG
        # The environment's own tools come last.
        tool = episode.tools[-1]
        return script.write_call(tool.name, example_arguments(tool.schema)) or ""

    def malformed(episode: Episode) -> str:
        return (script.break_call(episode.tools[-1]) or "") if episode.tools else ""

    agents: dict[str, Answers] = {
        "silent": lambda episode: "",
        "oversized": lambda episode: None,
        "repeating": repeat,
    }
    if has_tools and (unknown := script.write_call(_UNKNOWN, {})) is not None:
        agents |= {"malformed call": malformed, "unknown tool": lambda episode: unknown}
    return agents


class Gold:
    """The agent that gives the answers which the environment says should win, one a turn."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._golds: dict[int, list[Any]] = {}

    def __call__(self, episode: Episode) -> str:
        """Return the next answer; empty once there is none."""
        if episode.turns == 0 and episode.environment is not None:
            self._golds[id(episode)] = list(episode.environment.gold() or ())
        golds = self._golds.get(id(episode), [])
        gold = golds[episode.turns] if episode.turns < len(golds) else ""
        if isinstance(gold, str):
            return gold
        return self._script.write_call(gold["name"], gold.get("arguments") or {}) or ""


def play_agent(
    player: Player,
    rows: Sequence[Row],
    script: Script,
    name: str,
    answers: Answers,
    score: Totals,
) -> tuple[AgentResult, list[Episode]]:
    """Play an episode of each row with an agent, whose answers are written by `script` and scored by `score`.

    Raises:
        GrpoError: A call failed and `on_tool_error` is `raise`, or a reward fails.
    """
    episodes = player.begin(rows)

    first: list[int] = []

    def sample(prompts: Sequence[Any], most: int, images: Any = None) -> Sampled:
        active = [each for each in episodes if each.end is None]
        ids = [script.encode(answers(each), most) for each in active]
        first[:] = first or ids[0]
        return Sampled(ids)

    player.play(episodes, sample)
    totals = [total for total in score(episodes) if total is not None]
    result = AgentResult(
        name,
        len(episodes),
        fmean(totals) if totals else None,
        fmean(each.turns for each in episodes),
        dict(Counter(each.end or "" for each in episodes)),
        dict(Counter(call.failure for each in episodes for call in each.calls if call.failure)),
        script.tokenizer.decode(first, skip_special_tokens=True),
    )
    return result, episodes
