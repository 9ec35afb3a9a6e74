"""A run in progress, followed from its folder and shown: in a panel that redraws itself, or line by line."""

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from grpo_cli.analysis.diagnosis.diagnosis import diagnose
from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.analysis.diagnosis.rule import Symptom
from grpo_cli.errors import RunError
from grpo_cli.report.panel import PanelView
from grpo_cli.report.summary import RunReport
from grpo_cli.report.wording import (
    clean_text,
    format_event,
    format_step,
    format_symptom,
    seconds_of,
)
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import Metrics, read_numbers
from grpo_cli.runs.status import FINAL, was_started

_RECENT = 20
"""Records that the pace is taken from, and for which a warning stays in sight."""
_SETTLED = 3
"""Records of an attempt from which on its first one is left out of the pace."""


class Follower:
    """Reads what is new in a run folder and keeps what a view needs.

    Args:
        folder: The run's.
        from_now: Whether what is there already is not new: an earlier attempt has shown it.
        skims: Whether of large metrics only the beginning, the end, and records spread between them are read.
    """

    def __init__(self, folder: RunFolder, *, from_now: bool = False, skims: bool = True) -> None:
        self.run = RunReport(folder).skim() if skims else RunReport(folder)
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
        """What training samples at; None if the recipe cannot be read."""
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

    def phase_progress(self) -> tuple[int, int] | None:
        """Return how much of the present phase is done, and of how many; None if its status does not tell."""
        done, _, total = self.run.status.detail.partition(" ")[0].partition("/")
        if not (done.isdecimal() and total.isdecimal() and int(total)):
            return None
        return min(int(done), int(total)), int(total)

    def phase_left(self) -> float | None:
        """Return the seconds left of the present phase, by how it went so far."""
        progress = self.phase_progress()
        (then, first), (now, last) = self._progress[0], self._progress[-1]
        if progress is None or last <= first:
            return None
        return max((now - then) / (last - first) * (progress[1] - last) - (time.time() - now), 0.0)

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
        if (recipe := self.run.known_recipe) is None:
            return []
        symptoms = diagnose(History(recipe, metrics, source=str(self.run.folder.resolved)))
        self.symptoms |= {each.rule: each for each in symptoms}
        return symptoms

    def _note_progress(self) -> None:
        if self.run.status.phase != self._phase:
            self._phase = self.run.status.phase
            self._progress.clear()
        progress = self.phase_progress()
        if progress and (not self._progress or self._progress[-1][1] != progress[0]):
            self._progress.append((self.run.status.updated_at, progress[0]))


_TICK_S = 0.25
_SURE_S = 3.0
"""How long a run's processes have to be gone: its supervisor may be about to say why."""


class ProgressView:
    """Shows nothing; the base of the views that do."""

    def refresh(self) -> None:
        """Look at the folder and show what is new."""

    def stopping(self) -> None:
        """Say that a stop has been requested."""

    def tell(self, text: str) -> None:
        """Say what a person should know now."""

    def close(self) -> None:
        """End the view."""


def choose_view(
    follower: Follower, console: Console, *, history: int | None = None
) -> ProgressView:
    """Return the panel for a terminal that can redraw it, else plain lines with `history` earlier ones."""
    # Bars are characters that other encodings lack.
    drawn = console.is_terminal and console.encoding.startswith("utf")
    if drawn and not console.is_dumb_terminal:
        return LiveView(follower, console)
    return PlainView(follower, console, history=history)


class PlainView(ProgressView):
    """One line for each phase and each logged step; for pipes, files and CI."""

    def __init__(self, follower: Follower, console: Console, *, history: int | None = None) -> None:
        self._follower = follower
        self._console = console
        self._history = history
        self._phase = ""

    def refresh(self) -> None:
        """Print the lines of what came since the last call."""
        records, symptoms = self._follower.read()
        lines = [line for record in records if (line := self._say_record(record))]
        if self._history is not None:
            earlier = max(len(lines) - self._history, 0)
            if earlier:
                self._say(f"· {earlier} earlier lines are left out; all of it is in metrics.jsonl")
            lines, self._history = lines[earlier:], None
        for line in lines:
            self._say(line)
        for symptom in symptoms:
            self._say(format_symptom(symptom).plain)
        status = self._follower.run.status
        if status.phase != self._phase and status.state == "running":
            self._phase = status.phase
            self._say(f"· {clean_text(status.phase)}")

    def stopping(self) -> None:
        """Say that a stop has been requested."""
        self._say("· stopping after this step; once more ends it now")

    def tell(self, text: str) -> None:
        """Print a line."""
        self._say(f"! {text}")

    def _say_record(self, record: dict[str, Any]) -> str | None:
        step = record.get("step")
        if record.get("event") != "train" or not isinstance(step, int):
            return format_event(record, self._follower.temperature)
        is_newest = step == self._follower.run.metrics.steps[-1]["step"]
        left_s = self._follower.seconds_left() if is_newest else None
        return format_step(read_numbers(record), left_s)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView(ProgressView):
    """A panel at the end of the terminal that redraws itself, with events printed above it."""

    def __init__(self, follower: Follower, console: Console) -> None:
        self._follower = follower
        self._panel = PanelView(follower)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def refresh(self) -> None:
        """Redraw the panel; its clock moves even if nothing is new."""
        records, symptoms = self._follower.read()
        for record in records:
            line = format_event(record, self._follower.temperature)
            if line:
                self._live.console.print(Text(line))
        for symptom in symptoms:
            self._live.console.print(format_symptom(symptom))
        # The terminal shows `^C` at the end of the last line, which must not be as wide as the terminal.
        self._live.update(Group(self._panel, Text()), refresh=True)

    def stopping(self) -> None:
        """Say in the panel that a stop has been requested."""
        self._panel.notice = "stopping after this step; Ctrl-C once more ends it now"

    def tell(self, text: str) -> None:
        """Print a line above the panel, where it stays."""
        self._live.console.print(Text(f"! {text}"))

    def close(self) -> None:
        """Remove the panel."""
        self._live.stop()


def watch_run(follower: Follower, view: ProgressView, is_heard: Callable[[], bool]) -> None:
    """Show a run that another process trains, until it ends or its processes are gone.

    Raises:
        BrokenPipeError: Nobody reads what is shown.
        RunError: The folder was removed.
    """
    run, gone_since, waited = follower.run, None, False
    while True:
        view.refresh()
        if not is_heard():
            raise BrokenPipeError
        if not run.folder.path.is_dir():
            raise RunError(f"the run folder {run.folder.path} was removed")
        if run.status.state in FINAL:
            return
        if run.status.state == "pending" and not waited and not was_started(run.folder, run.status):
            waited = True
            view.tell("nothing was started in this folder yet: waiting (Ctrl-C ends the watching)")
        if run.life.state != "interrupted":
            gone_since = None
        elif gone_since is None:
            gone_since = time.monotonic()
        elif time.monotonic() - gone_since > _SURE_S:
            return
        time.sleep(_TICK_S)
