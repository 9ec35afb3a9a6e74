"""Runs side by side: in what their recipes differ, how they went, and what they reach on the same prompts.

Owns what is compared. Reads run folders alone; draws nothing. Pairing prompts is `held_out.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from grpo_cli.analysis.metrics import Metric
from grpo_cli.errors import UsageError
from grpo_cli.recipe.comparison import flatten
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.report.held_out import (
    HeldOutDifference,
    Measurement,
    compare_held_out,
    try_measurement,
)
from grpo_cli.report.reward_change import count_averaged
from grpo_cli.runs.files import SCHEMA_VERSION
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import read_records
from grpo_cli.runs.series import PHASES, StepRecord, read_step
from grpo_cli.runs.status import Status, StatusFile

_NO_SETTINGS = ("name", "description", "expect")
"""Sections that say what a run is called and where it should lie, not what is trained."""
_QUICK = ("entropy", "kl", "grad_norm")
"""Metrics that the first steps may move so far that a mean of them hides where they began."""
_HIGHER = ("reward", "rewards/")
"""How metrics begin of which the highest value is the best; others have none."""


@dataclass(frozen=True)
class SettingRow:
    """One setting that not all runs have alike."""

    path: str
    """Dotted, such as `training.learning_rate`."""
    values: tuple[Any, ...]
    """One a run; None where it is not set, or not there."""

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return {"path": self.path, "values": list(self.values)}


@dataclass(frozen=True)
class Trend:
    """Where a logged metric began, ended and was at its best, each as a mean over `width` records."""

    first: float
    """Of entropy, KL and gradient norm the first record: the first steps may move them far."""
    last: float
    best: float | None
    """None for metrics of which neither the highest nor the lowest value is the best."""
    best_step: int | None
    """Step of the last record of the best mean."""
    width: int
    """As many as the summary of a run averages: single steps are too noisy to compare."""

    def as_json(self) -> dict[str, Any]:
        """The trend as plain values."""
        return dict(vars(self))


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    name: str
    """`<name>/<timestamp>`, or its path where two are called alike."""
    folder: RunFolder
    status: Status
    trends: dict[str, Trend]
    """By metric: `reward`, `rewards/NAME`, fields of `StepRecord`, and `step_time` and `time/PHASE` in seconds."""
    held_out: dict[str, Metric]
    """The measurement after training, with 95 % intervals; empty where there is none."""
    held_out_reason: str | None
    """Why there is none."""

    def as_json(self) -> dict[str, Any]:
        """The run as plain values."""
        return {
            "name": self.name,
            "run": str(self.folder.path),
            "state": self.status.state,
            "steps": self.status.step,
            "total_steps": self.status.total_steps,
            "seconds": round(self.status.seconds, 1),
            "metrics": {name: each.as_json() for name, each in self.trends.items()},
            "held_out": {name: each.as_json() for name, each in self.held_out.items()},
            "held_out_reason": self.held_out_reason,
        }


@dataclass(frozen=True)
class RunsComparison:
    """Several runs side by side; the first is the base of the paired differences."""

    runs: tuple[ComparedRun, ...]
    settings: tuple[SettingRow, ...]
    held_out: tuple[HeldOutDifference, ...]
    """Each run but the first against the first."""

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "grpo-runs-comparison",
            "runs": [each.as_json() for each in self.runs],
            "settings": [each.as_json() for each in self.settings],
            "held_out": [each.as_json() for each in self.held_out],
        }


def compare_runs(folders: Sequence[RunFolder]) -> RunsComparison:
    """Compares runs; the first is the one the others are compared with.

    What one of them lacks (a measurement, metrics) is told in the result and refuses nothing.

    Raises:
        UsageError: A folder is no run, or its recipe or status cannot be read.
    """
    names = name_runs(folders)
    recipes = [folder.read_recipe() for folder in folders]
    measured = [try_measurement(folder, name) for folder, name in zip(folders, names, strict=True)]
    return RunsComparison(
        tuple(map(_read_run, names, folders, measured)),
        tuple(list_settings(recipes)),
        tuple(
            compare_held_out(measured[0], other, (names[0], name))
            for name, other in zip(names[1:], measured[1:], strict=True)
        ),
    )


def name_runs(folders: Sequence[RunFolder]) -> list[str]:
    """`<name>/<timestamp>` of each run; the path where that would be said twice."""
    short = ["/".join(folder.path.absolute().parts[-2:]) for folder in folders]
    return [
        name if short.count(name) == 1 else str(folder.path)
        for name, folder in zip(short, folders, strict=True)
    ]


def list_settings(recipes: Sequence[Recipe]) -> list[SettingRow]:
    """The settings that recipes do not have alike, in the order of the schema."""
    told = [
        dict(flatten(recipe.model_dump(mode="json", exclude=set(_NO_SETTINGS))))
        for recipe in recipes
    ]
    rows = [
        SettingRow(path, tuple(each.get(path) for each in told))
        for path in dict.fromkeys(path for each in told for path in each)
    ]
    return [row for row in rows if any(value != row.values[0] for value in row.values)]


def read_trends(steps: Sequence[StepRecord]) -> dict[str, Trend]:
    """The course of each main metric, those that were logged."""
    fields = (
        "zero_signal",
        "completion_length",
        "clipped",
        "entropy",
        "kl",
        "grad_norm",
        "tokens_per_s",
    )
    columns = {
        "reward": [(each.step, each.reward) for each in steps],
        **{
            f"rewards/{name}": [(each.step, each.rewards.get(name)) for each in steps]
            for name in dict.fromkeys(name for each in steps for name in each.rewards)
        },
        **{name: [(each.step, getattr(each, name)) for each in steps] for name in fields},
        "step_time": [(each.step, each.step_time_s) for each in steps],
        **{
            f"time/{phase}": [(each.step, each.phases_s.get(phase)) for each in steps]
            for phase in PHASES
        },
    }
    found = {name: _read_trend(name, points) for name, points in columns.items()}
    return {name: trend for name, trend in found.items() if trend is not None}


def _read_run(name: str, folder: RunFolder, measured: Measurement | UsageError) -> ComparedRun:
    steps = [step for record in read_records(folder.metrics) if (step := read_step(record))]
    lacking = isinstance(measured, UsageError)
    return ComparedRun(
        name,
        folder,
        StatusFile(folder.status).read(),
        read_trends(steps),
        {} if isinstance(measured, UsageError) else measured.metrics,
        str(measured) if lacking else None,
    )


def _read_trend(name: str, points: Sequence[tuple[int, float | None]]) -> Trend | None:
    known = [(step, value) for step, value in points if value is not None]
    if not known:
        return None
    width = count_averaged(len(known))
    sums = list(accumulate((value for _, value in known), initial=0.0))
    means = [(sums[end] - sums[end - width]) / width for end in range(width, len(sums))]
    if not name.startswith(_HIGHER):
        first = known[0][1] if name in _QUICK else means[0]
        return Trend(first, means[-1], None, None, width)
    # The earliest of equally good ones: it needed the fewest steps.
    best = max(range(len(means)), key=means.__getitem__)
    return Trend(means[0], means[-1], means[best], known[best + width - 1][0], width)
