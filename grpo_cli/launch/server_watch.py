"""A vLLM server beside a training: started with it, started again where it dies, ended with it.

Owns the server's life and what is said of it. That a server which came back is given the weights again is
the workers' part (`train/vllm_generation.py`).
"""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from grpo_cli.launch.plan import ManagedServer
from grpo_cli.launch.server_process import ask, read_end, start

_LOOK_S = 0.1
_EVERY_S = 5.0
"""Seconds between two questions after the server's health."""
_SICK_S = {"gone": 30.0, "silent": 300.0}
"""Seconds without a good answer after which a server counts as dead. One whose engine died refuses connections
and may keep those that it has for ever; one that reads long prompts or new weights may be silent for a while."""


class ServerWatch:
    """A server that is looked at from time to time."""

    def __init__(self, plan: ManagedServer, log: Path, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._log = log
        self._tell = tell
        self._guard = ExitStack()
        self._has_answered = False
        self._restarts = 0
        self._asked = self._well = time.monotonic()
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._guard.close()
        self._answers = False
        output = self._guard.enter_context(self._log.open("ab"))
        return self._guard.enter_context(start(self._plan, output))

    def look(self) -> str | None:
        """Starts the server again where it died.

        Returns:
            Why the training has to end, where it does.
        """
        code = self._process.poll()
        if code is None and not self._is_sick():
            return None
        if code is None:
            self._kill()
            code = self._process.wait()
        if not self._has_answered:
            return self._explain(f"ended with {code} before it answered")
        if self._restarts >= self._plan.max_restarts:
            return self._explain(
                f"ended with {code}, after it had been started again {self._restarts} times "
                "(`generation.vllm.max_restarts`)"
            )
        self._restarts += 1
        self._tell(
            f"the vLLM server ended with {code}; starting it again "
            f"({self._restarts} of {self._plan.max_restarts} times), log {self._log}"
        )
        self._process = self._start()
        return None

    def _is_sick(self) -> bool:
        """Whether a server that has answered has not done so for too long."""
        now = time.monotonic()
        if self._answers and now - self._asked < _EVERY_S:
            return False
        self._asked = now
        state = ask(self._plan.health)
        if state == "well":
            self._answers = self._has_answered = True
            self._well = now
            return False
        return self._answers and now - self._well > _SICK_S[state]

    def _kill(self) -> None:
        # Its reaper counts: the second signal is a SIGKILL to the family.
        self._process.terminate()
        time.sleep(_LOOK_S * 5)
        self._process.send_signal(signal.SIGINT)

    def end(self, force: Callable[[], bool]) -> None:
        """Ends the server and all that it started; returns when they are gone.

        Args:
            force: Whether to end it now, with whatever it has in hand.
        """
        self._process.terminate()
        while self._process.poll() is None:
            if force():
                self._process.send_signal(signal.SIGINT)
            time.sleep(_LOOK_S)
        self._guard.close()

    def _explain(self, what: str) -> str:
        return (
            f"the vLLM server {what}. Its last lines:\n{read_end(self._log)}\n"
            f"Fix: see {self._log}; what it was started with is in launch/plan.json"
        )


@contextmanager
def watched(
    plan: ManagedServer | None,
    log: Path,
    tell: Callable[[str], None],
    force: Callable[[], bool],
) -> Iterator[ServerWatch | None]:
    """A server for as long as the training runs; None where the plan has none."""
    if plan is None:
        yield None
        return
    watch = ServerWatch(plan, log, tell)
    try:
        yield watch
    finally:
        watch.end(force)
