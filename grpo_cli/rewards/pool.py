"""Worker processes (pebble's) that run slow code under a time limit and are killed if they exceed it."""

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from grpo_cli.machine import usable_cpus
from grpo_cli.processes import stop_with_parent

if TYPE_CHECKING:
    from pebble import ProcessPool

MOST_WORKERS = 16
PREPARATION_S = 60.0
"""Longest a new process may take to prepare itself, beyond a call's own limit."""
_TICK_S = 1.0


class WorkerPool:
    """Processes that run calls under a time limit; they start with the first call, on any thread."""

    def __init__(self, prepare: Callable[[], object]) -> None:
        """Describe a pool of `count_workers` processes, each prepared outside of any time limit."""
        self._prepare = prepare
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()

    def run(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], timeout_s: float
    ) -> list[Any]:
        """Call a function once for each tuple of arguments, several at a time.

        Args:
            function: A module-level function.
            calls: The arguments of each call; whatever can be pickled.
            timeout_s: Limit of each call from its own start.

        Returns:
            What each call returned, in order; a `TimeoutError`; or a `BrokenProcessPool` if its process ended
            first, twice. What a call raises is raised here.
        """
        results = self._run_once(function, calls, timeout_s)
        # A worker may have been killed through no fault of its call, as by a signal to the whole group.
        died = [
            each for each, result in enumerate(results) if isinstance(result, BrokenProcessPool)
        ]
        again = iter(self._run_once(function, [calls[index] for index in died], timeout_s))
        return [next(again) if index in died else result for index, result in enumerate(results)]

    def _run_once(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], timeout_s: float
    ) -> list[Any]:
        if not calls:
            return []
        pool = self._start()
        try:
            futures = [pool.schedule(function, call, timeout=timeout_s) for call in calls]
        except (BrokenProcessPool, RuntimeError):
            self._abandon(pool)
            return [BrokenProcessPool()] * len(calls)
        waiting, deadline = set(futures), time.monotonic() + timeout_s + PREPARATION_S
        # Workers killed from outside can leave pebble's pool broken with calls that nobody ends (pebble 5.2).
        while waiting and pool.active and time.monotonic() < deadline:
            ended, waiting = wait(waiting, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            if ended:
                deadline = time.monotonic() + timeout_s + PREPARATION_S
        if waiting:
            self._abandon(pool)
        return [_result(future) for future in futures]

    def _start(self) -> "ProcessPool":
        with self._lock:
            if self._pool is None or not self._pool.active:
                from pebble import ProcessPool

                self._pool = ProcessPool(
                    max_workers=count_workers(),
                    initializer=_begin,
                    initargs=(self._prepare,),
                    context=_context(),
                )
                self._end = weakref.finalize(self, _close, self._pool)
            return self._pool

    def _abandon(self, pool: "ProcessPool") -> None:
        with self._lock:
            if self._pool is pool:
                self._end()
                self._pool = None


def count_workers() -> int:
    """Return how many processes suit this machine, shared with the other trainers on it."""
    trainers = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(usable_cpus()) // max(1, int(trainers) if trainers.isdigit() else 1)
    return max(1, min(MOST_WORKERS, share))


def _result(future: "Future[Any]") -> Any:
    from pebble import ProcessExpired

    if not future.done():
        return BrokenProcessPool()
    try:
        return future.result()
    except TimeoutError as error:
        return error
    except (ProcessExpired, BrokenProcessPool, CancelledError) as error:
        return BrokenProcessPool(f"exit code {getattr(error, 'exitcode', None)}")


def _context() -> Any:
    """Workers are never forks of this process, which has torch's threads and a GPU."""
    import multiprocessing

    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once, by the process that all workers are forked from; sympy alone takes 0.7 s.
    context.set_forkserver_preload(["grpo_cli.rewards.scoring", "math_verify"])
    return context


def _begin(prepare: Callable[[], object]) -> None:
    """Prepare a new worker: killed at once on SIGTERM, also by the kernel when its owner dies.

    A thread that watches the owner would never run beside a regular expression, which keeps the interpreter.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _follow_fork_server()
    # What fails here fails again in the call, which reports it.
    with contextlib.suppress(Exception, SystemExit):
        prepare()


def _follow_fork_server() -> None:
    """End with the fork server, the parent of workers, and let it end with its owner.

    Source: `ForkServer.connect_to_new_process` (CPython 3.11 to 3.14), which passes every child the pipe that
    keeps the server alive.
    """
    from multiprocessing import forkserver

    alive = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if sys.platform == "linux" and alive is not None:
        stop_with_parent()
        os.close(alive)


def _close(pool: "ProcessPool") -> None:
    pool.stop()
    # A RuntimeError if the collector runs this in a thread of the pool, which cannot join itself.
    with contextlib.suppress(TimeoutError, RuntimeError):
        pool.join(timeout=_TICK_S)
