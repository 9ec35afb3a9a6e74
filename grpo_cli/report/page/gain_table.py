"""The held-out measurements of a run in a table, and how a number is written with its interval."""

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_cli.measure.metrics import Metric
from grpo_cli.report.page.gains import direction
from grpo_cli.report.page.material import Material


@dataclass(frozen=True)
class MeasuredRow:
    """One held-out metric."""

    name: str
    before: str
    after: str
    change: str
    tone: str
    """`good` or `bad` where the change is beyond doubt and it is known which way is better."""
    prompts: int


def list_measured(run: Material) -> list[MeasuredRow]:
    """Every held-out metric before and after, with intervals."""
    return [_measured_row(run, name) for name in run.gain.names]


def _measured_row(run: Material, name: str) -> MeasuredRow:
    before, after = run.gain.before.get(name), run.gain.after.get(name)
    change = run.gain.change.get(name)
    told = change or after or before
    return MeasuredRow(
        name,
        format_metric(before),
        format_metric(after),
        format_metric(change, "+.3f") if change else "–",
        tone_of(name, change),
        told.prompts if told else 0,
    )


def gather_notes(metrics: Mapping[str, Metric]) -> dict[str, list[str]]:
    """Each reason why there is no interval, with the metrics that have none."""
    found: dict[str, list[str]] = {}
    for name, metric in metrics.items():
        if metric.low is None and metric.reason:
            found.setdefault(metric.reason, []).append(name)
    return found


def tone_of(name: str, change: Metric | None) -> str:
    """Whether a difference is good or bad; empty where that is open, or nobody can say which way is better."""
    if not name.startswith(("accuracy/", "reward", "pass@", "maj@", "likelihood_gap")):
        return ""
    return {1: "good", 0: "", -1: "bad"}[direction(change)]


def format_metric(metric: Metric | None, form: str = ".3f") -> str:
    """A mean with its interval, such as `0.810 (0.722 to 0.875)`."""
    if metric is None or metric.value is None:
        return "–"
    digits = form if abs(metric.value) < 100 else form.replace(".3", ".1")
    interval = "" if metric.low is None else f" ({metric.low:{digits}} to {metric.high:{digits}})"
    return f"{metric.value:{digits}}{interval}".replace("-", "−")
