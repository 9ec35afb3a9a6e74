"""Child processes: each stops when its parent dies, and is ended on the way out."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 20.0
_STDIO_GRACE_S = 1.0
"""As `_GRACE_S`, for `reaped_stdio`: shorter than what MCP's client gives a server between SIGTERM and SIGKILL."""
_POLL_S = 0.1
_PARENT = "parent="


def run_module(name: str) -> tuple[str, ...]:
    """Return the command that runs a module; files of the working directory cannot shadow it (`-P`)."""
    return sys.executable, "-P", "-m", name


def stop_with_parent() -> None:
    """Have the kernel send this process a SIGTERM when its parent dies (Linux only)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def child(
    argv: Sequence[str], *, grace_s: float | None = 0.0, **options: Any
) -> Iterator["subprocess.Popen[Any]"]:
    """Run a command that stops when this process dies, and end it on the way out.

    Args:
        grace_s: Seconds between SIGTERM and SIGKILL; 0 kills at once, None never does.
    """
    process = _start(argv, {"stdin": subprocess.DEVNULL, **options})
    try:
        yield process
    finally:
        _end(process, grace_s)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _end(process: "subprocess.Popen[Any]", grace_s: float | None) -> None:
    try:
        if grace_s != 0 and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
    finally:
        process.kill()
        process.wait()


def _start(argv: Sequence[str], options: dict[str, Any]) -> "subprocess.Popen[Any]":
    process = None
    try:
        with _signals_deferred():
            process = subprocess.Popen(argv, preexec_fn=stop_with_parent, **options)
    except BaseException:
        if process is not None:
            process.kill()
            process.wait()
        raise
    return process


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Deliver signals at the end.

    Forking a process that has loaded PyTorch takes long enough to be interrupted, and Python discards what a
    handler raises in the hooks that run there: Ctrl-C would be lost.
    """
    if threading.current_thread() is not threading.main_thread():
        # Handlers run in the main thread only.
        yield
        return
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for each in received:
            signal.raise_signal(each)


@contextlib.contextmanager
def reaped(argv: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """Run a command under a reaper; both, and all descendants, end on the way out or when this process dies.

    Yields:
        The reaper. Its exit code is the command's, 128 + N if signal N ended it. Its first SIGTERM or SIGINT
        asks the command to end; the second kills it.
    """
    lifeline, lifeline_end = os.pipe()
    group, group_end = os.pipe()
    try:
        process = subprocess.Popen(
            [*run_module("grpo_cli.processes"), str(group_end), *argv],
            stdin=lifeline,
            pass_fds=(group_end,),
            # Ctrl-C in the terminal reaches this process only.
            start_new_session=True,
            **options,
        )
        os.close(lifeline)
        os.close(group_end)
        try:
            yield process
        finally:
            _end_reaper(process, group)
    finally:
        os.close(lifeline_end)
        os.close(group)


def _end_reaper(process: "subprocess.Popen[Any]", group: int) -> None:
    process.terminate()
    try:
        process.wait()
    except BaseException:
        # A second Ctrl-C: kill at once.
        process.terminate()
        process.wait()
        raise
    finally:
        # A reaper that was killed itself has left its command running.
        if process.returncode is not None and process.returncode < 0:
            leader = os.read(group, 32)
            if leader:
                _signal_group(int(leader), signal.SIGKILL)


def reaped_stdio(argv: Sequence[str]) -> list[str]:
    """Return a command that runs another under a reaper, for those that talk to it over its stdin and stdout.

    The command and all its descendants end when this process dies, whether or not they read the end of stdin.
    It may be started by a library, with any environment: the reaper needs nothing but Python.
    """
    return [sys.executable, "-P", __file__, f"{_PARENT}{os.getpid()}", *argv]


def main(target: str, argv: list[str]) -> int:
    """Run a command as its reaper; return its exit code, 128 + N if signal N ended it.

    Args:
        target: A pipe that receives the command's process group, if the end of stdin is to end it; or `parent=`
            and the process whose death is to: the command then has the reaper's stdin.
        argv: The command.
    """
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    if sys.platform.startswith("linux"):
        # Orphaned descendants become children of this process.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = int(target.removeprefix(_PARENT)) if target.startswith(_PARENT) else None
    stdin = subprocess.DEVNULL if parent is None else None
    process = _start(argv, {"stdin": stdin, "start_new_session": True})
    if parent is None:
        os.write(int(target), str(process.pid).encode())
        os.close(int(target))
    deadline = None
    while process.poll() is None:
        if deadline is None and (signals or _is_orphaned(parent)):
            deadline = time.monotonic() + (_GRACE_S if parent is None else _STDIO_GRACE_S)
            _signal_group(process.pid, signal.SIGTERM)
        if len(signals) > 1 or (deadline is not None and time.monotonic() > deadline):
            break
        time.sleep(_POLL_S)
    _signal_group(process.pid, signal.SIGKILL)
    code = process.wait()
    _kill_descendants()
    return code if code >= 0 else 128 - code


def _is_orphaned(parent: int | None) -> bool:
    return _is_closed(sys.stdin.fileno()) if parent is None else os.getppid() != parent


def _is_closed(pipe: int) -> bool:
    """Return whether the other end of a pipe was closed."""
    ready, _, _ = select.select([pipe], [], [], 0)
    return bool(ready) and not os.read(pipe, 1024)


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _kill_descendants() -> None:
    """Kill what the command left behind, until this process has no children."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as listed:
            return [int(pid) for pid in listed.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
