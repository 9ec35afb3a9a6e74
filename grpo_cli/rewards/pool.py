"""Processes in which slow code runs under a time limit, and is killed where it passes it.

Owns the processes: how many, what they prepare, and starting them anew. Knows nothing of rewards;
pebble does the starting, watching and killing. Works on any thread, unlike limits by signals.
"""

import contextlib
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext

    from pebble import ProcessPool

MOST_WORKERS = 16
PREPARATION_S = 60.0
"""Longest a new process may take to prepare itself, beyond a call's own limit."""
_TICK_S = 1.0
_PRELOADED = ("grpo_cli.rewards.scoring", "math_verify")
"""Imported once by the process that all workers are copies of; sympy alone takes 0.7 s."""


@dataclass(frozen=True)
class Late:
    """A call was killed for taking too long."""

    timeout_s: float


@dataclass(frozen=True)
class Died:
    """The process that ran a call ended before the call did, twice."""

    exit_code: int | None
    """Negative for the number of a signal."""


@dataclass
class WorkerPool:
    """Processes that run calls under a time limit; they start with the first call."""

    prepare: Callable[..., object]
    """Called with `arguments` in every new process, outside of any time limit."""
    arguments: tuple[Any, ...] = ()
    workers: int = 0
    """Processes; 0 for as many as `count_workers` gives."""
    _pool: "ProcessPool | None" = field(default=None, init=False, repr=False)
    _end: Callable[[], object] | None = field(default=None, init=False, repr=False)

    def run(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], timeout_s: float
    ) -> list[Any]:
        """Calls a function once for each tuple of arguments, several at a time.

        Args:
            function: Of a module's top level; runs in another process.
            calls: The arguments of each call; whatever can be pickled.
            timeout_s: Limit of each call from its own start.

        Returns:
            What each call returned, in order; `Late` or `Died` where it did not. What a call
            raises is raised here.
        """
        results = self._run_once(function, calls, timeout_s)
        # A worker may have been killed for no fault of its call, as by a signal to the whole group.
        died = [index for index, result in enumerate(results) if isinstance(result, Died)]
        again = self._run_once(function, [calls[index] for index in died], timeout_s)
        for index, result in zip(died, again, strict=True):
            results[index] = result
        return results

    def _run_once(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], timeout_s: float
    ) -> list[Any]:
        futures: list[Future[Any] | None] = []
        for call in calls:
            try:
                futures.append(self._started().schedule(function, call, timeout=timeout_s))
            except (BrokenProcessPool, RuntimeError):
                self._abandon()
                futures.append(None)
        self._wait([future for future in futures if future is not None], timeout_s)
        return [_result(future, timeout_s) for future in futures]

    def _wait(self, futures: Sequence["Future[Any]"], timeout_s: float) -> None:
        """Waits for calls to end, and ends the pool where it has lost them.

        Workers killed from outside can leave pebble's pool broken with calls that nobody ends
        (pebble 5.2).
        """
        waiting, last_end = set(futures), time.monotonic()
        while waiting:
            ended, waiting = wait(waiting, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            if ended:
                last_end = time.monotonic()
                continue
            broken = self._pool is None or not self._pool.active
            if broken or time.monotonic() - last_end > timeout_s + PREPARATION_S:
                self._abandon()
                return

    def _abandon(self) -> None:
        """Ends a broken pool; the next call starts another."""
        if self._pool is not None and self._end is not None:
            self._end()
        self._pool = None

    def _started(self) -> "ProcessPool":
        if self._pool is None or not self._pool.active:
            from pebble import ProcessPool

            context = _context()
            lifeline, held = context.Pipe(duplex=False)
            self._pool = ProcessPool(
                max_workers=self.workers or count_workers(),
                initializer=_begin,
                initargs=(lifeline, self.prepare, self.arguments),
                context=context,
            )
            # The pipe's other end lives as long as the pool, and dies with this process.
            self._end = weakref.finalize(self, _close, self._pool, held)
        return self._pool


def count_workers() -> int:
    """Processes that suit this machine, shared with the other trainers on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    trainers = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = (cores or 1) // max(1, int(trainers) if trainers.isdigit() else 1)
    return max(1, min(MOST_WORKERS, share))


def _result(future: "Future[Any] | None", timeout_s: float) -> Any:
    from pebble import ProcessExpired

    if future is None or not future.done():
        return Died(None)
    try:
        return future.result()
    except TimeoutError:
        return Late(timeout_s)
    except ProcessExpired as error:
        return Died(error.exitcode)
    except (BrokenProcessPool, CancelledError):
        return Died(None)


def _context() -> "BaseContext":
    """How processes start: never as a fork of this one, which has torch's threads and a GPU."""
    import multiprocessing

    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def _begin(
    lifeline: "Connection", prepare: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    """Makes a new process ready: killed at once when asked, and not left behind by its owner."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        _end_with(lifeline)
    # What fails here fails again in the call, which can say so.
    with contextlib.suppress(Exception, SystemExit):
        prepare(*arguments)


def _end_with(lifeline: "Connection") -> None:
    """Lets the kernel end this process when the pipe's other end closes.

    The parent of a worker is the fork server, so a parent's death says nothing of the owner's; and
    a thread that watches would never run beside a regular expression, which keeps the interpreter.
    """
    import fcntl

    # Opened anew: whom to signal is kept with what was opened, which all workers share.
    descriptor = os.open(f"/proc/self/fd/{lifeline.fileno()}", os.O_RDONLY | os.O_NONBLOCK)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    if lifeline.poll():
        os._exit(1)


def _close(pool: "ProcessPool", held: "Connection") -> None:
    # The pipe first: where pebble can no longer end its workers, the kernel does.
    held.close()
    pool.stop()
    # A RuntimeError where the collector runs this in a thread of the pool, which cannot wait for itself.
    with contextlib.suppress(TimeoutError, RuntimeError):
        pool.join(timeout=_TICK_S)
