"""The trainer's side of the sandbox: starts a program, bounds it, reads it, ends it.

Owns the process from its start to its end and the reading of what it claims. Nothing here runs
between fork and exec, as a trainer has many threads. Which protections there are is found out
once, by trying; how they work is `confinement.py`'s.
"""

import fcntl
import json
import marshal
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Literal, get_args

from grpo_cli.errors import RewardError
from grpo_cli.rewards.sandbox.child import READY
from grpo_cli.rewards.sandbox.confinement import TASKS, Confinement
from grpo_cli.rewards.sandbox.execution import Job
from grpo_cli.rewards.sandbox.folders import (
    count_threads,
    find_descendants,
    is_over,
    working_folder,
)
from grpo_cli.rewards.sandbox.values import Opaque, decode

Protection = Literal["namespaces", "user_namespaces", "other_user", "landlock", "seccomp"]
"""`namespaces`: a root folder of its own in memory, no network, and process numbers of its own;
`user_namespaces`: the same without privileges; `other_user`: a user id nobody else has;
`landlock`: no files but the interpreter's; `seccomp`: no processes, sockets and the like."""
PROTECTIONS: tuple[Protection, ...] = get_args(Protection)
Outcome = Literal["ended", "timeout", "flood", "disk", "threads"]

START_S = 60.0
"""Longest a child may take before it runs the program, on a machine that is very busy."""
_STOP_S = 2.0
_LOOK_S = 0.05
_USERS = range(61184, 65520)
"""User ids that systemd keeps for services without a name; no file belongs to them."""
_BOOT = "import sys; sys.path.insert(0, sys.argv[2]); from grpo_cli.rewards.sandbox.child import main; main()"
_OPTIONS = "-s -S -P -B -X utf8 -c".split()
_ROOT = str(Path(__file__).parents[3])
_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "HOME": ".", "TMPDIR": "."}
_PROBE = b"import ctypes, decimal, json, math, random, re; print('ready')"


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    seconds: float = 5.0
    """From the start of the program to its end."""
    memory_mib: int = 512
    """Address space."""
    output_bytes: int = 65536
    """Of stdout, of stderr, and of the report, each."""
    file_mib: int = 8
    """Files written, in all."""
    packages: bool = False
    """Whether installed packages can be imported."""


@dataclass(frozen=True)
class Check:
    """What to do after a program has run."""

    kind: Literal["value", "call", "test"]
    """The value of an expression, or of a call, is asked of the program's process; or a test is run in
    a process of its own, which calls the program's functions: it must not raise."""
    setup: str = ""
    """Statements run first; of a test, all of it."""
    text: str = ""
    """The function's name, or the expression whose value is reported, by a test too."""
    arguments: list[Any] = field(default_factory=list)
    """Of the call; plain data."""


@dataclass(frozen=True)
class ProgramResult:
    """What became of a program; the report is its claim."""

    outcome: Outcome
    exit_code: int
    """Negative where a signal ended it."""
    stdout: bytes
    stderr: bytes
    """The end of it."""
    seconds: float
    reason: str
    """Why it did not end well; empty where it did."""
    value: Any
    """What the check reported, as plain data; `Opaque` where it did not."""
    passed: bool
    """Whether a check of kind `test` came to its end."""


def run_program(
    program: bytes, limits: Limits, *, stdin: bytes = b"", check: Check | None = None
) -> ProgramResult:
    """Runs a program in a process of its own, which is gone when this returns.

    Args:
        program: Python, as UTF-8.
        limits: What it may use.
        stdin: What it reads.
        check: What to do after it ran; without one, its output counts.

    Raises:
        RewardError: The child could not be started or confined; this says nothing of the program.
    """
    return _run(program, limits, stdin, check, find_protections())


@cache
def find_protections() -> tuple[Protection, ...]:
    """The protections that work on this machine, found by running a small program with each.

    Raises:
        RewardError: The program does not run even without any.
    """
    chosen: tuple[Protection, ...] = ()
    for protection in PROTECTIONS if sys.platform == "linux" else ():
        if _is_candidate(protection, chosen) and not _try((*chosen, protection)):
            chosen = (*chosen, protection)
    if fault := _try(chosen):
        raise RewardError(f"the sandbox does not run on this machine: {fault}")
    return chosen


def is_protected() -> bool:
    """Whether a program can neither change the user's files nor reach their processes or the network."""
    found = find_protections()
    if "namespaces" in found or "user_namespaces" in found:
        return True
    return "seccomp" in found and ("landlock" in found or "other_user" in found)


def describe_sandbox() -> str:
    """Which protections are at work here, for people."""
    found = find_protections()
    missing = [each for each in PROTECTIONS if each not in found]
    if "namespaces" in found:
        missing.remove("user_namespaces")
    if "user_namespaces" in found:
        missing = [each for each in missing if each not in ("namespaces", "other_user")]
    with_ = ", ".join(("limits", *found))
    return f"with {with_}" + (f"; without {', '.join(missing)}" if missing else "")


def _is_candidate(protection: Protection, chosen: Sequence[Protection]) -> bool:
    if protection == "user_namespaces":
        return "namespaces" not in chosen
    if protection == "other_user":
        return os.geteuid() == 0 and "user_namespaces" not in chosen
    return protection != "namespaces" or os.geteuid() == 0


def _try(protections: tuple[Protection, ...]) -> str:
    """What keeps these protections from working together; empty where nothing does."""
    try:
        result = _run(_PROBE, Limits(seconds=START_S), b"", None, protections)
    except RewardError as error:
        return str(error)
    if result.stdout == b"ready\n":
        return ""
    return result.reason or "its output is lost"


def _run(
    program: bytes,
    limits: Limits,
    stdin: bytes,
    check: Check | None,
    protections: tuple[Protection, ...],
) -> ProgramResult:
    checking = b"" if check is None else marshal.dumps(asdict(check))
    try:
        with (
            working_folder() as folder,
            _sealed_file(stdin) as given,
            _sealed_file(program + checking) as source,
        ):
            confinement = _confine(protections, folder, limits)
            is_tested = check is not None and check.kind == "test"
            job = Job(source, len(program), len(checking), is_tested, -1)
            with _Child(confinement, job, given) as child:
                outcome = child.read(limits)
    except OSError as error:
        raise RewardError(f"the sandbox could not start a process: {error}") from error
    return _judge(child, outcome, limits)


def _confine(protections: tuple[Protection, ...], folder: str, limits: Limits) -> Confinement:
    return Confinement(
        protections=protections,
        folder=folder,
        user=secrets.choice(_USERS),
        memory_mib=limits.memory_mib,
        file_mib=limits.file_mib,
        # A second more than the clock: only programs that compute in several threads meet it.
        cpu_s=ceil(limits.seconds) + 1,
        packages=_package_folders() if limits.packages else (),
    )


@cache
def _package_folders() -> tuple[str, ...]:
    names = ("site-packages", "dist-packages")
    return tuple(path for path in sys.path if Path(path).name in names and Path(path).is_dir())


@contextmanager
def _sealed_file(content: bytes) -> Iterator[int]:
    """A nameless file to read from; unlike a pipe it needs no one to fill it meanwhile."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        if sys.platform == "linux":
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
        yield descriptor
    finally:
        os.close(descriptor)


class _Child:
    """A started child, and what was read from it; leaving it ends it."""

    def __init__(self, confinement: Confinement, job: Job, stdin: int) -> None:
        self.read_bytes = {name: bytearray() for name in ("stdout", "stderr", "report", "status")}
        self.started = time.monotonic()
        self.seconds = 0.0
        self._confinement = confinement
        self._selector = selectors.DefaultSelector()
        pipes = {name: os.pipe() for name in ("report", "status")}
        settings = {
            "parent": os.getpid(),
            "status": pipes["status"][1],
            "job": {**vars(job), "report": pipes["report"][1]},
            "confinement": vars(confinement),
        }
        self._ours = [ends[0] for ends in pipes.values()]
        try:
            self.process = subprocess.Popen(
                [sys.executable, *_OPTIONS, _BOOT, marshal.dumps(settings).hex(), _ROOT],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(job.source, pipes["report"][1], pipes["status"][1]),
                env=_ENVIRONMENT,
                cwd=confinement.folder,
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            self._close()
            raise
        finally:
            for _, theirs in pipes.values():
                os.close(theirs)
        for name in pipes:
            self._selector.register(pipes[name][0], selectors.EVENT_READ, name)
        for name in ("stdout", "stderr"):
            self._selector.register(getattr(self.process, name), selectors.EVENT_READ, name)

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._close()

    def read(self, limits: Limits) -> Outcome:
        """Reads until the program ends or breaks a limit."""
        outcome = self._read_all(limits)
        self.seconds = time.monotonic() - self.started
        if not self.is_ready:
            said = bytes(self.read_bytes["status"] or self.read_bytes["stderr"][-500:])
            why = said.decode(errors="replace").strip() or f"not ready after {self.seconds:.0f} s"
            raise RewardError(f"the sandbox could not be set up: {why}")
        return outcome

    @property
    def is_ready(self) -> bool:
        """Whether the child has run the program, or is about to."""
        return self.read_bytes["status"] == READY

    def _read_all(self, limits: Limits) -> Outcome:
        deadline, ready, look = self.started + START_S, False, 0.0
        while self._selector.get_map():
            if self.is_ready and not ready:
                self.started, ready = time.monotonic(), True
                deadline = self.started + limits.seconds
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            events = self._selector.select(min(deadline - now, _LOOK_S))
            if any(self._read_some(key, limits.output_bytes) for key, _ in events):
                return "flood"
            if ready and now >= look:
                look = now + _LOOK_S
                if broken := self._find_excess(limits.file_mib):
                    return broken
            if not events and self.process.poll() is not None:
                break
        # The watching process kept one end open until its own end, so this does not wait.
        self.process.wait()
        return "ended"

    def _read_some(self, key: selectors.SelectorKey, most: int) -> bool:
        """Reads what is there; whether that is more than there may be."""
        part = os.read(key.fd, 65536)
        if not part:
            self._selector.unregister(key.fileobj)
        self.read_bytes[key.data] += part
        return len(self.read_bytes[key.data]) > most

    def _find_excess(self, mib: int) -> Outcome | None:
        """The limit that is broken, of those that the kernel does not hold here."""
        protections, size = self._confinement.protections, mib * 1024 * 1024
        if self._confinement.is_namespaced and "other_user" in protections:
            return None
        pids = find_descendants(self.process.pid)
        if "other_user" not in protections and count_threads(pids) > TASKS:
            return "threads"
        # A private root has a size of its own.
        is_bounded = self._confinement.is_namespaced
        return (
            None
            if is_bounded or not is_over(self._confinement.folder, size, pids, size)
            else "disk"
        )

    def _end(self) -> None:
        """Asks the watching process to end all; kills its group where it does not."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def _close(self) -> None:
        self._selector.close()
        for descriptor in self._ours:
            os.close(descriptor)
        for stream in (self.process.stdout, self.process.stderr) if self._has_process else ():
            if stream is not None:
                stream.close()

    @property
    def _has_process(self) -> bool:
        return hasattr(self, "process")


def _judge(child: _Child, outcome: Outcome, limits: Limits) -> ProgramResult:
    report = _read_report(bytes(child.read_bytes["report"]))
    code = child.process.returncode
    return ProgramResult(
        outcome=outcome,
        exit_code=code,
        stdout=bytes(child.read_bytes["stdout"]),
        stderr=bytes(child.read_bytes["stderr"][-2000:]),
        seconds=child.seconds,
        reason=_reason(outcome, code, report, limits),
        value=_value(report),
        passed=outcome == "ended" and report.get("passed") is True,
    )


def _read_report(written: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        report = json.loads(written.rpartition(b"\n")[2])
        return report if isinstance(report, dict) else {}
    return {}


def _one_line(text: str) -> str:
    """The text without what a terminal would obey, or UTF-8 cannot hold."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _value(report: dict[str, Any]) -> Any:
    if "value" not in report:
        return Opaque("unknown")
    try:
        return decode(report["value"])
    except RecursionError:
        return Opaque("unknown")


def _reason(outcome: Outcome, code: int, report: dict[str, Any], limits: Limits) -> str:
    if outcome == "timeout":
        return f"took longer than {limits.seconds:g} s"
    if outcome == "flood":
        return f"wrote more than {limits.output_bytes // 1024} KiB"
    if outcome == "disk":
        return f"wrote files of more than {limits.file_mib} MiB"
    if outcome == "threads":
        return f"ran more than {TASKS} threads"
    if "error" in report:
        return _one_line(str(report["error"])[:300])
    if code == -signal.SIGXCPU:
        return f"used more than {ceil(limits.seconds) + 1} s of CPU time"
    if code < 0:
        return f"ended by signal {-code}"
    return f"exit code {code}" if code else ""
