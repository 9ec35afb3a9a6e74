"""How a worker is asked to stop: a signal, or a `stop` file in the run folder.

The answer is the same on every process, so that all of them leave the loop at the same step.
"""

import os
import signal
from types import FrameType

from grpo_cli.processes import stop_with_parent
from grpo_cli.runs.folder import RunFolder

_ALONE_S = 600
"""Seconds for a step and its checkpoint, after the death of the supervisor."""


class StopRequest:
    """Whether somebody asked this run to stop."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.stop_request
        self._signalled = self._alone = False
        self._parent = os.getppid()

    def listen(self) -> None:
        """Take SIGINT, SIGTERM and the parent's death as a request instead of an end.

        Once the parent is gone nobody else can end a step that does not: the next signal does, or time.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)
        stop_with_parent()

    def seen_here(self) -> bool:
        """Whether this process knows of a request."""
        return self._signalled or self._file.exists()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._parent:
            if self._alone:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self._alone = True
            signal.alarm(_ALONE_S)
        self._signalled = True


class Stopped(Exception):  # noqa: N818 - a request that was met, not an error
    """A run was asked to stop while it was not in the training loop."""


class StoppedByRule(Stopped):
    """A rule of `training.stop_when` ended the training loop."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.rule = rule


def write_pid(folder: RunFolder, rank: int) -> None:
    """Notes this process down, so that the supervisor can see to its end."""
    folder.worker_pid(rank).write_text(str(os.getpid()))
