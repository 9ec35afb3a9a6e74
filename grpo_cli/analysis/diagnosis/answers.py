"""What a model said to held-out prompts, as far as rules look at it: how alike, and what each reward gave it."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_cli.runs.files import parse_json


@dataclass(frozen=True)
class Answers:
    """One measurement's answers."""

    prompts: int
    """How many different ones."""
    commonest: str
    share: float
    """Of the commonest text among all answers."""
    scores: Mapping[str, Mapping[int, float]]
    """Reward, in the recipe's order → row of the data → the mean of its answers' scores."""
    totals: Mapping[int, float]
    """Row of the data → the mean of its answers' weighted sums."""


def read_answers(path: Path) -> Answers | None:
    """The answers of a measurement, as in `eval/after.jsonl`; None where there are none that can be read."""
    rows = list(_read_rows(path))
    if not rows:
        return None
    texts = Counter(row["text"].strip() for row in rows)
    commonest, count = texts.most_common(1)[0]
    prompts = len({json.dumps(row.get("prompt")) for row in rows})
    names = list(rows[0]["rewards"])
    scores = {
        name: _collect((row["row"], row["rewards"].get(name)) for row in rows) for name in names
    }
    totals = _collect((row["row"], row.get("total")) for row in rows)
    return Answers(prompts, commonest, count / len(rows), scores, totals)


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        # Not `splitlines`, which also breaks at U+2028 and its kin inside a text.
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        whole = isinstance(row, dict) and isinstance(row.get("rewards"), dict)
        if whole and isinstance(row.get("text"), str) and isinstance(row.get("row"), int):
            yield row


def _collect(given: Iterable[tuple[int, Any]]) -> dict[int, float]:
    """The mean of each row's numbers; rows without any are left out."""
    found: dict[int, list[float]] = defaultdict(list)
    for row, value in given:
        if isinstance(value, int | float) and math.isfinite(value):
            found[row].append(value)
    return {row: fmean(values) for row, values in found.items()}
