"""Runs a program under the protections that work on this machine, which are found out once, by trying.

A child writes no bytecode, so what it imports is imported here too. Nothing runs between fork and exec, as a
trainer has many threads. The walk over a working folder expects a tree that a hostile program made: deep, large,
locked, full of links.
"""

import contextlib
import marshal
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Literal, get_args

from grpo_cli.errors import RewardError
from grpo_cli.sandbox import rules, unit_tests  # noqa: F401
from grpo_cli.sandbox.child import READY
from grpo_cli.sandbox.confinement import TASKS, is_namespaced

Protection = Literal["namespaces", "user_namespaces", "other_user", "landlock", "seccomp"]
"""`namespaces`: a root folder of its own in memory, no network, and process numbers of its own;
`user_namespaces`: the same without privileges; `other_user`: a user id nobody else has;
`landlock`: no files but the interpreter's; `seccomp`: no processes, sockets and the like."""

START_S = 60.0
"""Longest a child may take before it runs the program, on a machine that is very busy."""
MOST_ENTRIES = 2000
"""Files and folders a working folder may hold; bounds the walk too."""
_STOP_S = 2.0
_POLL_S = 0.05
_USERS = range(61184, 65520)
"""User ids that systemd keeps for services without a name; no file belongs to them."""
_PROBE = b"import ctypes, decimal, json, math, random, re; print('ready')"
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[2]); from grpo_cli.sandbox.child import main; main()"
)
_OPTIONS = "-s -S -P -B -X utf8 -c".split()
_ROOT = str(Path(__file__).parents[2])
_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "HOME": ".", "TMPDIR": "."}


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
    """Tests of a program, run in a process of their own, which calls the program's functions."""

    names: list[str] = field(default_factory=list)
    """What the program has to define, or part of it. Instances of classes among them are judged by the tests."""
    assigned: list[str] = field(default_factory=list)
    """Global variables of the tests themselves."""
    steps: list["Step"] = field(default_factory=list)
    """What is run, in this order; what a step changes is seen by those after it."""
    stop: bool = False
    """Whether to end at the first test that fails."""
    compare: str = "exact"
    """`float` for a tolerance between numbers."""


@dataclass(frozen=True)
class Step:
    """A part of the code of tests."""

    code: str
    """Statements."""
    asserts: bool = False
    """Whether this is a test, which has to assert; others must not raise."""
    collected: list[str] = field(default_factory=list)
    """Test functions and classes that are run after the statements."""


@dataclass(frozen=True)
class ProgramResult:
    """What became of a program; the report is its claim."""

    stdout: bytes
    reason: str
    """Why it did not end well; empty if it did."""
    reports: list[str]
    """Why each test that the check ran failed; empty for one that passed."""


def run_program(
    program: bytes, limits: Limits, *, stdin: bytes = b"", check: Check | None = None
) -> ProgramResult:
    """Run a program in a process of its own, which is gone when this returns.

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
    """Return the protections that work on this machine, found by running a small program with each.

    Raises:
        RewardError: The program does not run even without any.
    """
    chosen: tuple[Protection, ...] = ()
    for protection in get_args(Protection) if sys.platform == "linux" else ():
        if _is_candidate(protection, chosen) and not _try((*chosen, protection)):
            chosen = (*chosen, protection)
    if fault := _try(chosen):
        raise RewardError(f"the sandbox does not run on this machine: {fault}")
    return chosen


def is_protected() -> bool:
    """Return whether programs can neither change the user's files nor reach their processes or the network."""
    active = find_protections()
    if "namespaces" in active or "user_namespaces" in active:
        return True
    return "seccomp" in active and ("landlock" in active or "other_user" in active)


def _is_candidate(protection: Protection, chosen: Sequence[Protection]) -> bool:
    if protection == "user_namespaces":
        return "namespaces" not in chosen
    if protection == "other_user":
        return os.geteuid() == 0 and "user_namespaces" not in chosen
    return protection != "namespaces" or os.geteuid() == 0


def _try(protections: tuple[Protection, ...]) -> str:
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
    settings = {
        **asdict(limits),
        "protections": protections,
        "user": secrets.choice(_USERS),
        # A second more than the clock: only programs that compute in several threads exceed it.
        "cpu_s": ceil(limits.seconds * count_tests(check)) + 1,
        "packages": _package_folders() if limits.packages else (),
        "size": len(program),
        "check_size": len(checking),
    }
    try:
        with (
            _working_folder() as folder,
            _nameless_file(stdin) as given,
            _nameless_file(program + checking) as source,
            _Child({**settings, "folder": folder, "source": source}, given) as child,
        ):
            broken = child.read(limits, count_tests(check))
    except OSError as error:
        raise RewardError(f"the sandbox could not start a process: {error}") from error
    reports = _read_reports(child.pipes["report"])
    reason = broken or (reports[-1] if reports else "")
    reason = reason or _explain_end(child.process.returncode, settings["cpu_s"])
    return ProgramResult(bytes(child.pipes["stdout"]), reason, reports)


def count_tests(check: Check | None) -> int:
    """Return the number of tests in a check; without one it is 1."""
    return sum(step.asserts for step in check.steps) if check else 1


class _Child:
    """A started child, and what was read from its pipes; leaving it ends it."""

    def __init__(self, settings: dict[str, Any], stdin: int) -> None:
        """Start it; `settings` are `child.main`'s, without its pipes."""
        self.pipes = {name: bytearray() for name in ("stdout", "stderr", "report")}
        self._folder: str = settings["folder"]
        self._protections: tuple[str, ...] = settings["protections"]
        with contextlib.ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            written = {}
            for name in self.pipes:
                read, written[name] = os.pipe()
                stack.callback(os.close, read)
                self._selector.register(read, selectors.EVENT_READ, name)
            settings = {**settings, "parent": os.getpid(), "report": written["report"]}
            try:
                self.process = subprocess.Popen(
                    [sys.executable, *_OPTIONS, _BOOT, marshal.dumps(settings).hex(), _ROOT],
                    stdin=stdin,
                    stdout=written["stdout"],
                    stderr=written["stderr"],
                    pass_fds=(settings["source"], settings["report"]),
                    env=_ENVIRONMENT,
                    cwd=self._folder,
                    start_new_session=True,
                )
            finally:
                for descriptor in written.values():
                    os.close(descriptor)
            self._stack = stack.pop_all()

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        """Ask the watching process to end all; kill its group if it does not."""
        with self._stack:
            if self.process.poll() is None:
                self.process.terminate()
                try:
                    self.process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self.process.pid, signal.SIGKILL)
                    self.process.wait()

    def read(self, limits: Limits, tests: int = 1) -> str:
        """Read until the program ends, or return which limit it broke; each test has the time limit.

        Raises:
            RewardError: The program was never started.
        """
        started, ready, broken = time.monotonic(), 0, ""
        deadline, next_poll = started + START_S, 0.0
        while self._selector.get_map() and not broken:
            now = time.monotonic()
            # Without a check the program may write here: it is one test.
            lines = self.pipes["report"].count(b"\n")
            if min(lines, tests) > ready and self.pipes["report"].startswith(READY):
                ready, deadline = min(lines, tests), now + limits.seconds
            if now >= deadline:
                broken = f"took longer than {limits.seconds:g} s"
                break
            # Asked before it is waited: what was written just before the end is still to be read.
            has_ended = self.process.poll() is not None
            events = self._selector.select(min(deadline - now, _POLL_S))
            if any(self._read_some(key) > limits.output_bytes for key, _ in events):
                broken = f"wrote more than {limits.output_bytes // 1024} KiB"
            elif ready and now >= next_poll:
                next_poll = now + _POLL_S
                broken = self._find_excess(limits)
            if not events and has_ended:
                break
        if not self.pipes["report"].startswith(READY):
            message = bytes(self.pipes["report"] or self.pipes["stderr"][-500:])
            why = message.decode(errors="replace").strip()
            waited = time.monotonic() - started
            why = why or f"not ready after {waited:.0f} s (exit code {self.process.poll()})"
            raise RewardError(f"the sandbox could not be set up: {why}")
        if not broken:
            # The watching process kept one end open until its own end, so this does not wait.
            self.process.wait()
        return broken

    def _read_some(self, key: selectors.SelectorKey) -> int:
        part = os.read(key.fd, 65536)
        if not part:
            self._selector.unregister(key.fileobj)
        self.pipes[key.data] += part
        return len(self.pipes[key.data])

    def _find_excess(self, limits: Limits) -> str:
        """Return the limit that is broken, of those that the kernel does not enforce here."""
        # A private root has a size of its own, and the threads of a user are counted.
        if "other_user" not in self._protections and _count_threads(self.process.pid) > TASKS:
            return f"ran more than {TASKS} threads"
        has_root, most_bytes = is_namespaced(self._protections), limits.file_mib * 1024 * 1024
        if not has_root and is_over(self._folder, most_bytes):
            return f"wrote files of more than {limits.file_mib} MiB"
        return ""


@cache
def _package_folders() -> tuple[str, ...]:
    names = ("site-packages", "dist-packages")
    return tuple(path for path in sys.path if Path(path).name in names and Path(path).is_dir())


@contextlib.contextmanager
def _nameless_file(content: bytes) -> Iterator[int]:
    """A nameless file to read from; unlike a pipe it needs no one to fill it meanwhile."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


def _read_reports(written: bytearray) -> list[str]:
    """Return what was reported of each test; a program without a check may have written anything."""
    lines = bytes(written).removeprefix(READY).decode(errors="replace").splitlines()
    return [_one_line(line[1:300]) or "it failed" if line else "" for line in lines]


def _explain_end(code: int, cpu_s: int) -> str:
    if code == -signal.SIGXCPU:
        return f"used more than {cpu_s} s of CPU time"
    if code < 0:
        return f"ended by signal {-code}"
    return f"exit code {code}" if code else ""


def _one_line(text: str) -> str:
    """Return the text without what a terminal would obey, or UTF-8 cannot hold."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


@contextlib.contextmanager
def _working_folder() -> Iterator[str]:
    """Make a new folder, and remove it afterwards whatever it then holds."""
    folder = tempfile.mkdtemp(prefix="grpo-code-")
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except (OSError, RecursionError):
            # Folders without rights, or deeper than Python can walk. Links are not followed.
            for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
                subprocess.run([*command, "--", folder], capture_output=True, check=False)


def is_over(folder: str, most_bytes: int) -> bool:
    """Return whether the files in a working folder take more than this, or are more than it may hold."""
    size = entries = 0
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as children:
                for entry in children:
                    entries += 1
                    with contextlib.suppress(OSError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if size > most_bytes or entries > MOST_ENTRIES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            # It vanished; if it only moved, it is counted the next time.
            continue
        except OSError:
            # Locked against us, or deeper than a path can say: anything could be in there.
            return True
    return False


def _count_threads(pid: int) -> int:
    """Return the number of threads of the processes that a process and its descendants started (Linux)."""
    count = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        for child in file.read().split():
            with contextlib.suppress(OSError):
                count += os.stat(f"/proc/{child}/task").st_nlink - 2
            count += _count_threads(int(child))
    return count
