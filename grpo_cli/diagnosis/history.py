"""What rules read: a run's recipe, its metrics as series, and the measurements before and after.

Grows record by record, so that a training in progress is judged by the same rules as a finished run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import read_records

Point = tuple[int, float | None]
"""Optimizer step, and the value logged there; None stands for NaN and infinities."""
_NOT_METRICS = frozenset({"schema_version", "time", "event", "step", "total_steps"})


@dataclass
class History:
    """One run, as far as it has come."""

    recipe: Recipe
    series: dict[str, list[Point]] = field(default_factory=dict)
    """Metric, by its name in `metrics.jsonl` → its records in their order."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """The measurement before training, as in `eval/before.json`; empty where there is none."""
    after: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: tuple[int, ...] = ()
    """Steps of the checkpoints that are there."""
    step: int = 0
    """Of the newest record."""
    total_steps: int | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Takes a record of `metrics.jsonl`; other events than training and evaluation are passed over."""
        if record.get("event") not in ("train", "eval") or not isinstance(record.get("step"), int):
            return
        self.step = record["step"]
        self.total_steps = record.get("total_steps") or self.total_steps
        for name, value in record.items():
            if name not in _NOT_METRICS and (value is None or isinstance(value, int | float)):
                self.series.setdefault(name, []).append((self.step, value))

    def last(self, metric: str, width: int) -> list[float]:
        """The last `width` values of a metric that are numbers; fewer where there are not so many."""
        return [value for _, value in self.series.get(metric, ())[-width:] if value is not None]


def read_history(run: RunFolder) -> History:
    """The history of a run, finished or not, from its folder alone.

    Raises:
        UsageError: This is not a run folder.
    """
    history = History(run.read_recipe(), before=_read(run, "before"), after=_read(run, "after"))
    for record in read_records(run.metrics):
        history.add(record)
    return history


def _read(run: RunFolder, when: str) -> dict[str, Any]:
    try:
        return dict(json.loads((run.evaluations / f"{when}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
