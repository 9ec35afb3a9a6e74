"""An event loop in a thread of its own, with the one client whose connections are bound to it.

Owns the loop's life: started on first use, once a process; closed with its owner or at exit.
Because the loop is not the caller's, it works from any thread and where a loop runs already.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")

_CLOSING_S = 5.0
"""Longest wait for connections to close."""


class BackgroundLoop:
    """Runs coroutines that use a client, on a loop that lives as long as this object."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        """Starts nothing yet.

        Args:
            connect: Makes the client; called on the loop.
        """
        self._connect = connect
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def run(self, work: Callable[[Any], Coroutine[Any, Any, Result]]) -> Result:
        """Calls `work` with the client on the loop, and waits for its result here."""
        running = self._start()
        future = asyncio.run_coroutine_threadsafe(work(running.client), running.loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C while waiting: what is still under way would be paid for.
            future.cancel()
            raise

    def _start(self) -> "_Running":
        with self._lock:
            # A forked child has a copy of this object, and no thread behind it.
            if self._running is None or self._running.process != os.getpid():
                self._running = _launch(self._connect)
                weakref.finalize(self, _stop, self._running)
            return self._running


class _Running(NamedTuple):
    """A loop at work."""

    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    client: Any
    thread: threading.Thread
    process: int


def _launch(connect: Callable[[], AbstractAsyncContextManager[Any]]) -> _Running:
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Any]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with connect() as client:
            ready.set_result((asyncio.get_running_loop(), stop, client))
            await stop.wait()

    thread = threading.Thread(target=_serve, args=(serve, ready), name="grpo-judge", daemon=True)
    thread.start()
    return _Running(*ready.result(), thread, os.getpid())


def _serve(serve: Callable[[], Coroutine[Any, Any, None]], ready: "Future[Any]") -> None:
    try:
        asyncio.run(serve())
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)


def _stop(running: _Running) -> None:
    if running.process != os.getpid() or running.loop.is_closed():
        return
    running.loop.call_soon_threadsafe(running.stop.set)
    if threading.current_thread() is not running.thread:
        running.thread.join(_CLOSING_S)
