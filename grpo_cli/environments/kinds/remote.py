"""Environments in a process with packages of its own; a request and a reply are a line of JSON each."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from grpo_cli.environments.contract import Environment, EpisodeError, ProcessEndedError
from grpo_cli.issues import Issue
from grpo_cli.processes import reaped_stdio

_CHILD = Path(__file__).with_name("remote_child.py")
_LONGEST_LINE = 4096
_CLOSE_S = 5.0


class LastLine:
    """Takes what a process writes to stderr, and keeps its last line: servers log every call."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.file = os.fdopen(write, "w")
        self._line = ""
        self._thread = threading.Thread(target=self._read, args=(read,), daemon=True)
        self._thread.start()

    def _read(self, read: int) -> None:
        with os.fdopen(read, errors="replace") as lines:
            for line in iter(lambda: lines.readline(_LONGEST_LINE), ""):
                self._line = line.strip() or self._line

    def get(self) -> str:
        """Return the last line, once all who write have ended."""
        self._thread.join(1.0)
        return self._line


class RemoteProcess:
    """`remote_child.py` in another interpreter, which answers requests of any thread in any order.

    A request is `{"id", "session", "do", "arguments"}`, its reply `{"id", "result"}` or `{"id", "error"}`. The
    process and all that it starts end with this one.
    """

    def __init__(self, python: str, script: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._has_ended = False
        self._stderr = LastLine()
        with self._stderr.file as stderr:
            self._process = subprocess.Popen(
                reaped_stdio([python, str(_CHILD), str(script)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self._stdin: Any = self._process.stdin
        self._stdout: Any = self._process.stdout
        threading.Thread(target=self._read, name="grpo-remote", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether it answers no more."""
        return self._has_ended

    def ask(self, session: int, do: str, **arguments: Any) -> Any:
        """Send a request, and return its result.

        Raises:
            EpisodeError: It failed, took too long, or the process has ended.
        """
        reply: Future[Any] = Future()
        with self._lock:
            self._count += 1
            number = self._count
            request = {"id": number, "session": session, "do": do, "arguments": arguments}
            self._waiting[number] = reply
            try:
                self._stdin.write(json.dumps(request, default=str) + "\n")
                self._stdin.flush()
            except (OSError, ValueError):
                self._has_ended = True
        if self._has_ended:
            self._fail_all()
        try:
            return reply.result(self._timeout_s)
        except TimeoutError:
            raise EpisodeError(
                f"`{do}` has not returned in {self._timeout_s:g} s. Fix: raise `timeout_s`",
                "timeout_s",
            ) from None

    def _read(self) -> None:
        with self._stdout:
            for line in self._stdout:
                with self._lock:
                    reply, waiting = self._match(line)
                if waiting is None:
                    continue
                if "error" in reply:
                    waiting.set_exception(EpisodeError(reply["error"]))
                else:
                    waiting.set_result(reply["result"])
        self._has_ended = True
        self._process.wait()
        self._fail_all()

    def _match(self, line: str) -> tuple[Any, Future[Any] | None]:
        """Return a reply and who waits for it; nobody for what another program or the interpreter prints."""
        try:
            reply = json.loads(line)
            return reply, self._waiting.pop(reply["id"])
        except (ValueError, TypeError, KeyError):
            return None, None

    def _fail_all(self) -> None:
        why = self._stderr.get() or f"exit code {self._process.poll()}"
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.set_exception(ProcessEndedError(f"the environment's process has ended: {why}"))

    def close(self) -> None:
        """End it."""
        with self._lock, contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


class RemoteHost:
    """The process of all environments of an entry; it is started again for the next episode if it has ended."""

    def __init__(self, python: str, script: Path, timeout_s: float) -> None:
        self._start = partial(RemoteProcess, python, script, timeout_s)
        self._lock = threading.Lock()
        self._process: RemoteProcess | None = None
        self._sessions = itertools.count()

    def open(self, **arguments: Any) -> "RemoteSession":
        """Open a session with the arguments of the script's `open_session`."""
        with self._lock:
            if self._process is None or self._process.has_ended:
                self._process = self._start()
            process, number = self._process, next(self._sessions)
        process.ask(number, "open", **arguments)
        return RemoteSession(process, number)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()


class RemoteSession:
    """A session of the process."""

    def __init__(self, process: RemoteProcess, number: int) -> None:
        self._process, self._number = process, number

    def ask(self, do: str, **arguments: Any) -> Any:
        """Call a method of the session, and return its result."""
        return self._process.ask(self._number, do, **arguments)

    def close(self) -> None:
        """Close it, unless the process has ended."""
        if not self._process.has_ended:
            self.ask("close")


def open_host(
    host: RemoteHost, make: Callable[[], Environment], package: str, python: str, path: str
) -> None:
    """Make an environment of `package` as a trial; close the process if that fails.

    Raises:
        EpisodeError: It cannot be made; `path` is the parameter that names it.
    """
    try:
        make().close()
    except EpisodeError as error:
        host.close()
        issue = error.as_issue()
        if f"No module named '{package}" in str(error):
            fix, path = f"{python} -m pip install {package}", "python"
        elif isinstance(error, ProcessEndedError):
            fix, path = f"name the interpreter of an environment with {package}", "python"
        else:
            fix, path = issue.fix or f"correct `{path}`", issue.path or path
        raise EpisodeError(
            f"the environment of {package} cannot be made: {issue.seen.rstrip('.')}. Fix: {fix}",
            path,
        ) from error


def find_interpreter_faults(python: str, package: str) -> list[Issue]:
    """Report an interpreter that is not there."""
    if shutil.which(python) is not None:
        return []
    fix = f"make it by `python3 -m venv {package} && {package}/bin/pip install {package}`"
    return [Issue(f"there is no interpreter {python}", fix, "python")]
