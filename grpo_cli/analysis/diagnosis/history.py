"""What rules read: a run's recipe, its metrics as series, and the measurements before and after.

Grows record by record, so that a training in progress is judged by the same rules as a finished run.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from grpo_cli.analysis.diagnosis.answers import Answers, read_answers
from grpo_cli.errors import UsageError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.runs.checkpoints import whole_checkpoints
from grpo_cli.runs.files import read_object
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import read_records
from grpo_cli.runs.status import StatusFile

Point = tuple[int, float | None]
"""Optimizer step, and the value logged there; None stands for NaN and infinities."""
_NOT_METRICS = frozenset({"schema_version", "time", "event", "step", "total_steps"})
_PLACEHOLDER = "NAME"
_LARGEST = 1e100
"""Beyond it a damaged value tells nothing more, and its square is no number."""
PEAK_WIDTH = 10
"""Records that the mean of a peak is over."""


@dataclass(frozen=True)
class Peak:
    """The best a metric has been, as a mean of consecutive records."""

    step: int
    """Of the last of these records."""
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of the records."""
        return fmean(self.values)


@dataclass
class _PeakSearch:
    """Looks at each record once, however often the peak is asked for."""

    best: Peak | None = None
    seen: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=PEAK_WIDTH))

    def look(self, points: list[Point]) -> Peak | None:
        for step, value in points[self.seen :]:
            if value is None:
                continue
            self.recent.append(value)
            full = len(self.recent) == PEAK_WIDTH
            if full and (self.best is None or fmean(self.recent) > self.best.mean):
                self.best = Peak(step, tuple(self.recent))
        self.seen = len(points)
        return self.best


@dataclass
class History:
    """One run, as far as it has come."""

    recipe: Recipe
    series: dict[str, list[Point]] = field(default_factory=dict)
    """Metric, by its name in `metrics.jsonl` → its records in their order."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """The measurement before training, as in `eval/before.json`; empty where there is none."""
    after: Mapping[str, Any] = field(default_factory=dict)
    said_before: Answers | None = None
    """What the model said to held-out prompts before training; None where nobody has looked."""
    said_after: Answers | None = None
    source: str = "RECIPE"
    """What commands take as its recipe: the path of its `resolved.json`, where that is known."""
    run: str | None = None
    """The path of its folder, where that is known."""
    checkpoints: tuple[int, ...] | None = None
    """Steps of the checkpoints that are there; None where nobody has looked."""
    step: int = 0
    """Of the newest record."""
    total_steps: int | None = None
    lost_at: int | None = None
    """The step whose loss was no number, which ended the run before there was a record of it."""
    _peaks: dict[str, _PeakSearch] = field(default_factory=dict, repr=False, compare=False)

    def add(self, record: Mapping[str, Any]) -> None:
        """Takes a record of `metrics.jsonl`: of training, of evaluation, or a measurement; passes over others."""
        event, step = record.get("event"), record.get("step")
        if event == "measure":
            self._take_measurement(record)
        if event not in ("train", "eval") or not isinstance(step, int):
            return
        self.step = step
        total = record.get("total_steps")
        self.total_steps = total if isinstance(total, int) else self.total_steps
        for name, value in record.items():
            if name not in _NOT_METRICS and (value is None or isinstance(value, int | float)):
                self.series.setdefault(name, []).append((self.step, _read_number(value)))

    def _take_measurement(self, record: Mapping[str, Any]) -> None:
        if record.get("when") == "before":
            self.before = record
        elif record.get("when") == "after":
            self.after = record

    def count(self, metric: str) -> int:
        """How many records a metric has; of `rewards/NAME/mean`, whichever has most."""
        if _PLACEHOLDER not in metric:
            return len(self.series.get(metric, ()))
        start, _, end = metric.partition(_PLACEHOLDER)
        return max(
            (len(points) for name, points in self.series.items() if _fits(name, start, end)),
            default=0,
        )

    def last(self, metric: str, width: int) -> list[float]:
        """The last `width` values of a metric that are numbers; fewer where there are not so many."""
        return [value for _, value in self.series.get(metric, ())[-width:] if value is not None]

    def first(self, metric: str, width: int) -> list[float]:
        """The values among the first `width` records of a metric that are numbers."""
        return [value for _, value in self.series.get(metric, ())[:width] if value is not None]

    def up_to(self, metric: str, step: int, width: int) -> list[float]:
        """The last `width` values of a metric at a step or before it."""
        points = self.series.get(metric, [])
        end = bisect_right(points, step, key=lambda point: point[0])
        return [value for _, value in points[max(end - width, 0) : end] if value is not None]

    def peak(self, metric: str) -> Peak | None:
        """The best a metric has been over `PEAK_WIDTH` records; None before there are so many."""
        search = self._peaks.setdefault(metric, _PeakSearch())
        return search.look(self.series.get(metric, []))

    def rewards(self) -> Iterator[tuple[int, str, RewardConfig]]:
        """Each reward's place in the recipe, its name in the metrics, and its entry.

        They are logged in the recipe's order. Nothing where their numbers differ: the metrics are then
        another recipe's.
        """
        start, end = "rewards/", "/mean"
        names = [name[len(start) : -len(end)] for name in self.series if _fits(name, start, end)]
        if len(names) == len(self.recipe.rewards):
            for place, (name, entry) in enumerate(zip(names, self.recipe.rewards, strict=True)):
                yield place, name, entry


def _read_number(value: float | None) -> float | None:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return float(min(max(value, -_LARGEST), _LARGEST))


def _fits(name: str, start: str, end: str) -> bool:
    return name.startswith(start) and name.endswith(end)


def read_history(run: RunFolder) -> History:
    """The history of a run, finished or not, from its folder alone.

    Raises:
        UsageError: This is not a run folder.
    """
    history = History(run.read_recipe(), source=str(run.resolved), run=str(run.path))
    for record in read_records(run.metrics):
        history.add(record)
    history.before = read_object(run.evaluations / "before.json") or history.before
    history.after = read_object(run.evaluations / "after.json") or history.after
    history.said_before = read_answers(run.evaluations / "before.jsonl")
    history.said_after = read_answers(run.evaluations / "after.jsonl")
    history.checkpoints = tuple(whole_checkpoints(run))
    history.lost_at = _find_loss(run)
    return history


def _find_loss(run: RunFolder) -> int | None:
    """The step whose batch the trainer kept, because its loss was no number."""
    try:
        status = StatusFile(run.status).read()
    except UsageError:
        return None
    kept = any(run.path.glob("bad_batch_*.pt"))
    return status.step + 1 if kept and status.state == "failed" else None
