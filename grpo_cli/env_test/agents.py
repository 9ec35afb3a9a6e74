"""Scripted agents: they play a recipe's episodes in place of a model, right, wrong and degenerate."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo_cli.env_test.instances import WRONG, Row, Trial, example_arguments
from grpo_cli.environments.dialogue import Dialogue
from grpo_cli.environments.episode import Episode, Sampled
from grpo_cli.environments.player import Player

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


def make_agents(dialogue: Dialogue, *, has_gold: bool, has_tools: bool) -> dict[str, Answers]:
    """Return the agents that make sense for a recipe."""
    golds: dict[int, list[Any]] = {}

    def gold(episode: Episode) -> str:
        if episode.turns == 0 and episode.environment is not None:
            golds[id(episode)] = list(episode.environment.gold() or ())
        answers = golds.get(id(episode), [])
        answer = answers[episode.turns] if episode.turns < len(answers) else ""
        if isinstance(answer, str):
            return answer
        return dialogue.write_call(answer["name"], answer.get("arguments") or {}) or ""

    def repeat(episode: Episode) -> str:
        if not episode.tools:
            return WRONG
        # The environment's own tools come last.
        tool = episode.tools[-1]
        return dialogue.write_call(tool.name, example_arguments(tool.schema)) or ""

    def malformed(episode: Episode) -> str:
        key, value = "key_b9d4f5", "value_d6e7a9"
        name = episode.tools[-1].name if episode.tools else ""
        text = (dialogue.write_call(name, {key: value}) or "") if name else ""
        if key not in text or value not in text:
            return ""
        # Its argument is cut out of the middle.
        return text[: text.index(key)] + text[text.index(value) + len(value) :]

    agents: dict[str, Answers] = {GOLD: gold} if has_gold else {}
    agents |= {"silent": lambda episode: "", "oversized": lambda episode: None, "repeating": repeat}
    if has_tools and (unknown := dialogue.write_call(_UNKNOWN, {})) is not None:
        agents |= {"malformed call": malformed, "unknown tool": lambda episode: unknown}
    return agents


def _encode(dialogue: Dialogue, text: str | None, most: int) -> list[int]:
    if text is None:
        ids = dialogue.encode_text(_LOOP) or [0]
        return [token for token in ids * most if token not in dialogue.stops][:most]
    own = dialogue.tokenizer.eos_token_id
    end = own if own in dialogue.stops else min(dialogue.stops)
    return [*(dialogue.encode_text(text) if text else ()), end][:most]


def play_agent(
    player: Player, rows: Sequence[Row], name: str, answers: Answers, score: Totals, trial: Trial
) -> AgentResult:
    """Play an episode of each row with an agent; `score` gives the recipe's rewards, `trial` keeps times of calls.

    Raises `GrpoError` if a call failed and `on_tool_error` is `raise`, or a reward fails.
    """
    episodes = player.begin(rows)
    first: list[int] = []

    def sample(prompts: Sequence[Any], most: int, images: Any = None) -> Sampled:
        active = [each for each in episodes if each.end is None]
        ids = [_encode(player.dialogue, answers(each), most) for each in active]
        first[:] = first or ids[0]
        return Sampled(ids)

    player.play(episodes, sample)
    calls = [call for each in episodes for call in each.calls]
    for call in calls:
        if not call.failure:
            trial.seconds[f"{call.tool}()"].append(call.seconds)
    totals = [total for total in score(episodes) if total is not None]
    return AgentResult(
        name,
        len(episodes),
        fmean(totals) if totals else None,
        fmean(each.turns for each in episodes),
        dict(Counter(each.end or "" for each in episodes)),
        dict(Counter(call.failure for call in calls if call.failure)),
        player.dialogue.tokenizer.decode(first, skip_special_tokens=True),
    )
