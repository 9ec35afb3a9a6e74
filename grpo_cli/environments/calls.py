"""Calls of tools and environments, side by side on threads, each under a time limit."""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_POLL_S = 0.01
"""How often late calls are looked for."""


@dataclass
class Outcome:
    """What became of a call."""

    value: Any = None
    error: BaseException | None = None
    """What it raised."""
    is_late: bool = False
    """Whether it had not returned in time; it may still run."""
    seconds: float = 0.0

    @property
    def fault(self) -> str:
        """Why there is no value, in one line; empty if there is one."""
        if self.is_late:
            return f"it took longer than {self.seconds:g} s"
        if self.error is not None:
            text = str(self.error).strip() or "no message"
            return f"{type(self.error).__name__}: {text}"
        return ""


def run_calls(
    calls: Sequence[Callable[[], Any]], *, parallel: int, timeout_s: float
) -> list[Outcome]:
    """Run calls on threads of their own; nothing that one raises, `SystemExit` included, reaches the caller.

    A call that is late is left behind on its thread, which does not keep the process alive.

    Args:
        calls: Functions; a coroutine that one returns is awaited.
        parallel: Calls that run at the same time.
        timeout_s: Time limit of each, from its own start.
    """
    waiting = list(enumerate(calls))[::-1]
    running: dict[int, _Call] = {}
    outcomes: dict[int, Outcome] = {}
    finished = threading.Event()
    while waiting or running:
        while waiting and len(running) < parallel:
            number, function = waiting.pop()
            running[number] = _Call(function, finished)
        finished.wait(min(_POLL_S, timeout_s) if not finished.is_set() else 0)
        finished.clear()
        for number, call in list(running.items()):
            if (outcome := call.look(timeout_s)) is not None:
                outcomes[number] = outcome
                del running[number]
    return [outcomes[number] for number in range(len(calls))]


class _Call:
    def __init__(self, function: Callable[[], Any], finished: threading.Event) -> None:
        self._function, self._finished = function, finished
        self._outcome: Outcome | None = None
        self._started = time.monotonic()
        threading.Thread(target=self._run, name="grpo-call", daemon=True).start()

    def _run(self) -> None:
        value, error = None, None
        try:
            value = self._function()
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
        except BaseException as raised:  # a user's code; nothing may end this thread unseen
            error = raised
        self._outcome = Outcome(value, error, seconds=time.monotonic() - self._started)
        self._finished.set()

    def look(self, timeout_s: float) -> Outcome | None:
        """Return the outcome; None while it runs in time."""
        if self._outcome is None and time.monotonic() - self._started > timeout_s:
            return Outcome(is_late=True, seconds=timeout_s)
        return self._outcome


@contextlib.contextmanager
def closing_all(closers: Sequence[Callable[[], None]], timeout_s: float = 10.0) -> Any:
    """Call all closers on the way out, side by side; what they raise is ignored."""
    try:
        yield
    finally:
        run_calls(closers, parallel=max(len(closers), 1), timeout_s=timeout_s)
