"""`completions/rank_N.jsonl`: the groups sampled in training, found first and loaded one by one."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import parse_records
from grpo_cli.runs.records import read_group


@dataclass
class Group:
    """The completions of one prompt."""

    split: str
    """`train`, `eval` or `held-out`."""
    step: int
    row: int
    prompt: Any
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    clipped: list[bool] = field(default_factory=list)
    rewards: dict[str, list[float | None]] = field(default_factory=dict)
    reasons: dict[str, list[str | None]] = field(default_factory=dict)
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    """The messages of each episode after its prompt; empty if a completion is one answer."""
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """The record of each episode, as `messages`."""

    def add(self, part: Mapping[str, Any]) -> None:
        """Add completions as a process records them; a reward without a score for some has None there."""
        before, count = len(self.texts), len(part["completions"])
        self.texts += part["completions"]
        self.tokens += part["tokens"]
        self.clipped += part["clipped"]
        self.messages += part["messages"]
        self.episodes += part["episodes"]
        scores = (self.rewards, part["rewards"]), (self.reasons, part["reasons"])
        for kept, new in scores:
            for name in {**kept, **new}:
                values: list[Any] = kept.setdefault(name, [None] * before)
                values += new.get(name, [None] * count)


@dataclass
class GroupPlace:
    """Where a group lies: the lines that hold its parts, each by file, first byte and length."""

    step: int
    lines: list[tuple[Path, int, int]] = field(default_factory=list)


def show_content(content: Any) -> str:
    """Return what a message says as text, with `[image charts/0001.png]`, or `[image]`, where an image stands."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and "type" in part for part in parts):
        return json.dumps(content, ensure_ascii=False)
    return "".join(map(show_part, parts))


def show_part(part: Mapping[str, Any]) -> str:
    """Return a part of a message's content as text; of an image the end of its path, if it is known."""
    if part.get("text"):
        return str(part["text"])
    path = f" {'/'.join(Path(part['path']).parts[-2:])}" if part.get("path") else ""
    return f"[{part['type']}{path}]"


def find_groups(run: RunFolder) -> list[GroupPlace]:
    """Return where each sampled group lies, by step; processes may each hold a part of it."""
    places: dict[tuple[str, int, int], GroupPlace] = {}
    for path in filter(Path.is_file, sorted(run.completions.glob("rank_*.jsonl"))):
        start = 0
        with path.open("rb") as lines:
            for line in lines:
                for part in parse_records([line], read_group):
                    key = (part["split"], part["step"], part["row"])
                    place = places.setdefault(key, GroupPlace(part["step"]))
                    place.lines.append((path, start, len(line)))
                start += len(line)
    return sorted(places.values(), key=lambda place: place.step)


def load_groups(places: Iterable[GroupPlace]) -> Iterator[Group]:
    """Load groups one by one, each with all of its parts."""
    for place in places:
        group = None
        for path, start, length in place.lines:
            with path.open("rb") as file:
                file.seek(start)
                (part,) = parse_records([file.read(length)], read_group)
            group = group or Group(part["split"], part["step"], part["row"], part["prompt"])
            group.add(part)
        if group:
            yield group
