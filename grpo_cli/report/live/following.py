"""What a run does, followed from its folder alone: status, metrics, the newest sample, warnings.

Owns what a view needs to know and nothing of how it looks. Knows nothing of the processes behind a run.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from grpo_cli.analysis.diagnosis.diagnosis import Watch, diagnose
from grpo_cli.analysis.diagnosis.symptom import Symptom
from grpo_cli.errors import GrpoError, UsageError
from grpo_cli.report.live.wording import seconds_of
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import RecordTail
from grpo_cli.runs.series import StepRecord, read_step
from grpo_cli.runs.status import FINAL, Status, StatusFile

_RECENT = 20
"""Records that the pace is taken from, and for which a warning stays in sight."""
_SETTLED = 3
"""Records of an attempt from which on its first one is left out of the pace."""
_NEWEST_BYTES = 2**22
"""Of each file of samples, which may be large: enough for the newest group."""


class SymptomWatch(Protocol):
    """Tells of what is wrong with a run as its records come; `diagnosis.Watch` does."""

    def add(self, record: Mapping[str, Any]) -> list[Symptom]:
        """Takes a record; gives the symptoms that were not there before it."""


@dataclass(frozen=True)
class News:
    """What came since the last look."""

    records: list[dict[str, Any]]
    symptoms: list[Symptom]
    """None of a run that has ended: its summary tells them."""


class Follower:
    """Reads what is new in a run folder and keeps what a view needs.

    Args:
        folder: The run's.
        from_now: Whether what is there already is not new: an earlier attempt has shown it.
        watch: What tells of symptoms; None makes the rules of `grpo_cli.analysis.diagnosis` do it.
    """

    def __init__(
        self, folder: RunFolder, *, from_now: bool = False, watch: SymptomWatch | None = None
    ) -> None:
        self.folder = folder
        self.steps: list[StepRecord] = []
        self.symptoms: dict[str, Symptom] = {}
        """The newest of each rule."""
        self.status = Status()
        self.newest_sample: dict[str, Any] | None = None
        self._times: deque[tuple[int, float]] = deque(maxlen=_RECENT + 1)
        """Step and time of the last records of this attempt."""
        self._begun = 0
        """Steps of earlier attempts."""
        self._measuring_s: float | None = None
        self._progress: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._phase = ""
        self._watch = watch
        self._tail = RecordTail(folder.metrics)
        self._samples: dict[Path, RecordTail] = {}
        if from_now:
            self.read()

    def read(self) -> News:
        """What is new; the status, the steps and the newest sample are kept."""
        # The status first: a record that came before it is then never missed.
        self.status = StatusFile(self.folder.status).read()
        self._note_progress()
        rewinds = self._tail.rewinds
        records = list(self._tail.read_new())
        if self._tail.rewinds > rewinds:
            self._forget()
        for record in records:
            self._take(record)
        symptoms = self._look(records)
        if self.status.state in FINAL:
            # The summary, which follows, says them.
            symptoms = []
        self._read_samples()
        if self._tail.rewinds > rewinds:
            # It went on from a checkpoint: what came before that has been shown.
            begun = [at for at, each in enumerate(records) if each.get("event") == "resume"]
            records = records[begun[-1] :] if begun else records
        return News(records, symptoms)

    @cached_property
    def temperature(self) -> float | None:
        """What the training samples at; None where the recipe cannot be read."""
        try:
            return self.folder.read_recipe().generation.temperature
        except (GrpoError, OSError):
            return None

    @cached_property
    def weights(self) -> dict[str, float]:
        """The weight of each reward by its name; none where the recipe cannot be read."""
        # It imports every reward kind, which what never shows a sample need not wait for.
        from grpo_cli.rewards.building import name_rewards

        try:
            configs = self.folder.read_recipe().rewards
            return dict(zip(name_rewards(configs), (each.weight for each in configs), strict=True))
        except (GrpoError, OSError):
            return {}

    def seconds_left(self) -> float | None:
        """Time left, from the pace of the last records and the measurement that is still to come."""
        total = self.status.total_steps
        if total is None or not self.steps:
            return None
        steps = self.steps[self._begun :]
        # The first one also warms up, which takes longer than any after it.
        steps = steps[1:] if len(steps) >= _SETTLED else steps
        logged = [spent for each in steps[-_RECENT:] if (spent := seconds_of(each))]
        # By the clock, since evaluations and checkpoints take their time too.
        paces = [fmean(logged)] if logged else []
        if self._times and self._times[-1][0] > self._times[0][0]:
            (first, then), (last, now) = self._times[0], self._times[-1]
            paces.append((now - then) / (last - first))
        if not paces:
            return None
        left = max(total - max(self.status.step, self.steps[-1].step), 0)
        return max(paces) * left + (self._measuring_s or 0.0)

    def phase_progress(self) -> tuple[int, int] | None:
        """How much of the present phase is done, and of how many, where its status tells."""
        head = self.status.detail.partition(" ")[0]
        done, slash, total = head.partition("/")
        if not (slash and done.isdecimal() and total.isdecimal() and int(total)):
            return None
        return min(int(done), int(total)), int(total)

    def phase_left(self) -> float | None:
        """Seconds that the present phase takes on, from how it went while this looked on."""
        progress = self.phase_progress()
        if progress is None or len(self._progress) < 2:
            return None
        (then, first), (now, last) = self._progress[0], self._progress[-1]
        if last <= first:
            return None
        since = time.time() - now
        return max((now - then) / (last - first) * (progress[1] - last) - since, 0.0)

    def fresh_symptoms(self) -> list[Symptom]:
        """The symptoms that the last records showed, the newest first."""
        newest = self.steps[-_RECENT:]
        since = newest[0].step if newest else 0
        fresh = [each for each in self.symptoms.values() if each.step >= since]
        return sorted(fresh, key=lambda each: each.step, reverse=True)

    def _take(self, record: Mapping[str, Any]) -> None:
        event = record.get("event")
        step = read_step(record)
        if step is not None:
            self.steps.append(step)
            if isinstance(record.get("time"), int | float):
                self._times.append((step.step, float(record["time"])))
        elif event == "resume":
            self._times.clear()
            self._begun = len(self.steps)
        elif event == "measure" and isinstance(record.get("seconds"), int | float):
            # The one after training takes as long, where it is still to come.
            before = record.get("when") == "before"
            self._measuring_s = float(record["seconds"]) if before else None

    def _look(self, records: Sequence[Mapping[str, Any]]) -> list[Symptom]:
        """The symptoms that new records show."""
        if self._watch is None and records:
            self._watch = _open_watch(self.folder)
        found = []
        past = 0
        if isinstance(self._watch, Watch) and len(records) > _RECENT:
            # Of what lies behind, the end tells what is wrong: judging every record would take long.
            past = len(records) - 1
            for record in records[:past]:
                self._watch.history.add(record)
        for record in records[past:]:
            found += self._watch.add(record) if self._watch else []
        self.symptoms |= {each.rule: each for each in found}
        if isinstance(self._watch, Watch) and records:
            # Each is news once; what still shows it keeps it in sight.
            self.symptoms |= {each.rule: each for each in diagnose(self._watch.history)}
        return found

    def _read_samples(self) -> None:
        for path in sorted(self.folder.completions.glob("rank_*.jsonl")):
            tail = self._samples.setdefault(path, RecordTail(path, last_bytes=_NEWEST_BYTES))
            for sample in tail.read_new():
                if _is_whole(sample) and _time(sample) >= _time(self.newest_sample or {}):
                    self.newest_sample = sample

    def _note_progress(self) -> None:
        if self.status.phase != self._phase:
            self._phase = self.status.phase
            self._progress.clear()
        progress = self.phase_progress()
        if progress and (not self._progress or self._progress[-1][1] != progress[0]):
            self._progress.append((self.status.updated_at, progress[0]))

    def _forget(self) -> None:
        """Begins anew: the records are others from here on."""
        self.steps.clear()
        self.symptoms.clear()
        self._times.clear()
        self._begun = 0
        self.newest_sample = None
        if isinstance(self._watch, Watch):
            self._watch = None


class _NoWatch:
    """Stands in where a run's recipe cannot be read, so that no rule can be judged."""

    def add(self, record: Mapping[str, Any]) -> list[Symptom]:
        return []


def _open_watch(folder: RunFolder) -> SymptomWatch:
    try:
        return Watch(folder.read_recipe(), str(folder.resolved))
    except (UsageError, OSError):
        return _NoWatch()


def _is_whole(sample: Mapping[str, Any]) -> bool:
    """Whether a sampled group has what is shown of it."""
    completions, rewards = sample.get("completions"), sample.get("rewards")
    return bool(isinstance(completions, list) and completions and isinstance(rewards, dict))


def _time(sample: Mapping[str, Any]) -> float:
    told = sample.get("time")
    return float(told) if isinstance(told, int | float) else 0.0
