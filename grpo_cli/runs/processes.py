"""What the processes of a run have in common: that each stops when the one above it dies.

Owns the start of such a process and the call to the kernel. What a process does with the signal is its own
affair.
"""

import ctypes
import signal
import subprocess
import sys
import threading
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


def start_bound(argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
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
