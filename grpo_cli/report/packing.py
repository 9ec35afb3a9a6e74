"""Groups of completions packed for a page: an index to filter by, and texts in blocks that are read when needed.

`assets/browser.js` reads this layout. Base64 has no character that HTML or JavaScript gives a meaning to.
"""

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from grpo_cli.report.summary import RunReport
from grpo_cli.report.wording import list_turns, say_episode
from grpo_cli.rewards.scoring import weighted_sum
from grpo_cli.runs.completions import Group, find_groups, load_groups, show_content
from grpo_cli.runs.metrics import STAGES, When

TRAINING_BYTES = 12_000_000
"""Most bytes that the groups of training may take in a page."""
HELD_OUT_BYTES = 2_000_000
_BLOCK_CHARACTERS = 400_000
_TRIAL = 48
"""Groups that are packed to see how small they get."""
_SPLITS = ("train", "eval", "held-out")
_STAGES = tuple(STAGES)
_SAMPLED: tuple[When | Literal["answers"], ...] = (*_STAGES, "answers")
_DIGITS = 6

Item = TypeVar("Item")


def pack_text(text: str) -> str:
    """Return a text as base64 of gzip; the same text always gives the same."""
    # Half of a surrogate pair, which a model may well write, is not UTF-8.
    data = text.encode("utf-8", errors="replace")
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode("ascii")


def pack_json(value: Any) -> str:
    """Return plain values as base64 of gzipped JSON."""
    return pack_text(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str))


@dataclass(frozen=True)
class Pack:
    """Groups of one run, ready for the page."""

    run: str
    index: str
    """What can be filtered by without reading a text."""
    prompts: str
    blocks: tuple[str, ...]
    """Texts and reasons, many groups each."""
    images: str
    """Small copies of the prompts' images, each once; empty if there are none."""
    groups: int
    completions: int
    available: int
    has_changes: bool
    """Whether answers were compared before and after."""

    @property
    def size(self) -> int:
        """Bytes in the page."""
        parts = (self.index, self.prompts, self.images, *self.blocks)
        return sum(map(len, parts))


@dataclass
class _Entry:
    """A group, and what is known of a held-out one."""

    group: Group
    stages: list[When] = field(default_factory=list)
    """Of `_STAGES`, one a completion."""
    change: int | None = None
    """1 if the answers got better, -1 if they got worse, else 0."""


@dataclass
class _Packer:
    """Takes groups one by one, so that only packed ones stay in memory."""

    weights: Mapping[str, float]
    thumbnails: Mapping[str, str]
    images: dict[str, int] = field(default_factory=dict)
    """The place of each copy in the page, by its name in prompts."""
    prompts: dict[str, int] = field(default_factory=dict)
    groups: list[list[Any]] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {"totals": [], "tokens": [], "clipped": [], "stages": []}
    )
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    open_block: list[dict[str, Any]] = field(default_factory=list)
    characters: int = 0

    def add(self, entry: _Entry) -> None:
        group, before = entry.group, len(self.columns["totals"])
        prompt = json.dumps(self._as_turns(group.prompt), ensure_ascii=False)
        place = self.prompts.setdefault(prompt, len(self.prompts))
        split, count = _SPLITS.index(group.split), len(group.texts)
        where = [len(self.blocks), len(self.open_block)]
        self.groups.append([split, group.step, group.row, place, count, *where, entry.change])
        weights = [self.weights.get(name, 1.0) for name in group.rewards]
        scores = list(zip(*group.rewards.values(), strict=True)) or [()] * count
        totals = [weighted_sum(weights, each) for each in scores]
        self.columns["totals"] += map(_round, totals)
        self.columns["tokens"] += group.tokens
        self.columns["clipped"] += [int(each) for each in group.clipped]
        self.columns["stages"] += [_STAGES.index(each) for each in entry.stages]
        # A reward that appears late has no scores before.
        for name in {**self.scores, **group.rewards}:
            values = group.rewards.get(name, [None] * count)
            column = self.scores.setdefault(name, [None] * before)
            column += map(_round, values)
        texts = {"t": group.texts, "r": group.reasons, **_describe_episodes(group)}
        self.open_block.append(texts)
        self.characters += sum(map(len, group.texts))
        self.characters += sum(len(turn.text) for turns in texts.get("m", ()) for turn in turns)
        if self.characters > _BLOCK_CHARACTERS:
            self._close_block()

    def _as_turns(self, prompt: Any) -> list[list[Any]]:
        """Return role and text of each message, and its parts if images are shown; plain text has no role."""
        if not isinstance(prompt, list):
            return [["", show_content(prompt)]]
        return [self._as_turn(message) for message in prompt]

    def _as_turn(self, message: Mapping[str, Any]) -> list[Any]:
        content = message.get("content", "")
        turn = [str(message.get("role", "")), show_content(content)]
        parts = [self._show(part) for part in content] if isinstance(content, list) else []
        return turn if all(isinstance(part, str) for part in parts) else [*turn, parts]

    def _show(self, part: Any) -> Any:
        """Return a part of a message as text; of an image that is shown, its place and its text."""
        name = str(part.get("thumbnail")) if isinstance(part, Mapping) else ""
        if name not in self.thumbnails:
            return show_content([part])
        return [self.images.setdefault(name, len(self.images)), show_content([part])]

    def _close_block(self) -> None:
        self.blocks.append(pack_json(self.open_block))
        self.open_block, self.characters = [], 0

    def finish(self, run: str, available: int) -> Pack:
        if self.open_block:
            self._close_block()
        index = {
            "rewards": list(self.scores),
            "weights": [self.weights.get(name, 1.0) for name in self.scores],
            "groups": self.groups,
            "scores": list(self.scores.values()),
            **self.columns,
        }
        prompts = [json.loads(prompt) for prompt in self.prompts]
        return Pack(
            run,
            pack_json(index),
            pack_json(prompts),
            tuple(self.blocks),
            pack_json([self.thumbnails[name] for name in self.images]) if self.images else "",
            len(self.groups),
            len(self.columns["totals"]),
            available,
            any(group[-1] is not None for group in self.groups),
        )


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def pack_training(run: RunReport, most_bytes: int = TRAINING_BYTES) -> Pack | None:
    """Pack the groups sampled in training and its evaluations; None if there are none."""
    groups = find_groups(run.folder)
    return _fit(run, groups, lambda chosen: map(_Entry, load_groups(chosen)), most_bytes)


def pack_held_out(run: RunReport, most_bytes: int = HELD_OUT_BYTES) -> Pack | None:
    """Pack the held-out prompts with the answers of each measurement; None if these are not there."""
    return _fit(run, _held_out_entries(run), iter, most_bytes)


def _held_out_entries(run: RunReport) -> list[_Entry]:
    """Return held-out prompts with their answers, or the few that a model trained on scored data answers."""
    entries: dict[int, _Entry] = {}
    for when in _SAMPLED:
        if when == "answers" and entries:
            break
        for sample in run.samples(when):
            new = _Entry(Group("held-out", run.step, sample["row"], sample["prompt"]))
            entry = entries.setdefault(sample["row"], new)
            part: dict[str, Any] = {
                name: {reward: [value] for reward, value in sample[name].items()}
                for name in ("rewards", "reasons")
            }
            part |= {name: [sample[name]] for name in ("tokens", "clipped")}
            part |= {"completions": [sample["text"]], "messages": [], "episodes": []}
            if sample["messages"]:
                part |= {"messages": [sample["messages"]], "episodes": [sample["episode"]]}
            entry.group.add(part)
            entry.stages.append("after" if when == "answers" else when)
    primary = {
        stage: each.get(run.held_out.primary, {}) for stage, each in run.held_out.values.items()
    }
    for row, entry in entries.items():
        before, after = (primary.get(stage, {}).get(row) for stage in ("before", "after"))
        if before is not None and after is not None:
            entry.change = (after > before) - (after < before)
    return [entries[row] for row in sorted(entries)]


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` items at equal distances, the first and the last among them."""
    if count >= len(items):
        return list(items)
    if count < 2:
        return list(items[:count])
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def _fit(
    run: RunReport,
    items: Sequence[Item],
    load: Callable[[Iterable[Item]], Iterator[_Entry]],
    most_bytes: int,
) -> Pack | None:
    """Pack as many whole groups as there is room for, spread evenly."""
    if not items:
        return None

    def pack(count: int) -> Pack:
        packer = _Packer(run.weights, run.thumbnails)
        for entry in load(spread(items, count)):
            packer.add(entry)
        return packer.finish(run.name, len(items))

    # A few groups share less with each other than many do: this is too high, rather than too low.
    trial = min(_TRIAL, len(items))
    count = min(int(most_bytes * trial / pack(trial).size) + 1, len(items))
    while True:
        packed = pack(count)
        if packed.size <= most_bytes or count <= 1:
            return packed
        count = max(int(count * most_bytes / packed.size * 0.97), 1)


def _describe_episodes(group: Group) -> dict[str, Any]:
    """Return the turns of each episode, and how it went; nothing if a completion is one answer."""
    if not len(group.messages) == len(group.episodes) == len(group.texts):
        return {}
    return {"m": list(map(list_turns, group.messages)), "e": list(map(say_episode, group.episodes))}
