"""What the processes of a run have in common: that each stops when the one above it dies.

Owns the start of such a process and the call to the kernel. What a process does with the signal is its own
affair.
"""

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
from contextlib import contextmanager
from typing import Any

_PR_SET_PDEATHSIG = 1


def run_module(name: str) -> tuple[str, ...]:
    """Return the command that runs a module, in whose way no file of the working directory stands (`-P`)."""
    return sys.executable, "-P", "-m", name


def stop_with_parent() -> None:
    """Asks the kernel for a SIGTERM when the parent dies, however that happens; Linux alone can."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start_child(argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a process that stops when this one dies, and loses no signal meanwhile.

    Args:
        argv: The command.
        options: What `subprocess.Popen` takes.
    """
    process = None
    try:
        with _signals_kept():
            process = subprocess.Popen(argv, preexec_fn=stop_with_parent, **options)
    except BaseException:
        if process is not None:
            process.kill()
            process.wait()
        raise
    return process


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Puts signals off until the end.

    Forking a process that has loaded PyTorch takes long enough to be hit, and Python throws away what a
    handler raises in the hooks that run there: Ctrl-C would be lost.
    """
    if threading.current_thread() is not threading.main_thread():
        # Handlers run in the main thread, whatever this one does.
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
        for kept in received:
            signal.raise_signal(kept)


_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 20.0
_LOOK_S = 0.1


@contextlib.contextmanager
def reaped(argv: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """Starts a command under guard; on the way out it and its family are ended, the reaper alive or not.

    Args:
        argv: The command.
        options: More of `subprocess.Popen`'s.

    Yields:
        The reaper, whose exit code is the command's.
    """
    theirs, ours = os.pipe()
    group, told = os.pipe()
    try:
        process = subprocess.Popen(
            [*run_module("grpo_cli.processes"), str(told), *argv],
            stdin=theirs,
            pass_fds=(told,),
            # Ctrl-C reaches it through us.
            start_new_session=True,
            **options,
        )
        os.close(theirs)
        os.close(told)
        try:
            yield process
        finally:
            _end(process)
            if process.returncode < 0:
                _end_orphans(group)
    finally:
        os.close(ours)
        os.close(group)


def _end(reaper: "subprocess.Popen[Any]") -> None:
    """Asks once; a Ctrl-C or SIGTERM while it takes its time asks again, which ends it at once."""
    reaper.terminate()
    try:
        reaper.wait()
    except BaseException:
        reaper.terminate()
        reaper.wait()
        raise


def _end_orphans(group: int) -> None:
    """Kills what a reaper that was killed has left: a server may hang in its own clean shutdown."""
    leader = os.read(group, 32)
    if leader:
        _signal_group(int(leader), signal.SIGKILL)


def main(told: int, argv: list[str]) -> int:
    """Runs a command; gives its exit code, 128 + N where a signal ended it.

    Args:
        told: A pipe that is told the command's process group.
        argv: The command.
    """
    asked = _Asked()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked.receive)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    process = start_child(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    os.write(told, str(process.pid).encode())
    os.close(told)
    deadline = None
    while process.poll() is None:
        if deadline is None and (asked.count or _has_ended(sys.stdin.fileno())):
            deadline = time.monotonic() + _GRACE_S
            _signal_group(process.pid, signal.SIGTERM)
        if asked.count > 1 or (deadline is not None and time.monotonic() > deadline):
            break
        time.sleep(_LOOK_S)
    _signal_group(process.pid, signal.SIGKILL)
    code = process.wait()
    _end_family()
    return code if code >= 0 else 128 - code


class _Asked:
    """How often this process was asked to end."""

    count = 0

    def receive(self, number: int, frame: object) -> None:
        self.count += 1


def _has_ended(pipe: int) -> bool:
    """Whether the other end of a pipe was closed; what is written there is not read."""
    ready, _, _ = select.select([pipe], [], [], 0)
    return bool(ready) and not os.read(pipe, 1024)


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _end_family() -> None:
    """Ends what the command left behind; as its own children are gone, all come to this process."""
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
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
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
