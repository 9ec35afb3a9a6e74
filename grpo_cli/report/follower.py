"""What a view of a run in progress needs, read from its folder as it grows."""

import time
from collections import deque
from statistics import fmean
from typing import Any

from grpo_cli.analysis.diagnosis.diagnosis import diagnose
from grpo_cli.analysis.diagnosis.rule import Symptom
from grpo_cli.report.summary import RunReport
from grpo_cli.report.wording import seconds_of
from grpo_cli.runs.folder import FINAL, RunFolder
from grpo_cli.runs.metrics import Metrics

_RECENT = 20
"""Records that the pace is taken from, and for which a warning stays in sight."""
_SETTLED = 3
"""An attempt with this many records leaves its first one out of the pace."""


class Follower:
    """Reads what is new in a run folder and keeps what a view needs.

    `from_now`: what is there already is not new. `skims`: large metrics are not read whole.
    """

    def __init__(
        self, run: RunFolder | RunReport, *, from_now: bool = False, skims: bool = True
    ) -> None:
        opened = run if isinstance(run, RunReport) else RunReport(run)
        self.run = opened.skim() if skims else opened
        self.symptoms: dict[str, Symptom] = {}
        """The newest of each rule."""
        self._metrics: Metrics | None = None
        """Those that `symptoms` come from."""
        self._progress: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        """Time and done part of the present phase."""
        self._phase = ""
        if from_now:
            self.read()

    def read(self) -> tuple[list[dict[str, Any]], list[Symptom]]:
        """Return new records and new symptoms; none of a run that has ended or stops, whose summary shows them."""
        records = self.run.refresh()
        self._note_progress()
        known = set() if self._metrics is not self.run.metrics else set(self.symptoms)
        symptoms = self._diagnose() if records else []
        is_over = self.run.status.state in FINAL or self.run.folder.stop_request.exists()
        return records, [each for each in symptoms if each.rule not in known and not is_over]

    @property
    def temperature(self) -> float | None:
        """The temperature of training; None if the recipe cannot be read."""
        recipe = self.run.known_recipe
        return recipe.generation.temperature if recipe else None

    def seconds_left(self) -> float | None:
        """Return the time left, by the pace of the last records and the measurement still to come."""
        metrics, total = self.run.metrics, self.run.status.total_steps
        steps = metrics.steps[metrics.attempt :]
        if total is None or not metrics.steps:
            return None
        # The first one also warms up, which takes longer than any after it.
        settled = steps[1:] if len(steps) >= _SETTLED else steps
        logged = [seconds for each in settled[-_RECENT:] if (seconds := seconds_of(each))]
        # By the clock, since evaluations and checkpoints take their time too.
        paces = [fmean(logged)] if logged else []
        timed = [(each["step"], each["time"]) for each in steps[-_RECENT - 1 :] if each.get("time")]
        if timed and timed[-1][0] > timed[0][0]:
            paces.append((timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0]))
        if not paces:
            return None
        # The measurement after training takes as long as the one before.
        measured = "after" not in metrics.measured and metrics.measured.get("before")
        measuring_s = measured.get("seconds") or 0.0 if measured else 0.0
        return max(paces) * max(total - self.run.step, 0) + measuring_s

    def phase_left(self) -> float | None:
        """Return the seconds left of the present phase, by how it went so far."""
        if not self._progress or self._progress[-1][1] <= self._progress[0][1]:
            return None
        (then, first), (now, last) = self._progress[0], self._progress[-1]
        left = (self.run.status.planned or 0) - last
        return max((now - then) / (last - first) * left - (time.time() - now), 0.0)

    def fresh_symptoms(self) -> list[Symptom]:
        """Return the symptoms that the last records showed, the newest first."""
        newest = self.run.metrics.steps[-_RECENT:]
        since = newest[0]["step"] if newest else 0
        fresh = [each for each in self.symptoms.values() if each.step >= since]
        return sorted(fresh, key=lambda each: each.step, reverse=True)

    def _diagnose(self) -> list[Symptom]:
        """Return what is wrong now; nothing if the recipe cannot be read."""
        metrics = self.run.metrics
        if self._metrics is not metrics:
            # The first records, or those of a file that was cut when the run resumed.
            self._metrics, self.symptoms = metrics, {}
        if self.run.known_recipe is None:
            return []
        symptoms = diagnose(self.run.brief_history())
        self.symptoms |= {each.rule: each for each in symptoms}
        return symptoms

    def _note_progress(self) -> None:
        status = self.run.status
        if status.phase != self._phase:
            self._phase = status.phase
            self._progress.clear()
        done = status.done
        if done is not None and (not self._progress or self._progress[-1][1] != done):
            self._progress.append((status.updated_at, done))
