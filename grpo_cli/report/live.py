"""A run in progress, shown in a panel that redraws itself, or line by line."""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from grpo_cli.errors import RunError
from grpo_cli.report.follower import Follower
from grpo_cli.report.panel import PanelView
from grpo_cli.report.wording import clean_text, format_event, format_step, format_symptom
from grpo_cli.runs.folder import FINAL, was_started
from grpo_cli.runs.metrics import read_numbers

_TICK_S = 0.25
_SURE_S = 3.0
"""How long a run's processes have to be gone: its supervisor may be about to say why."""


class ProgressView:
    """Shows nothing; the base of the views that do."""

    def refresh(self) -> None:
        """Look at the folder and show what is new."""

    def stopping(self) -> None:
        """Show that a stop has been requested."""

    def tell(self, text: str) -> None:
        """Show a line of text."""

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
        """Show that a stop has been requested."""
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
        """Show in the panel that a stop has been requested."""
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
        if not run.folder.path.exists():
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
