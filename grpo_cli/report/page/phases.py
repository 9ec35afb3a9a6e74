"""Where a run's time went: seconds of each phase, in total and step by step.

Owns the sums. What the phases are is `runs.series`'.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo_cli.report.page.run_data import RunData
from grpo_cli.runs.metrics import read_ends
from grpo_cli.runs.series import PHASES
from grpo_cli.units import format_duration

_REST = "rest of the step"
_START, _EVALUATION, _OTHER = "start-up", "evaluation meanwhile", "saving and the rest"
_ORDER = (*PHASES, _REST, "measuring before", "measuring after", _START, _EVALUATION, _OTHER)
_MOST_STRETCHES = 120
"""Bars in a chart."""
_ENOUGH_BYTES = 2**16
"""Of the metrics, to hold the first record."""
_LEAST_SHARE = 1e-4
"""What is told of; less than that is rounding."""


@dataclass(frozen=True)
class PhaseRow:
    """What one phase took."""

    name: str
    place: int
    """Among all phases that there may be, for its colour."""
    seconds: float
    share: float
    """Of the whole run."""
    time: str


def list_phases(run: RunData) -> list[PhaseRow]:
    """The time of each phase over the whole run; nothing where it was not logged."""
    totals = {phase: _total(run, f"time/{phase}") for phase in PHASES}
    if not any(totals.values()):
        return []
    other = _total(run, "step_time") - sum(totals.values())
    named = {f"measuring {when}": seconds for when, seconds in run.gain.seconds.items()}
    rest = {_REST: other} if other > 0 else {}
    evaluation = {_EVALUATION: sum(run.values("eval_runtime"))}
    found = {_START: _start_up(run), **totals, **rest, **named, **evaluation}
    # The status knows of the last attempt alone: phases may be longer than it.
    whole = max(run.seconds, sum(found.values()))
    found[_OTHER] = whole - sum(found.values())
    return [
        PhaseRow(name, _ORDER.index(name), seconds, seconds / whole, format_duration(seconds))
        for name, seconds in found.items()
        if seconds > _LEAST_SHARE * whole
    ]


def _start_up(run: RunData) -> float:
    """Seconds before the first measurement or step; 0 where that is not known, as of a resumed run."""
    first: dict[str, Any] = next(read_ends(run.folder.metrics, _ENOUGH_BYTES).from_first(), {})
    parts = [first.get(name) for name in ("time", "seconds", "step_time")]
    ended, measured, stepped = (each if isinstance(each, int | float) else 0.0 for each in parts)
    step = first.get("step")
    steps = step if isinstance(step, int) else 1
    return max(ended - (measured or stepped * steps) - run.status.started_at, 0.0)


def _total(run: RunData, metric: str) -> float:
    """Seconds over all steps: each record is the mean of the steps since the one before."""
    total, before = 0.0, 0
    for step, value in run.history.series.get(metric, ()):
        total += max(step - before, 0) * (value or 0.0)
        before = step
    return total


def phase_series(run: RunData) -> dict[str, Any]:
    """Seconds of each phase by step, in stretches few enough to draw as bars."""
    known: dict[str, Mapping[int, float]] = {
        phase: {step: value for step, value in points if value is not None}
        for phase in PHASES
        if (points := run.history.series.get(f"time/{phase}"))
    }
    steps = sorted({step for values in known.values() for step in values})
    stretches = list(_cut(steps, _MOST_STRETCHES))
    return {
        "steps": [stretch[-1] for stretch in stretches],
        "phases": {
            phase: {
                "place": _ORDER.index(phase),
                "seconds": [
                    round(fmean(values.get(step, 0.0) for step in each), 4) for each in stretches
                ],
            }
            for phase, values in known.items()
            if any(values.values())
        },
    }


def _cut(steps: list[int], most: int) -> Iterator[list[int]]:
    width = -(-len(steps) // most) or 1
    for start in range(0, len(steps), width):
        yield steps[start : start + width]
