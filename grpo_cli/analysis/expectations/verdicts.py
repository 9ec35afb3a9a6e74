"""Whether a run lies where its recipe expects it, metric by metric.

Owns the comparison and its words. What runs show is `evidence.py`'s.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from grpo_cli.analysis.expectations.conditions import Mismatch, list_mismatches
from grpo_cli.analysis.expectations.run_metrics import MEASURED, RunMetrics, read_evidence
from grpo_cli.errors import UsageError
from grpo_cli.recipe.expect import ExpectConfig, ExpectedMetric
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder

Outcome = Literal["inside", "outside", "not reached", "not measured", "not logged"]
_HAIR = 1e-9
"""A mean of many floats may lie so far beside what it stands for."""


@dataclass(frozen=True)
class Verdict:
    """One metric of a run against its band."""

    metric: str
    step: int
    low: float
    high: float
    outcome: Outcome
    value: float | None = None
    """None where there is none to compare."""
    detail: str = ""
    """More of the outcome, such as `20 of 40`."""

    def as_json(self) -> dict[str, Any]:
        """The verdict as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """A run against an `expect` block."""

    run: str
    """`<name>/<timestamp>`."""
    verdicts: tuple[Verdict, ...]
    mismatches: tuple[Mismatch, ...]
    runs: int
    """How many runs the bands come from; 0 where that is not said."""
    state: str = "completed"
    """How the run ended."""

    @property
    def inside(self) -> bool:
        """Whether the run was completed, and every metric is there and lies in its band."""
        done = self.state == "completed"
        return done and all(verdict.outcome == "inside" for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain values."""
        return {
            "run": self.run,
            "state": self.state,
            "inside": self.inside,
            "metrics": [verdict.as_json() for verdict in self.verdicts],
            "differs": {each.condition: list(each.details) for each in self.mismatches},
            "measured_runs": self.runs,
        }


@dataclass(frozen=True)
class BandAt:
    """Where a band belongs in a picture of its metric."""

    first_step: int
    """Of the window's records."""
    last_step: int
    low: float
    high: float


def compare_run(run: RunFolder, expect: ExpectConfig, recipe: Recipe) -> Comparison:
    """Compares a run with a block.

    Args:
        run: The run.
        expect: The block.
        recipe: What the run was trained with, resolved.

    Raises:
        UsageError: The run's status is damaged.
    """
    evidence, measured = read_evidence(run), expect.measured
    return Comparison(
        evidence.name,
        tuple(_judge(each, evidence) for each in expect.metrics),
        tuple(list_mismatches(measured, evidence, recipe)) if measured else (),
        len(measured.runs) if measured else 0,
        evidence.status.state,
    )


def compare_with_own(run: RunFolder) -> Comparison | None:
    """Compares a run with the block of the recipe it was trained with; None where that has none.

    A run folder whose recipe cannot be read has none either. The parts of other machines hold no
    metrics; only that of machine 0 is compared.
    """
    if run.shares_checkpoints or not run.resolved.is_file():
        return None
    try:
        recipe = run.read_recipe()
    except UsageError:
        return None
    return compare_run(run, recipe.expect, recipe) if recipe.expect else None


def bands_of(run: RunFolder, metric: str) -> list[BandAt]:
    """The bands that a run's own recipe expects of a logged metric, for pictures of it.

    None where its files are damaged: a picture can do without.
    """
    if not run.resolved.is_file():
        return []
    try:
        expect = run.read_recipe().expect
        return list(_place(read_evidence(run), expect, metric)) if expect else []
    except UsageError:
        return []


def _place(evidence: RunMetrics, expect: ExpectConfig, metric: str) -> Iterator[BandAt]:
    for each in expect.metrics:
        records = evidence.window(metric, each.step, each.window)
        if each.metric == metric:
            # A run that did not get there has its last records elsewhere.
            first = records[0][0] if records and evidence.step >= each.step else each.step
            yield BandAt(first, each.step, *each.band)


def _judge(expected: ExpectedMetric, run: RunMetrics) -> Verdict:
    metric, step = expected.metric, expected.step
    series, held_out = run.series(metric), run.held_out()

    def say(outcome: Outcome, value: float | None = None, detail: str = "") -> Verdict:
        return Verdict(metric, step, *expected.band, outcome, value, detail)

    if run.step < step:
        return say("not reached", detail=f"{run.step} of {step}")
    if series:
        return _judge_window(expected, run)
    if metric not in held_out:
        lacking = metric.startswith(MEASURED) and not run.after
        return say("not measured" if lacking else "not logged")
    value = held_out[metric]
    if value is None:
        return say("not measured", detail="it applied to no prompt")
    if run.step > step:
        return say("not measured", detail=f"the run went on to step {run.step}")
    return say(_place_in(expected, value), value)


def _judge_window(expected: ExpectedMetric, run: RunMetrics) -> Verdict:
    records = [value for _, value in run.window(expected.metric, expected.step, expected.window)]
    known = [value for value in records if value is not None]
    head = (expected.metric, expected.step, *expected.band)
    if not records:
        return Verdict(*head, "not logged", detail=f"no record up to step {expected.step}")
    if len(known) < len(records):
        return Verdict(*head, "not logged", detail="it was no number")
    few = f"{len(records)} of {expected.window} records" if len(records) < expected.window else ""
    value = fmean(known)
    return Verdict(*head, _place_in(expected, value), value, few)


def _place_in(expected: ExpectedMetric, value: float) -> Outcome:
    low, high = expected.band
    return "inside" if low - _HAIR <= value <= high + _HAIR else "outside"
