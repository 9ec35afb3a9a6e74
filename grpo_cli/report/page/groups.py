"""Sampled groups of a run, read from its files: those of training and its evaluations, and the held-out ones.

Owns finding them, merging the parts that processes wrote, and passing over what is damaged. Files are read
twice, a line at a time: once for where each group lies, and once for the groups that are wanted.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from grpo_cli.analysis.samples import ScoredCompletion
from grpo_cli.errors import GrpoError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.report.page.held_out import Gain
from grpo_cli.rewards.building import name_rewards
from grpo_cli.runs.files import parse_json
from grpo_cli.runs.folder import RunFolder

Split = Literal["train", "eval", "held-out"]
_Score = Annotated[float, Field(allow_inf_nan=False)] | None


@dataclass
class Group:
    """The completions of one prompt, side by side."""

    split: Split
    step: int
    row: int
    prompt: Any
    """Text, or messages."""
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    clipped: list[bool] = field(default_factory=list)
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    """Of each reward, one a completion."""
    totals: list[float] = field(default_factory=list)
    """The weighted sums."""
    reasons: dict[str, list[str | None]] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)
    """For held-out groups: `before` or `after`, one a completion."""
    change: int | None = None
    """For held-out groups: 1 where the answers got better, -1 where they got worse, else 0."""


@dataclass
class Place:
    """Where a group lies: its parts, each by file, first byte and length."""

    split: Split
    step: int
    parts: list[tuple[Path, int, int]] = field(default_factory=list)


class _Line(BaseModel):
    """One line of `completions/rank_N.jsonl`."""

    model_config = ConfigDict(extra="ignore")

    step: int
    split: Literal["train", "eval"] = "train"
    row: int
    prompt: Any
    completions: list[str] = Field(min_length=1)
    tokens: list[int]
    clipped: list[bool]
    rewards: dict[str, list[_Score]]
    reasons: dict[str, list[str | None]] = {}

    def is_whole(self) -> bool:
        """Whether every list has one entry a completion."""
        lists: list[list[Any]] = [
            self.tokens,
            self.clipped,
            *self.rewards.values(),
            *self.reasons.values(),
        ]
        return all(len(each) == len(self.completions) for each in lists)


_SAMPLE = TypeAdapter(ScoredCompletion)


def find_groups(run: RunFolder) -> list[Place]:
    """Where each group of a training lies, from the first step to the last."""
    found: dict[tuple[str, int, int], Place] = {}
    for path in sorted(run.completions.glob("rank_*.jsonl")):
        for start, line in _read_lines(path):
            if (told := _read_group(line)) is not None:
                place = Place(told.split, told.step)
                place = found.setdefault((told.split, told.step, told.row), place)
                place.parts.append((path, start, len(line)))
    return sorted(found.values(), key=lambda each: each.step)


def load_groups(places: Iterable[Place], recipe: Recipe) -> Iterator[Group]:
    """Reads groups, with the weighted sums that the recipe's rewards give."""
    weights, files = read_weights(recipe), {}
    try:
        for place in places:
            group = None
            for path, start, length in place.parts:
                if path not in files:
                    files[path] = path.open("rb")
                files[path].seek(start)
                told = _read_group(files[path].read(length))
                if told is not None:
                    group = group or Group(place.split, place.step, told.row, told.prompt)
                    _add(group, told, weights)
            if group:
                yield group
    finally:
        for file in files.values():
            file.close()


def load_held_out(run: RunFolder, gain: Gain, step: int) -> list[Group]:
    """The held-out prompts with what was answered before and after.

    Where none are held out, the few prompts that a model trained on scored data is shown to answer.

    Args:
        run: The run.
        gain: Says which answers got better.
        step: Optimizer steps done.
    """
    found: dict[int, Group] = {}
    for name in ("before", "after", "answers"):
        if name == "answers" and found:
            break
        for sample in _read_samples(run.evaluations / f"{name}.jsonl"):
            group = Group("held-out", step, sample.row, sample.prompt)
            when = "before" if name == "before" else "after"
            _add_sample(found.setdefault(sample.row, group), sample, when)
    values = {when: found.get(gain.primary or "", {}) for when, found in gain.values.items()}
    for row, group in found.items():
        before, after = (values.get(when, {}).get(row) for when in ("before", "after"))
        if before is not None and after is not None:
            group.change = (after > before) - (after < before)
    return [found[row] for row in sorted(found)]


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line with the place of its first byte."""
    start = 0
    try:
        with path.open("rb") as file:
            for line in file:
                yield start, line
                start += len(line)
    except OSError:
        return


def _read_group(line: bytes) -> _Line | None:
    """A part of a group; None for a line that is torn or damaged."""
    try:
        told = _Line.model_validate_json(_whole_characters(line))
    except ValidationError:
        return None
    return told if told.is_whole() else None


def _whole_characters(line: bytes) -> bytes:
    """The line with a mark in the place of half characters, which a model that stops early leaves."""
    if b"\\ud" not in line:
        return line
    try:
        return json.dumps(parse_json(line), ensure_ascii=False).encode(errors="replace")
    except ValueError:
        return line


def read_weights(recipe: Recipe) -> Mapping[str, float]:
    """The weight of each reward in the total."""
    try:
        names = name_rewards(recipe.rewards)
    except GrpoError:
        return {}
    return {name: each.weight for name, each in zip(names, recipe.rewards, strict=True)}


def _add(group: Group, told: _Line, weights: Mapping[str, float]) -> None:
    before, count = len(group.texts), len(told.completions)
    group.texts += told.completions
    group.tokens += told.tokens
    group.clipped += told.clipped
    for kept, given in ((group.scores, told.rewards), (group.reasons, told.reasons)):
        for name in {**kept, **given}:
            values: list[Any] = kept.setdefault(name, [None] * before)
            values += given.get(name, [None] * count)
    for index in range(count):
        scores = ((weights.get(name, 1.0), values[index]) for name, values in told.rewards.items())
        group.totals.append(sum(weight * score for weight, score in scores if score is not None))


def _read_samples(path: Path) -> Iterator[ScoredCompletion]:
    for _, line in _read_lines(path):
        try:
            yield _SAMPLE.validate_json(_whole_characters(line))
        except ValidationError:
            continue


def _add_sample(group: Group, sample: ScoredCompletion, when: str) -> None:
    before = len(group.texts)
    group.texts.append(sample.text)
    group.tokens.append(sample.tokens)
    group.clipped.append(sample.clipped)
    group.totals.append(sample.total)
    group.stages.append(when)
    for kept, given in ((group.scores, sample.rewards), (group.reasons, sample.reasons)):
        for name in {**kept, **given}:
            values: list[Any] = kept.setdefault(name, [None] * before)
            values.append(given.get(name))
