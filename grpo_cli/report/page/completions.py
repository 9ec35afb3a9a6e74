"""Groups of completions packed for a page: an index to filter by, and texts in blocks that are read when needed.

Owns the layout that `assets/browser.js` reads, and which groups are left out where all would be too much.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpo_cli.report.page.groups import (
    Group,
    find_groups,
    load_groups,
    load_held_out,
    read_weights,
)
from grpo_cli.report.page.packing import pack_json
from grpo_cli.report.page.run_data import RunData

TRAINING_BYTES = 12_000_000
"""Most bytes that the groups of training may take in a page."""
HELD_OUT_BYTES = 2_000_000
"""The same of held-out groups."""
_BLOCK_CHARACTERS = 400_000
_TRIAL = 48
"""Groups that are packed to see how small they get."""
_SPLITS = ("train", "eval", "held-out")
_STAGES = ("before", "after")
_DIGITS = 6

Item = TypeVar("Item")


@dataclass(frozen=True)
class Pack:
    """Groups of one run, ready for the page."""

    run: str
    index: str
    """What can be filtered by without reading a text."""
    prompts: str
    blocks: tuple[str, ...]
    """Texts and reasons, many groups each."""
    groups: int
    completions: int
    found: int
    """Groups that the run has."""
    has_changes: bool
    """Whether answers were compared before and after."""

    @property
    def size(self) -> int:
        """Bytes in the page."""
        return len(self.index) + len(self.prompts) + sum(map(len, self.blocks))


@dataclass
class _Packer:
    """Takes groups one by one, so that only packed ones stay in memory."""

    weights: Mapping[str, float]
    """Of the rewards, in the total."""
    names: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    groups: list[list[Any]] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {"totals": [], "tokens": [], "clipped": [], "stages": []}
    )
    scores: list[list[float | None]] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    open_block: list[dict[str, Any]] = field(default_factory=list)
    characters: int = 0

    def add(self, group: Group) -> None:
        prompt = json.dumps(_as_turns(group.prompt), ensure_ascii=False)
        place = self.prompts.setdefault(prompt, len(self.prompts))
        split, count = _SPLITS.index(group.split), len(group.texts)
        where = [len(self.blocks), len(self.open_block)]
        self.groups.append([split, group.step, group.row, place, count, *where, group.change])
        self.columns["totals"] += [round(total, _DIGITS) for total in group.totals]
        self.columns["tokens"] += group.tokens
        self.columns["clipped"] += [int(each) for each in group.clipped]
        self.columns["stages"] += [_STAGES.index(each) for each in group.stages]
        self._add_scores(group)
        self.open_block.append({"t": group.texts, "r": group.reasons})
        self.characters += sum(map(len, group.texts))
        if self.characters > _BLOCK_CHARACTERS:
            self._close_block()

    def _add_scores(self, group: Group) -> None:
        """A column a reward; a reward that appears late has no scores before."""
        before = len(self.columns["totals"]) - len(group.texts)
        for name in group.scores:
            if name not in self.names:
                self.names[name] = len(self.names)
                self.scores.append([None] * before)
        for name, index in self.names.items():
            values = group.scores.get(name, [None] * len(group.texts))
            self.scores[index] += [None if v is None else round(v, _DIGITS) for v in values]

    def _close_block(self) -> None:
        self.blocks.append(pack_json(self.open_block))
        self.open_block, self.characters = [], 0

    def finish(self, run: str, found: int) -> Pack:
        if self.open_block:
            self._close_block()
        changes = [group[-1] for group in self.groups]
        index = {
            "rewards": list(self.names),
            "weights": [self.weights.get(name, 1.0) for name in self.names],
            "groups": self.groups,
            "scores": self.scores,
            **self.columns,
        }
        prompts = [json.loads(prompt) for prompt in self.prompts]
        return Pack(
            run,
            pack_json(index),
            pack_json(prompts),
            tuple(self.blocks),
            len(self.groups),
            len(self.columns["totals"]),
            found,
            any(change is not None for change in changes),
        )


def pack_training(run: RunData, most_bytes: int = TRAINING_BYTES) -> Pack | None:
    """The groups that were sampled in training and in its evaluations; None where there are none."""
    places = find_groups(run.folder)
    return _fit(run, places, lambda chosen: load_groups(chosen, run.recipe), most_bytes)


def pack_held_out(run: RunData, most_bytes: int = HELD_OUT_BYTES) -> Pack | None:
    """The held-out prompts, before and after; None where their answers are not there."""
    return _fit(run, load_held_out(run.folder, run.gain, run.step), iter, most_bytes)


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """So many items at equal distances, the first and the last among them."""
    if count >= len(items):
        return list(items)
    if count < 2:
        return list(items[:count])
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def _fit(
    run: RunData,
    items: Sequence[Item],
    load: Callable[[Iterable[Item]], Iterator[Group]],
    most_bytes: int,
) -> Pack | None:
    """As many whole groups as there is room for, spread evenly."""
    if not items:
        return None
    trial = spread(items, _TRIAL)
    # A few groups share less with each other than many do: this is too high, rather than too low.
    each = _pack(run, load(trial), len(items)).size / len(trial)
    count = min(int(most_bytes / each) + 1, len(items))
    while True:
        pack = _pack(run, load(spread(items, count)), len(items))
        if pack.size <= most_bytes or count <= 1:
            return pack
        count = max(int(count * most_bytes / pack.size * 0.97), 1)


def _pack(run: RunData, groups: Iterable[Group], found: int) -> Pack:
    packer = _Packer(read_weights(run.recipe))
    for group in groups:
        packer.add(group)
    return packer.finish(run.name, found)


def _as_turns(prompt: Any) -> list[list[str]]:
    """A prompt as pairs of role and text; plain text has no role."""
    if not isinstance(prompt, list):
        return [["", _as_text(prompt)]]
    return [
        [str(turn.get("role", "")), _as_text(turn.get("content", ""))]
        if isinstance(turn, dict)
        else ["", _as_text(turn)]
        for turn in prompt
    ]


def _as_text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
