"""What a page is made of: everything that one run's folder says, read once.

Owns the reading, and stands damaged and missing files. Judges and words nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from grpo_cli.analysis.diagnosis.diagnosis import diagnose
from grpo_cli.analysis.diagnosis.history import History, read_history
from grpo_cli.analysis.diagnosis.symptom import Symptom
from grpo_cli.analysis.diagnosis.trends import LIKELY, Change, compare
from grpo_cli.analysis.expectations.verdicts import Comparison, compare_with_own
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.report.page.held_out import Gain, read_gain
from grpo_cli.report.reward_change import count_averaged
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.liveness import ShownState, look_at_life
from grpo_cli.runs.status import Status, StatusFile


@dataclass(frozen=True)
class Course:
    """Where a logged metric began and ended."""

    change: Change
    """Between means of records; its error is infinite where single ones say nothing of their noise."""
    width: int
    """Records that each mean is over."""

    @property
    def is_noise(self) -> bool:
        """Whether records that never change would differ as much."""
        return abs(self.change.difference) <= LIKELY * self.change.error

    @property
    def margin(self) -> float:
        """How much noise alone may well make."""
        return LIKELY * self.change.error


@dataclass(frozen=True)
class RunData:
    """One run, as its folder has it."""

    folder: RunFolder
    name: str
    """`<name>/<timestamp>`, or the path where two runs are called alike."""
    history: History
    status: Status
    state: ShownState
    """Of the status, but for a run whose processes are gone."""
    manifest: Mapping[str, Any]
    plan: Mapping[str, Any]
    symptoms: tuple[Symptom, ...]
    expected: Comparison | None
    """Beside what its recipe expects; None where that says nothing."""

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return self.history.recipe

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return max(self.status.step, self.history.step)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps planned."""
        return self.status.total_steps or self.history.total_steps

    @property
    def seconds(self) -> float:
        """From the start to the last sign of life."""
        return self.status.seconds

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        return self.state not in ("pending", "running")

    @cached_property
    def gain(self) -> Gain:
        """The held-out measurements before and after."""
        return read_gain(self.folder, self.history.before, self.history.after)

    def values(self, metric: str) -> list[float]:
        """The numbers that were logged of a metric, in their order."""
        return [value for _, value in self.history.series.get(metric, ()) if value is not None]

    def course(self, metric: str) -> Course | None:
        """How a logged metric went from its first records to its last; None where it has fewer than two."""
        values = self.values(metric)
        if len(values) < 2:
            return None
        width = count_averaged(len(values))
        found = compare(values[:width], values[-width:])
        return Course(found or Change(values[0], values[-1], inf), width)


def read_material(run: RunFolder, name: str) -> RunData:
    """Reads a run.

    Args:
        run: Its folder.
        name: What it is called.

    Raises:
        UsageError: This is not a run folder, or its recipe or status is damaged.
    """
    history, status = read_history(run), StatusFile(run.status).read()
    return RunData(
        run,
        name,
        history,
        status,
        look_at_life(run, status).state,
        run.read_manifest(),
        run.read_plan(),
        tuple(diagnose(history)),
        compare_with_own(run),
    )
