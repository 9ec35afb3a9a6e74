"""Sessions with servers of the Model Context Protocol, for the tools and the environment `mcp`."""

import asyncio
import contextlib
import json
import logging
import shlex
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from grpo_cli.environments.contract import EpisodeError, ProcessEndedError, Tool
from grpo_cli.environments.kinds.remote import LastLine
from grpo_cli.processes import reaped_stdio

if TYPE_CHECKING:
    from mcp import Client

_CLOSE_S = 15.0
"""Longest a server may take to end; the client kills it after 4 s."""


class ServerError(EpisodeError):
    """A tool of an MCP server failed, or the server cannot be reached."""


class ServerEndedError(ServerError, ProcessEndedError):
    """The server ended during a call, or before it."""


@dataclass(frozen=True)
class McpServer:
    """Where a server is."""

    command: tuple[str, ...]
    url: str | None
    env: Mapping[str, str]
    timeout_s: float
    keeps_state: bool = False
    """Whether it has to tell sessions apart."""

    @property
    def name(self) -> str:
        """The server, for messages."""
        return self.url or f"`{shlex.join(self.command)}`"

    def argv(self) -> list[str]:
        """Return the command with the path of its interpreter."""
        first, *others = self.command
        return [sys.executable if first == "python" else first, *others]


class McpLoop:
    """An event loop on a thread of its own, for all connections of an entry of the recipe."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpo-mcp", daemon=True)
        self._thread.start()
        self._has_printed = False

    async def print_output(self, message: object) -> None:
        """Print the first thing that servers print between their answers, as other code's output is.

        Source: `message_handler` of `mcp.Client` gets the error of a line that is no message (mcp 2.3).
        """
        if isinstance(message, ValidationError) and not self._has_printed:
            self._has_printed = True
            print(message.errors()[0]["input"], flush=True)

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
        """Run a coroutine on the loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        """End the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


class McpSession:
    """A session with a server, which is started for it if it has a command; calls come from any thread."""

    def __init__(self, server: McpServer, loop: McpLoop, *, restarts: bool) -> None:
        """Make a session; the first question connects it.

        Args:
            server: Where it is.
            loop: On which the session runs.
            restarts: Whether a server that ended is started again, which loses its state.
        """
        self._server, self._loop, self._restarts = server, loop, restarts
        self._connection: _Connection | None = None
        self._lock = asyncio.Lock()
        self._why_over = ""

    def close(self) -> None:
        """End the connection, and the server if it was started here; waits for one that is being made."""
        with contextlib.suppress(TimeoutError):
            self._loop.run(self._close(), _CLOSE_S)

    async def _close(self) -> None:
        async with self._lock:
            self._why_over = self._why_over or "the server has ended"
            await self._drop(self._connection)

    def connect(self) -> None:
        """Start the server, or connect to it."""
        self._loop.run(self._ask(_wait_for_nothing))

    def list_tools(self) -> list[Any]:
        """Return all tools of the server."""
        tools: list[Any] = []
        cursor = None
        while True:
            page = self._loop.run(self._ask(partial(_list_page, cursor=cursor)))
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; return the text of its result."""
        text: str = self._loop.run(self._call(name, dict(arguments)))
        return text

    def make_tool(self, listed: Any) -> Tool:
        """Return a tool as the server lists it."""
        function = {
            "name": listed.name,
            "description": listed.description or listed.title or listed.name,
            "parameters": listed.input_schema,
        }

        def call(**arguments: Any) -> str:
            return self.call(listed.name, arguments)

        return Tool(listed.name, {"type": "function", "function": function}, call)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        result = await self._ask(lambda client: client.call_tool(name, arguments))
        text = _read_content(result)
        if result.is_error:
            raise ServerError(text or "no message")
        return text

    async def _ask(self, question: "Callable[[Client], Coroutine[Any, Any, Any]]") -> Any:
        """Ask the server, which is started if it is not there."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        async with self._lock:
            if self._why_over:
                raise ServerEndedError(self._why_over)
            if self._connection is None:
                self._connection = await self._connect()
            connection = self._connection
        try:
            return await question(connection.client)
        except Exception as error:  # of the server, or of the way to it
            if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED:
                late = f"no answer in {self._server.timeout_s:g} s (`timeout_s`)"
                text = late if error.code == REQUEST_TIMEOUT else error.message
                raise ServerError(text) from error
            await self._drop(connection)
            why = f"the server ended during the call: {connection.describe(error)}"
            self._why_over = self._why_over or ("" if self._restarts else why)
            raise ServerEndedError(why) from error

    async def _connect(self) -> "_Connection":
        connection = _Connection(self._server, self._loop)
        try:
            await asyncio.wait_for(connection.start(), self._server.timeout_s)
        except Exception as error:  # of the server, or of the way to it
            await connection.stop()
            reason = connection.describe(error)
            fix = "try its command by hand" if self._server.command else "start it"
            path = "timeout_s" if isinstance(error, TimeoutError) else ""
            raise ServerError(
                f"the MCP server {self._server.name} cannot be reached: {reason}. "
                f"Fix: {f'raise `{path}`, or ' if path else ''}{fix}",
                path,
            ) from error
        return connection

    async def _drop(self, connection: "_Connection | None") -> None:
        if self._connection is connection:
            self._connection = None
        if connection is not None:
            await connection.stop()


class _Connection:
    """A client that is entered and left by one task, as its cancel scopes want it."""

    client: "Client"

    def __init__(self, server: McpServer, loop: McpLoop) -> None:
        self._server, self._loop = server, loop
        self._stderr = LastLine()
        self._stopping = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve())

    async def start(self) -> None:
        """Wait until it is connected."""
        await asyncio.shield(self._ready)

    async def stop(self) -> None:
        """Leave the client, and wait until the server has ended."""
        self._stopping.set()
        if not self._ready.done():
            self._ready.cancel()
            self._task.cancel()
        await asyncio.wait([self._task])

    def describe(self, error: BaseException) -> str:
        """Return why it ended, or could not be made: the last line of the server's stderr, or the error's text."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        line = self._stderr.get()
        if isinstance(error, TimeoutError):
            late = f"no answer in {self._server.timeout_s:g} s"
            return f"{late}, and its last line is {line!r}" if line else late
        return line or str(error).strip() or type(error).__name__

    async def _serve(self) -> None:
        try:
            async with self._make_client() as self.client:
                self._ready.set_result(None)
                await self._stopping.wait()
        except Exception as error:  # once it was ready, calls have failed of the same
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._stderr.file.close()

    def _make_client(self) -> "Client":
        from mcp import Client, StdioServerParameters, stdio_client

        server = self._server
        if server.url:
            # Versions of the protocol from 2026 on have no sessions over HTTP.
            mode = "legacy" if server.keeps_state else "auto"
            return Client(server.url, read_timeout_seconds=server.timeout_s, mode=mode)
        # It would log a traceback for each line that `print_output` gets.
        logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
        first, *others = reaped_stdio(server.argv())
        process = StdioServerParameters(command=first, args=others, env=dict(server.env))
        transport = stdio_client(process, self._stderr.file)
        return Client(
            transport,
            read_timeout_seconds=server.timeout_s,
            message_handler=self._loop.print_output,
        )


async def _wait_for_nothing(client: "Client") -> None:
    """Ask nothing: the client is connected by then."""


async def _list_page(client: "Client", cursor: str | None) -> Any:
    return await client.list_tools(cursor=cursor)


def _read_content(result: Any) -> str:
    """Return what a result says: its texts, with a word for everything else."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
