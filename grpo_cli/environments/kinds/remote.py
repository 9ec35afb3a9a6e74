"""Environments in a process with packages of its own; a request and a reply are a line of JSON each."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from grpo_cli.environments.contract import (
    Environment,
    EnvironmentParams,
    EnvironmentSource,
    EpisodeError,
    ProcessEndedError,
)
from grpo_cli.issues import Issue
from grpo_cli.processes import reaped_stdio
from grpo_cli.recipe.base import Number

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
        self.has_ended = False
        """Whether it answers no more."""
        self._stderr = LastLine()
        with self._stderr.file as stderr:
            self._process: Any = subprocess.Popen(
                reaped_stdio([python, str(_CHILD), str(script)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._read, name="grpo-remote", daemon=True).start()

    def ask(self, session: int, do: str, **arguments: Any) -> Any:
        """Send a request, and return its result, or raise `EpisodeError`."""
        reply: Future[Any] = Future()
        with self._lock:
            self._count += 1
            number = self._count
            request = {"id": number, "session": session, "do": do, "arguments": arguments}
            self._waiting[number] = reply
            try:
                self._process.stdin.write(json.dumps(request, default=str) + "\n")
                self._process.stdin.flush()
            except (OSError, ValueError):
                self.has_ended = True
        if self.has_ended:
            self._fail_all()
        try:
            return reply.result(self._timeout_s)
        except TimeoutError:
            raise EpisodeError(
                f"`{do}` has not returned in {self._timeout_s:g} s",
                "raise `timeout_s`",
                path="timeout_s",
            ) from None

    def _read(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                try:
                    reply = json.loads(line)
                    with self._lock:
                        waiting = self._waiting.pop(reply["id"])
                except (ValueError, TypeError, KeyError):
                    continue  # printed by another program or the interpreter
                if "error" in reply:
                    waiting.set_exception(EpisodeError(reply["error"]))
                else:
                    waiting.set_result(reply["result"])
        self.has_ended = True
        self._process.wait()
        self._fail_all()

    def _fail_all(self) -> None:
        why = self._stderr.get() or f"exit code {self._process.poll()}"
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.set_exception(ProcessEndedError(f"the environment's process has ended: {why}"))

    def close(self) -> None:
        """End it."""
        with self._lock, contextlib.suppress(OSError):
            self._process.stdin.close()
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

    def open(self, **arguments: Any) -> tuple[RemoteProcess, int]:
        """Open a session with the arguments of the script's `open_session`; return the process and its number."""
        with self._lock:
            if self._process is None or self._process.has_ended:
                self._process = self._start()
            process, number = self._process, next(self._sessions)
        process.ask(number, "open", **arguments)
        return process, number

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()


class RemoteEnvironment(Environment):
    """A session of the process."""

    takes_text = True

    def __init__(self, host: RemoteHost, **arguments: Any) -> None:
        """Open a session with the arguments of the script's `open_session`."""
        self._process, self._number = host.open(**arguments)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Call a method of the session, and return its result."""
        return self._process.ask(self._number, do, **arguments)

    def close(self) -> None:
        """Close the session, unless the process has ended."""
        if not self._process.has_ended:
            self._process.ask(self._number, "close")


class RemoteEnvironmentParams(EnvironmentParams):
    """An environment of a package that has an interpreter of its own, in which a script opens its sessions."""

    script: ClassVar[str]
    """The name of the script, which lies beside this file."""

    python: str
    """The interpreter that has the package, such as `venv/bin/python`, relative to the recipe."""
    timeout_s: Number = Field(default=120.0, gt=0)
    """Longest that the process may take to start, or to answer, in seconds; `episode.tool_timeout_s` limits a step
    too."""

    def problems(self) -> list[Issue]:
        """Report an interpreter that is not there; starts nothing."""
        if shutil.which(self.python) is not None:
            return []
        name = self.kind
        fix = f"make it by `python3 -m venv {name} && {name}/bin/pip install {name}`"
        return [Issue(f"there is no interpreter {self.python}", fix, "python")]

    def make(self, host: RemoteHost) -> Environment:
        """Make the environment of an episode."""
        raise NotImplementedError

    def open(self) -> EnvironmentSource:
        """Start the process, and make an environment as a trial."""
        if faults := self.problems():
            raise EpisodeError(faults[0].seen, faults[0].fix, faults[0].path)
        host = RemoteHost(self.python, Path(__file__).with_name(self.script), self.timeout_s)
        try:
            self.make(host).close()
        except EpisodeError as error:
            host.close()
            raise self._explain(error) from error
        return EnvironmentSource(partial(self.make, host), close=host.close)

    def _explain(self, error: EpisodeError) -> EpisodeError:
        """Return why no environment can be made, and what to do about it."""
        path = "python"
        if f"No module named '{self.kind}" in str(error):
            fix = f"{self.python} -m pip install {self.kind}"
        elif isinstance(error, ProcessEndedError):
            fix = f"name the interpreter of an environment with {self.kind}"
        else:
            path = error.path or self.named_by
            fix = error.fix or f"correct `{path}`"
        seen = f"the environment of {self.kind} cannot be made: {error.seen.rstrip('.')}"
        return EpisodeError(seen, fix, path)

    @property
    def named_by(self) -> str:
        """The parameter that names the environment."""
        raise NotImplementedError
