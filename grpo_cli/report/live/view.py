"""The live view: a panel at the end of the terminal that redraws itself, with events printed above it."""

import contextlib
from collections import deque

from rich.console import Console
from rich.control import Control
from rich.live import Live
from rich.text import Text

from grpo_cli.report.live.following import Follower
from grpo_cli.report.live.panel import PanelView
from grpo_cli.report.live.terminal import without_control_echo
from grpo_cli.report.live.wording import format_event, format_symptom

_REPEATED = 5
"""Lines above the panel that are said again on an empty screen."""


class LiveView:
    """A panel that redraws itself in a terminal."""

    def __init__(self, follower: Follower, console: Console) -> None:
        self._follower = follower
        self._panel = PanelView(follower)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._size = console.size
        self._printed: deque[Text] = deque(maxlen=_REPEATED)
        self._opened = contextlib.ExitStack()
        self._opened.enter_context(without_control_echo())
        self._opened.enter_context(self._live)

    def refresh(self) -> None:
        """Redraws the panel; the clock moves even when nothing is new."""
        self._heed_size()
        news = self._follower.read()
        for record in news.records:
            line = format_event(record, self._follower.temperature)
            if line:
                # Above the panel, where it stays when the panel goes.
                self._print(Text(line))
        for symptom in news.symptoms:
            self._print(format_symptom(symptom))
        self._live.update(self._panel, refresh=True)

    def stopping(self) -> None:
        """Says that a stop has been asked for."""
        self._panel.notice = "stopping after this step; Ctrl-C once more ends it now"

    def tell(self, text: str) -> None:
        """Prints a line above the panel, where it stays."""
        self._print(Text(f"! {text}"))

    def close(self) -> None:
        """Takes the panel away."""
        self._opened.close()

    def _print(self, line: Text) -> None:
        self._printed.append(line)
        self._live.console.print(line, soft_wrap=False)

    def _heed_size(self) -> None:
        """Begins with an empty screen after a change of size, which leaves torn lines of the old panel."""
        console = self._live.console
        if console.size == self._size:
            return
        self._size = console.size
        console.control(Control.clear(), Control.home())
        for line in self._printed:
            console.print(line, soft_wrap=False)
