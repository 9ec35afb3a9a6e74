"""Keeps a command and all that it starts from outliving whoever asked for it.

Runs as a process of its own between the two: `python -m grpo_cli.runs.guardian COMMAND…`. It reads its
stdin, which ends when the asker does, however that happens; then, or at a SIGTERM, the command gets a
SIGTERM, some seconds, and the whole family a SIGKILL. A second SIGTERM ends it at once. Linux alone can
adopt grandchildren; elsewhere the command's own group is ended. A guardian that is killed itself leaves the
last step to the asker, whom it has told the command's process group.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_cli.runs.processes import run_module, start_bound

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 20.0
_LOOK_S = 0.1


@contextlib.contextmanager
def guarded(argv: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """Starts a command under guard; on the way out it and its family are ended, the guardian alive or not.

    Args:
        argv: The command.
        options: More of `subprocess.Popen`'s.

    Yields:
        The guardian, whose exit code is the command's.
    """
    theirs, ours = os.pipe()
    group, told = os.pipe()
    try:
        process = subprocess.Popen(
            [*run_module("grpo_cli.runs.guardian"), str(told), *argv],
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


def _end(guardian: "subprocess.Popen[Any]") -> None:
    """Asks once; a Ctrl-C or SIGTERM while it takes its time asks again, which ends it at once."""
    guardian.terminate()
    try:
        guardian.wait()
    except BaseException:
        guardian.terminate()
        guardian.wait()
        raise


def _end_orphans(group: int) -> None:
    """Kills what a guardian that was killed has left: a server may hang in its own clean shutdown."""
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
    process = start_bound(argv, stdin=subprocess.DEVNULL, start_new_session=True)
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
