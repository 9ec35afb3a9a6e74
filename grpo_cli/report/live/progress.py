"""Showing a run while it goes on: what every view does, which one suits, and the plain lines.

The panel of a terminal is `live.py`'s, what is new in a run `following.py`'s.
"""

from typing import Protocol

from rich.console import Console

from grpo_cli.report.live.following import Follower
from grpo_cli.report.live.terminal import clean_text
from grpo_cli.report.live.view import LiveView
from grpo_cli.report.live.wording import format_event, format_step, format_symptom
from grpo_cli.runs.series import read_step


class ProgressView(Protocol):
    """Shows a run while it goes on."""

    def refresh(self) -> None:
        """Looks at the folder and shows what is new."""

    def stopping(self) -> None:
        """Says that a stop has been asked for."""

    def tell(self, text: str) -> None:
        """Says what a person should know now."""

    def close(self) -> None:
        """Ends the view."""


def choose_view(
    follower: Follower, console: Console, *, history: int | None = None
) -> ProgressView:
    """The panel in a terminal that can redraw it, plain lines elsewhere.

    Args:
        follower: What reads the run.
        console: Where it is shown.
        history: Steps already there that plain lines begin with; None is all.
    """
    # Bars are characters that other encodings lack.
    drawn = console.is_terminal and console.encoding.startswith("utf")
    if drawn and not console.is_dumb_terminal:
        return LiveView(follower, console)
    return PlainView(follower, console, history=history)


class SilentView:
    """Shows nothing."""

    def refresh(self) -> None:
        """Nothing to show."""

    def stopping(self) -> None:
        """Nothing to say."""

    def tell(self, text: str) -> None:
        """Nothing to say."""

    def close(self) -> None:
        """Nothing to undo."""


class PlainView:
    """One line for each phase and each logged step; for pipes, files and CI."""

    def __init__(self, follower: Follower, console: Console, *, history: int | None = None) -> None:
        self._follower = follower
        self._console = console
        self._history = history
        self._phase = ""

    def refresh(self) -> None:
        """Prints the lines of what came since the last call."""
        news = self._follower.read()
        lines = [line for record in news.records if (line := self._say_record(record))]
        if self._history is not None:
            earlier = max(len(lines) - self._history, 0)
            if earlier:
                self._say(f"· {earlier} earlier lines are left out; all of it is in metrics.jsonl")
            lines, self._history = lines[earlier:], None
        for line in lines:
            self._say(line)
        for symptom in news.symptoms:
            self._say(format_symptom(symptom).plain)
        status = self._follower.status
        if status.phase != self._phase and status.state == "running":
            self._phase = status.phase
            self._say(f"· {clean_text(status.phase)}")

    def stopping(self) -> None:
        """Says that a stop has been asked for."""
        self._say("· stopping after this step; once more ends it now")

    def tell(self, text: str) -> None:
        """Prints a line."""
        self._say(f"! {text}")

    def close(self) -> None:
        """Nothing to undo."""

    def _say_record(self, record: dict[str, object]) -> str | None:
        step = read_step(record)
        if step is None:
            return format_event(record, self._follower.temperature)
        newest = self._follower.steps[-1].step
        return format_step(step, self._follower.seconds_left() if step.step == newest else None)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
