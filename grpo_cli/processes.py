"""Child processes: each stops when its parent dies, and is ended on the way out."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from grpo_cli.errors import (
    GrpoError,
    ProblemsError,
    RecipeError,
    RewardError,
    RunError,
    SetupError,
    UsageError,
)

Result = TypeVar("Result")
Progress = Callable[[str], None]
_KINDS: tuple[type[GrpoError], ...] = (UsageError, SetupError, RewardError, RunError, GrpoError)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 20.0
_STDIO_GRACE_S = 1.0
"""As `_GRACE_S`, for `reaped_stdio`: shorter than what MCP's client gives a server between SIGTERM and SIGKILL."""
_POLL_S = 0.1


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

    It has `grace_s` seconds between SIGTERM and SIGKILL; 0 kills at once, None never does.
    """
    process = _start(argv, **{"stdin": subprocess.DEVNULL, **options})
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


def _start(argv: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    return subprocess.Popen(argv, preexec_fn=stop_with_parent, **options)


@contextlib.contextmanager
def reaped(argv: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """Run a command under a reaper; both, and all descendants, end on the way out or when this process dies.

    Yields the reaper. Its exit code is the command's, 128 + N if signal N ended it. Its first SIGTERM or SIGINT
    asks the command to end; the second kills it.
    """
    # In a session of its own: Ctrl-C in the terminal reaches this process only.
    options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen(_reaper(_GRACE_S, argv), **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait()
        except BaseException:
            # A second Ctrl-C: kill at once.
            process.terminate()
            process.wait()
            raise


def reaped_stdio(argv: Sequence[str]) -> list[str]:
    """Return a command that runs another under a reaper, for those that talk to it over its stdin and stdout.

    The command and all its descendants end when this process dies, whether or not they read the end of stdin.
    It may be started by a library, with any environment: the reaper needs nothing but Python.
    """
    return _reaper(_STDIO_GRACE_S, argv)


def _reaper(grace_s: float, argv: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", __file__, str(os.getpid()), str(grace_s), *argv]


def main(parent: int, grace_s: float, argv: list[str]) -> int:
    """Run a command as its reaper, until `parent` dies; return its exit code, 128 + N if signal N ended it."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    if sys.platform.startswith("linux"):
        # Orphaned descendants become children of this process.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    process = _start(argv, start_new_session=True)
    deadline = None
    while process.poll() is None:
        if deadline is None and (signals or os.getppid() != parent):
            deadline = time.monotonic() + grace_s
            _signal_group(process.pid, signal.SIGTERM)
        if len(signals) > 1 or (deadline is not None and time.monotonic() > deadline):
            break
        time.sleep(_POLL_S)
    _signal_group(process.pid, signal.SIGKILL)
    code = process.wait()
    _kill_descendants()
    return code if code >= 0 else 128 - code


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
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))


def run_in_child(function: Callable[[Progress], Result], on_progress: Progress) -> Result:
    """Run a function in a fork of this process, which has few threads yet; return its result, by pickle.

    Raises `RunError` if the process ended without a result, and the `GrpoError` that the function raised.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, function))
    process.start()
    there.close()
    doing = "starting"
    try:
        while True:
            kind, value = here.recv()
            if kind == "result":
                return value
            if kind == "error":
                number, problems, parts = value
                raise RecipeError(problems) if problems else _KINDS[number](*parts)
            on_progress(doing := value)
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        raise RunError(
            f"the process that tries the recipe {how} before it had a result (last: {doing})",
            "find what ends it, such as `os._exit()` or a native library, and raise an error there",
        ) from None
    finally:
        # Threads of the user's may outlive the result.
        process.kill()
        process.join()
        here.close()


def _answer(pipe: Any, function: Callable[[Progress], Any]) -> None:
    """Send the result of a function, or its error, and what it is doing before."""
    stop_with_parent()
    # Those of the parent may be a display, whose thread is not here.
    sys.stdout = sys.stderr = sys.__stderr__
    try:
        pipe.send(("result", function(lambda doing: pipe.send(("doing", doing)))))
    except GrpoError as error:
        number = next(place for place, kind in enumerate(_KINDS) if isinstance(error, kind))
        problems = error.problems if isinstance(error, ProblemsError) else None
        pipe.send(("error", (number, problems, (error.seen, error.fix, error.path, error.details))))
    except KeyboardInterrupt:
        os._exit(130)
