"""Worker processes that run slow code under a time limit and are killed if they exceed it.

What a worker loads never counts against a limit: neither imports, for which the clock stops, nor what `prepare`
loads.
"""

import atexit
import builtins
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from grpo_cli.machine import usable_cpus
from grpo_cli.processes import stop_with_parent

MOST_WORKERS = 16
LOADING_S = 60.0
"""Longest a worker may take to load what calls of a key need, and longest the imports of one call may take."""
_START_S = 300.0
"""Longest a new process may take to answer, on a machine that is very busy."""


class WorkerEndedError(Exception):
    """A worker's process ended before its call did; the text says how."""


class _TooSlowError(Exception):
    """A call took longer than it may."""


class _Job(NamedTuple):
    """What the calls of one `WorkerPool.run` share."""

    function: Callable[..., Any]
    timeout_s: float
    key: str
    prepare: Callable[..., Any] | None


class WorkerPool:
    """Processes that run calls under a time limit; they start with the first call, on any thread."""

    def __init__(self) -> None:
        """Describe a pool of at most `count_workers` processes."""
        self._size = count_workers()
        self._places = threading.BoundedSemaphore(self._size)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._unprepared: set[str] = set()
        """Keys whose `prepare` did not end."""
        self._lock = threading.Lock()

    def run(
        self,
        function: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        timeout_s: float,
        key: str = "",
        prepare: Callable[..., Any] | None = None,
    ) -> list[Any]:
        """Call a function once for each tuple of arguments, several at a time.

        Args:
            function: A module-level function.
            calls: The arguments of each call; whatever can be pickled.
            timeout_s: Limit of each call from its own start, without its imports.
            key: Calls of one key need the same things loaded.
            prepare: Loads them in a new process, called with the arguments of its first call; what it raises is
                ignored.

        Returns:
            What each call returned, in order; a `TimeoutError`; or a `WorkerEndedError` if its process ended
            first, twice. What a call raises is raised here.
        """
        if not calls:
            return []
        job, cancelled = _Job(function, timeout_s, key, prepare), threading.Event()
        with ThreadPoolExecutor(min(self._size, len(calls)), "grpo-pool") as threads:
            futures = [
                threads.submit(self._run_call, job, arguments, cancelled) for arguments in calls
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

    def _run_call(self, job: "_Job", arguments: tuple[Any, ...], cancelled: threading.Event) -> Any:
        with self._places:
            result = self._try_call(self._take(), job, arguments)
            if isinstance(result, WorkerEndedError) and not cancelled.is_set():
                # A worker may have been killed through no fault of its call, as by a signal to the whole group,
                # which the idle workers got as well: so the second attempt takes a new one.
                result = self._try_call(self._start(), job, arguments)
            return result

    def _try_call(self, worker: "_Worker", job: "_Job", arguments: tuple[Any, ...]) -> Any:
        try:
            if job.prepare and job.key not in worker.keys | self._unprepared:
                self._prepare(worker, job, arguments)
            return worker.ask((job.function, arguments), job.timeout_s)
        except (_TooSlowError, WorkerEndedError) as error:
            worker.end()
            return TimeoutError() if isinstance(error, _TooSlowError) else error
        finally:
            self._give_back(worker)

    def _prepare(self, worker: "_Worker", job: "_Job", arguments: tuple[Any, ...]) -> None:
        worker.keys.add(job.key)
        try:
            worker.ask((job.prepare, arguments), LOADING_S)
        except (_TooSlowError, WorkerEndedError):
            self._unprepared.add(job.key)
            raise
        except Exception:
            pass  # what fails here fails again in the call itself, which reports it

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


class _Worker:
    """A process that makes one call after the other."""

    def __init__(self) -> None:
        context = _context()
        self._pipe, theirs = context.Pipe()
        self._imports = context.RawArray("d", 2)
        """Seconds spent in imports, and when the one in progress began, or 0."""
        # Not a daemon: rewards may start processes of their own.
        self.process = context.Process(
            target=_serve, args=(theirs, self._imports), name="grpo-reward-worker"
        )
        self.process.start()
        theirs.close()
        self.keys: set[str] = set()
        """Whose `prepare` it has called."""
        self.has_ended = False
        if not _alive:
            # After multiprocessing's own handler is registered, which waits for its processes: so before it.
            atexit.register(_end_all)
        _alive.add(self)
        self.ask((os.getpid, ()), _START_S)

    def ask(self, call: tuple[Any, tuple[Any, ...]], seconds: float) -> Any:
        """Call a module-level function with arguments that can be pickled.

        Returns:
            What it returned. What it raises is raised; so is `_TooSlowError` after `seconds`, without its imports,
            and `WorkerEndedError` if the process ends first.
        """
        start, imports_s = time.monotonic(), self._imports_s()
        try:
            self._pipe.send(call)
        except OSError as error:
            raise self._ended() from error
        left = seconds
        while not wait([self._pipe, self.process.sentinel], max(left, 0.01)):
            imported = self._imports_s() - imports_s
            left = seconds + min(imported, LOADING_S) - (time.monotonic() - start)
            if left <= 0:
                raise _TooSlowError
        answer = None
        with contextlib.suppress(EOFError, OSError):
            answer = self._pipe.recv() if self._pipe.poll() else None
        if answer is None:
            raise self._ended()
        value, failure = answer
        if failure is not None:
            raise failure
        return value

    def _imports_s(self) -> float:
        seconds, begun = self._imports
        return seconds + (time.monotonic() - begun if begun else 0.0)

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


def _time_imports(seconds: Any) -> None:
    """Add the time of each import to `seconds[0]`; `seconds[1]` is when the one in progress began, or 0."""
    original = builtins.__import__

    def import_timed(*arguments: Any, **named: Any) -> Any:
        if seconds[1]:  # inside another
            return original(*arguments, **named)
        begun = seconds[1] = time.monotonic()
        try:
            return original(*arguments, **named)
        finally:
            seconds[0] += time.monotonic() - begun
            seconds[1] = 0.0

    builtins.__import__ = import_timed


def _serve(pipe: "Connection[Any, Any]", imports: Any) -> None:
    """Make the calls that arrive, until the owner is gone.

    Killed at once on SIGTERM, also by the kernel when its owner dies: a thread that watches the owner would never
    run beside a regular expression, which keeps the interpreter.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _follow_fork_server()
    _time_imports(imports)
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
