"""One episode: its tokens, its messages, what became of its calls, and the metrics of many."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

from grpo_cli.environments.contract import Environment, Failure, Reward, Tool
from grpo_cli.environments.dialogue import Message
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.rewards.contract import EPISODE

End = Literal["answer", "done", "turns", "tokens", "cut_off", "malformed", "failed"]
"""Why an episode ended: an answer without a call, the environment said so, `max_turns`, `max_completion_length`,
`max_turn_tokens`, a call that cannot be parsed (`on_malformed_call: end`), or one that failed
(`on_tool_error: zero`, a late call that may still change its environment, or a reward that cannot be read)."""


class Sampled(NamedTuple):
    """Answers, one for each prompt."""

    token_ids: list[list[int]]
    """With the token that ends the answer, if there is one."""
    logprobs: list[list[float]] | None = None
    """Of these tokens; None if the sampler returns none."""
    entropies: list[list[float]] | None = None


Sampler = Callable[..., Sampled]
"""Samples answers to prompts of token ids, each of at most so many tokens. If the model reads images, it is passed
those of each prompt as `images`."""


class Call(NamedTuple):
    """One call that the model made."""

    tool: str
    failure: Failure = ""
    seconds: float = 0.0


@dataclass
class Episode:
    """One episode, from its first prompt to its end."""

    row: Mapping[str, Any]
    prompt: list[Message]
    """With what the environment added to it; its images are in `images`."""
    tools: Sequence[Tool]
    environment: Environment | None
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Of the model and of results, from the first answer on."""
    mask: list[int] = field(default_factory=list)
    """1 at the model's own tokens."""
    logprobs: list[float] | None = None
    """Of `token_ids`, 0 at tokens that are not the model's; None if the sampler returns none."""
    entropies: list[float] = field(default_factory=list)
    """Of the model's own tokens; empty if the sampler returns none."""
    messages: list[Message] = field(default_factory=list)
    """From the first answer on; without their images, which `images` holds."""
    images: list[Any] = field(default_factory=list)
    """As RGB `PIL.Image.Image`s, in the order of the messages."""
    images_read: int = 0
    """How many of them the model reads: what comes back at the end has no tokens."""
    prompt_images: int = 0
    """How many of them are the prompt's."""
    turns: int = 0
    calls: list[Call] = field(default_factory=list)
    shortened: int = 0
    """Results of which the middle was left out."""
    tool_s: float = 0.0
    end: End | None = None
    reward: Reward | None = None
    is_closed: bool = False

    @property
    def own_ids(self) -> list[int]:
        """The model's own tokens."""
        return [token for token, own in zip(self.token_ids, self.mask, strict=True) if own]

    def add_call(self, tool: str, failure: Failure = "", seconds: float = 0.0) -> None:
        """Record a call."""
        self.calls.append(Call(tool, failure, seconds))
        self.tool_s += seconds

    def as_json(self) -> dict[str, Any]:
        """Return what rewards and logs get to know of it."""
        return {
            "turns": self.turns,
            "tokens": sum(self.mask),
            "end": self.end,
            "calls": [[tool, failure, round(seconds, 4)] for tool, failure, seconds in self.calls],
            "repeated": count_repeats(self.messages),
            "shortened": self.shortened,
            "tool_s": round(self.tool_s, 4),
            "reward": self.reward,
        }


def is_clipped(end: str | None) -> bool:
    """Return whether a limit of tokens ended an episode, though its last answer may be whole."""
    return end in ("tokens", "cut_off")


def count_repeats(messages: Sequence[Message]) -> int:
    """Return how many calls, or answers to a text environment, repeat an earlier one and get the same result."""
    asked: list[Any] = []
    exchanges = []
    for message in messages:
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            asked = calls or [message.get("content")]
        elif asked:
            exchange = [asked.pop(0), message.get("content")]
            exchanges.append(json.dumps(exchange, sort_keys=True, default=str))
    return len(exchanges) - len(set(exchanges))


def add_empty_records(data: Any, *, has_images: bool) -> Any:
    """Return a dataset with the record of an episode of one answer in each row, for rewards that read it.

    With `has_images` rows have images too, though their prompts may have none.
    """
    record = Episode({}, [], (), None, turns=1, end="answer").as_json()
    others = [name for name in data.column_names if name != EPISODE]
    data = data.select_columns(others).add_column(EPISODE, [record] * len(data))
    if has_images and IMAGES not in others:
        data = data.add_column(IMAGES, [[] for _ in range(len(data))])
    return data


def episode_metrics(records: Sequence[Mapping[str, Any]], tools: Sequence[str]) -> dict[str, float]:
    """Return the means over episodes that training logs: the same names for the same tools."""
    calls = [call for record in records for call in record["calls"]]
    count, turns = len(records), sum(record["turns"] for record in records)
    failures = Counter(failure for _, failure, _ in calls)
    names = Counter(name for name, _, _ in calls)
    rewards = [record["reward"] for record in records if isinstance(record["reward"], Mapping)]
    return {
        "episode/turns": turns / count,
        "episode/tokens_per_turn": sum(record["tokens"] for record in records) / max(turns, 1),
        "episode/tool_seconds": fmean(record["tool_s"] for record in records),
        "episode/shortened_results": fmean(record["shortened"] for record in records),
        **{
            f"episode/end/{end}": sum(record["end"] == end for record in records) / count
            for end in get_args(End)
        },
        # TRL's names.
        "tools/call_frequency": len(calls) / count,
        "tools/failure_frequency": (len(calls) - failures[""]) / max(len(calls), 1),
        **{f"tools/{each}": failures[each] / count for each in get_args(Failure) if each},
        "tools/repeated": fmean(record["repeated"] for record in records),
        **{f"tools/{name}/calls": names[name] / count for name in tools},
        **{
            f"episode/reward/{part}": fmean(each[part] for each in rewards if part in each)
            for part in sorted({part for each in rewards for part in each})
        },
    }
