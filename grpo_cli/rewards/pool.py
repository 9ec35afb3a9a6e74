"""Worker processes that run slow code under a time limit and are killed if they exceed it.

What a worker loads (modules, models, caches) never counts against a limit: see `_Loading`.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from grpo_cli.machine import usable_cpus
from grpo_cli.processes import stop_with_parent

MOST_WORKERS = 16
LOADING_S = 60.0
"""Longest a worker may take to load what a call needs, beyond the call's own limit."""
_START_S = 300.0
"""Longest a new process may take to answer, on a machine that is very busy."""
_MOST_WARMING = 2
"""Calls that were seen to load, which a new worker repeats before its first."""

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A module-level function, and arguments that can be pickled."""


class WorkerEndedError(Exception):
    """A worker's process ended before its call did; the text says how."""


class _TooSlowError(Exception):
    """A call took longer than it may."""


@dataclass
class _Loading:
    """What is known of the loading that calls of one key cause.

    A call that exceeds its limit may be loading. So it goes on for up to `LOADING_S`, and if it ends, it is made
    again in the same process: only the second time counts. If it does not end even so, the time is its own, and
    later calls get only their limit. A new worker first repeats the slowest call and those that loaded.
    """

    slowest: Call | None = None
    """Of the calls that completed within their limit: it may have loaded something, too."""
    slowest_s: float = 0.0
    loaders: list[Call] = field(default_factory=list)
    """Calls that exceeded their limit only the first time."""
    endless: int = 0
    """Calls that exceeded it for another reason."""

    def extra_s(self) -> float:
        """Return what a call may take beyond its limit."""
        # Until some call has completed, one that never ends says little of the others.
        known = self.slowest is not None or self.loaders
        return LOADING_S if self.endless < (1 if known else 2) else 0.0

    def add_completed(self, call: Call, seconds: float) -> None:
        """Note a call that completed within its limit."""
        if self.slowest is None or seconds > self.slowest_s:
            self.slowest, self.slowest_s = call, seconds

    def warm(self, worker: "_Worker", key: str, timeout_s: float) -> None:
        """Have a worker load what calls of its key are known to need."""
        for call in (self.slowest, *self.loaders) if key not in worker.keys else ():
            if call is not None:
                # What fails here fails again in the call itself, which reports it.
                with contextlib.suppress(Exception):
                    worker.ask(call, LOADING_S + timeout_s)
        worker.keys.add(key)


class WorkerPool:
    """Processes that run calls under a time limit; they start with the first call, on any thread."""

    def __init__(self) -> None:
        """Describe a pool of at most `count_workers` processes."""
        self._size = count_workers()
        self._places = threading.BoundedSemaphore(self._size)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._loading: dict[str, _Loading] = defaultdict(_Loading)
        self._lock = threading.Lock()

    def run(
        self,
        function: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        timeout_s: float,
        key: str = "",
    ) -> list[Any]:
        """Call a function once for each tuple of arguments, several at a time.

        Args:
            function: A module-level function.
            calls: The arguments of each call; whatever can be pickled.
            timeout_s: Limit of each call from its own start, without what it loads.
            key: Calls of one key need the same things loaded.

        Returns:
            What each call returned, in order; a `TimeoutError`; or a `WorkerEndedError` if its process ended
            first, twice. What a call raises is raised here.
        """
        if not calls:
            return []
        cancelled = threading.Event()
        with ThreadPoolExecutor(min(self._size, len(calls)), "grpo-pool") as threads:
            futures = [
                threads.submit(self._run_call, (function, call), timeout_s, key, cancelled)
                for call in calls
            ]
            try:
                return [future.result() for future in futures]
            except BaseException:
                cancelled.set()
                threads.shutdown(wait=False, cancel_futures=True)
                with self._lock:
                    for worker in self._busy:
                        worker.end()
                raise

    def _run_call(self, call: Call, timeout_s: float, key: str, cancelled: threading.Event) -> Any:
        with self._places:
            result = self._try_call(self._take(), call, timeout_s, key)
            if isinstance(result, WorkerEndedError) and not cancelled.is_set():
                # A worker may have been killed through no fault of its call, as by a signal to the whole group,
                # which the idle workers got as well: so the second attempt takes a new one.
                result = self._try_call(self._start(), call, timeout_s, key)
            return result

    def _try_call(self, worker: "_Worker", call: Call, timeout_s: float, key: str) -> Any:
        loading = self._loading[key]
        try:
            loading.warm(worker, key, timeout_s)
            return _run_limited(worker, call, timeout_s, loading)
        except (_TooSlowError, WorkerEndedError) as error:
            worker.end()
            return TimeoutError() if isinstance(error, _TooSlowError) else error
        finally:
            self._give_back(worker)

    def _take(self) -> "_Worker":
        with self._lock:
            worker = self._idle.pop() if self._idle else None
            if worker:
                self._busy.add(worker)
        return worker or self._start()

    def _start(self) -> "_Worker":
        worker = _Worker()
        with self._lock:
            self._busy.add(worker)
        return worker

    def _give_back(self, worker: "_Worker") -> None:
        with self._lock:
            self._busy.discard(worker)
            if worker.has_ended:
                return
            if len(self._idle) + len(self._busy) < self._size:
                self._idle.append(worker)
            else:  # one too many, started in place of another
                worker.end()


def _run_limited(worker: "_Worker", call: Call, timeout_s: float, loading: _Loading) -> Any:
    """Return what a call returned; raises `_TooSlowError` if it exceeds its limit even if all is loaded."""
    start = time.monotonic()
    worker.send(call)
    if worker.has_answered(timeout_s):
        result = worker.receive()
        loading.add_completed(call, time.monotonic() - start)
        return result
    try:
        if not worker.has_answered(loading.extra_s()):
            raise _TooSlowError
        worker.receive()
        result = worker.ask(call, timeout_s)
    except _TooSlowError:
        loading.endless += 1
        raise
    loading.loaders = [*loading.loaders[1 - _MOST_WARMING :], call]
    return result


class _Worker:
    """A process that makes one call after the other."""

    def __init__(self) -> None:
        context = _context()
        self._pipe, theirs = context.Pipe()
        # Not a daemon: rewards may start processes of their own.
        self.process = context.Process(target=_serve, args=(theirs,), name="grpo-reward-worker")
        self.process.start()
        theirs.close()
        self.keys: set[str] = set()
        """Of which it has loaded what is known to be needed."""
        self.has_ended = False
        if not _alive:
            # After multiprocessing's own handler is registered, which waits for its processes: so before it.
            atexit.register(_end_all)
        _alive.add(self)
        self.ask((os.getpid, ()), _START_S)

    def ask(self, call: Call, seconds: float) -> Any:
        """Return what a call returned; raises `_TooSlowError` after so many seconds."""
        self.send(call)
        if not self.has_answered(seconds):
            raise _TooSlowError
        return self.receive()

    def send(self, call: Call) -> None:
        """Begin a call; raises `WorkerEndedError` if the process has ended."""
        try:
            self._pipe.send(call)
        except OSError as error:
            raise self._ended() from error

    def has_answered(self, seconds: float) -> bool:
        """Wait for the call to end, or the process; return whether either did."""
        return bool(wait([self._pipe, self.process.sentinel], seconds))

    def receive(self) -> Any:
        """Return what the call returned, or raise what it raised, or `WorkerEndedError`."""
        answer = None
        with contextlib.suppress(EOFError, OSError):
            answer = self._pipe.recv() if self._pipe.poll() else None
        if answer is None:
            raise self._ended()
        value, error = answer
        if error is not None:
            raise error
        return value

    def _ended(self) -> WorkerEndedError:
        self.process.join()
        return WorkerEndedError(f"exit code {self.process.exitcode}")

    def end(self) -> None:
        """Kill the process."""
        self.has_ended = True
        self.process.kill()
        self.process.join()


_alive: "weakref.WeakSet[_Worker]" = weakref.WeakSet()


def _end_all() -> None:
    for worker in list(_alive):
        worker.end()


def count_workers() -> int:
    """Return how many processes suit this machine, shared with the other trainers on it."""
    trainers = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(usable_cpus()) // max(1, int(trainers) if trainers.isdigit() else 1)
    return max(1, min(MOST_WORKERS, share))


def _context() -> Any:
    """Workers are never forks of this process, which has torch's threads and a GPU."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once, by the process that all workers are forked from; sympy alone takes 0.7 s.
    context.set_forkserver_preload(["grpo_cli.rewards.scoring", "math_verify"])
    return context


def _serve(pipe: "Connection[Any, Any]") -> None:
    """Make the calls that arrive, until the owner is gone.

    Killed at once on SIGTERM, also by the kernel when its owner dies: a thread that watches the owner would never
    run beside a regular expression, which keeps the interpreter.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _follow_fork_server()
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments = pipe.recv()
            value, failure = None, None
            try:
                value = function(*arguments)
            except Exception as error:
                failure = error
            try:
                pipe.send((value, failure))
            except OSError:
                raise
            except Exception as error:  # it cannot be pickled
                text = f"{failure or value!r:.200} cannot be passed on: {error}"
                pipe.send((None, RuntimeError(text)))


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
