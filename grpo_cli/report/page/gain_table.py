"""The held-out measurements of runs in tables, and how a number is written with its interval."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.analysis.metrics import Metric
from grpo_cli.report.page.held_out import SHARES, direction, sort_names
from grpo_cli.report.page.run_data import RunData

_SCORES = ("accuracy/", "reward")
"""How metrics begin of which several may say the same."""


@dataclass(frozen=True)
class MeasuredRow:
    """One held-out metric."""

    name: str
    same: tuple[str, ...]
    """Metrics that have the same numbers, and no row of their own."""
    before: str
    after: str
    change: str
    tone: str
    """`good` or `bad` where the change is beyond doubt and it is known which way is better."""
    prompts: int


def list_measured(run: RunData) -> list[MeasuredRow]:
    """Every held-out metric before and after, with intervals; what says the same twice is in one row."""
    gain = run.gain
    groups = group_equal(gain.names, gain.before, gain.after, gain.change, *gain.values.values())
    return [_measured_row(run, name, same) for name, *same in groups]


def group_equal(names: Iterable[str], *columns: Mapping[str, Any]) -> list[list[str]]:
    """Names of metrics, what says most first; accuracies and rewards together that are equal in every column."""
    groups: list[list[str]] = []
    for name in sort_names(names):
        equal = (
            group
            for group in groups
            if name.startswith(_SCORES)
            and group[0].startswith(_SCORES)
            and all(column.get(name) == column.get(group[0]) for column in columns)
        )
        group = next(equal, None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return groups


def rank_runs(runs: Sequence[RunData]) -> tuple[str, list[int]]:
    """The held-out metric that most runs have, and the places of the runs, the highest value first.

    Without a measurement, the metric is empty and the training reward decides.
    """
    primary = [each for run in runs if (each := run.gain.primary)]
    metric = max(primary, key=primary.count, default="")

    def score(place: int) -> tuple[bool, float]:
        found, course = runs[place].gain.after.get(metric), runs[place].course("reward")
        value = found.value if found else course.change.now if course and not metric else None
        return value is not None, value or 0.0

    return metric, sorted(range(len(runs)), key=score, reverse=True)


def _measured_row(run: RunData, name: str, same: Sequence[str]) -> MeasuredRow:
    before, after = run.gain.before.get(name), run.gain.after.get(name)
    change = run.gain.change.get(name)
    told = change or after or before
    return MeasuredRow(
        name,
        tuple(same),
        format_metric(before),
        format_metric(after),
        format_metric(change, "+.3f") if change else "–",
        tone_of(name, change),
        told.prompts if told else 0,
    )


def gather_notes(metrics: Mapping[str, Metric], names: Iterable[str]) -> dict[str, list[str]]:
    """Each reason why there is no interval, with those of the named metrics that have none."""
    found: dict[str, list[str]] = {}
    for name in names:
        metric = metrics.get(name)
        if metric and metric.low is None and metric.reason:
            found.setdefault(metric.reason, []).append(name)
    return found


def tone_of(name: str, change: Metric | None) -> str:
    """Whether a difference is good or bad; empty where that is open, or nobody can say which way is better."""
    if not name.startswith((*SHARES, "reward", "likelihood_gap")):
        return ""
    return {1: "good", 0: "", -1: "bad"}[direction(change)]


def format_metric(metric: Metric | None, form: str = ".3f") -> str:
    """A mean with its interval, such as `0.810 (0.722 to 0.875)`."""
    if metric is None or metric.value is None:
        return "–"
    digits = form if abs(metric.value) < 100 else form.replace(".3", ".1")
    interval = "" if metric.low is None else f" ({metric.low:{digits}} to {metric.high:{digits}})"
    return f"{metric.value:{digits}}{interval}".replace("-", "−")
