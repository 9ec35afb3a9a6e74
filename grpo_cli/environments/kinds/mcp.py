"""The tools `mcp`: those of a server of the Model Context Protocol."""

import asyncio
import contextlib
import json
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from grpo_cli.environments.contract import EpisodeError, Tool, ToolParams, ToolSource
from grpo_cli.environments.kinds.remote import LastLine
from grpo_cli.errors import nearest
from grpo_cli.issues import Issue
from grpo_cli.processes import reaped_stdio
from grpo_cli.recipe.base import Number
from grpo_cli.rewards.kinds import find_missing, import_optional

if TYPE_CHECKING:
    from mcp import Client

_CLOSE_S = 15.0
"""Longest a server may take to end; the client kills it after 4 s."""


class ServerError(EpisodeError):
    """A tool of an MCP server failed, or the server ended."""


class McpToolParams(ToolParams):
    """Offers the tools of an MCP server (Model Context Protocol), over stdio or HTTP.

    With `command` the server is started once in each process that plays episodes, and ends with it, however that
    ends; with `url` it runs elsewhere. The model sees the server's names, descriptions and schemas, and the text
    of its results. Calls of several episodes reach the server at the same time. If the server dies, the
    call's result says so, and the next call starts it again. A server that keeps a state shares it
    between episodes: use it for reading.

    Source: MCP's Python SDK, `mcp.Client` (mcp 2.3).
    """

    kind: ClassVar[str] = "mcp"

    command: tuple[str, ...] = ()
    """The server's command and its arguments, for stdio, such as `[python, server.py]`; `python` is the one that
    runs `grpo`. Files are relative to the recipe."""
    url: str | None = None
    """The server's address, for streamable HTTP, such as `http://localhost:8000/mcp`; instead of `command`."""
    allow: tuple[str, ...] = ()
    """Names of the tools that are offered; leave out for all."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables of the command, which otherwise has `HOME`, `PATH` and a few others."""
    timeout_s: Number = Field(default=60.0, gt=0)
    """Longest that the server may take to start, or to answer a call, in seconds; `episode.tool_timeout_s` limits
    a call too."""

    def problems(self) -> list[Issue]:
        """Report a missing package, and a command or an address that cannot be right."""
        return [*find_missing("mcp", "mcp", "mcp"), *self._find_faults()]

    def _find_faults(self) -> Iterator[Issue]:
        if bool(self.command) == bool(self.url):
            seen = "both `command` and `url` are set" if self.url else "there is no server"
            fix = "set `command: [python, server.py]`, or `url`, not both"
            yield Issue(seen, fix, "url" if self.url else "command")
        if self.url and not self.url.startswith(("http://", "https://")):
            fix = "write it as http://HOST:PORT/mcp"
            yield Issue(f"{self.url!r} is not an address of HTTP", fix, "url")
        if self.command and shutil.which(self.argv()[0]) is None:
            fix = "install it, or correct the path"
            yield Issue(f"there is no command {self.command[0]!r} on this machine", fix, "command")
        for word in self.command[1:]:
            if word.endswith((".py", ".js")) and not Path(word).is_file():
                yield Issue(f"there is no file {word}", "correct the path", "command")

    def argv(self) -> list[str]:
        """Return the command with the path of its interpreter."""
        first, *others = self.command
        return [sys.executable if first == "python" else first, *others]

    def tool_names(self) -> list[str] | None:
        """Return the tools that are offered, if they are listed; the server has the names of all."""
        return list(self.allow) or None

    def open(self) -> ToolSource:
        """Start the server, or connect to it, and list its tools."""
        import_optional("mcp", "mcp", "mcp")
        if faults := list(self._find_faults()):
            raise EpisodeError(str(faults[0]), faults[0].path)
        server = _Server(self)
        try:
            return ToolSource(self._choose(server), server.close)
        except BaseException:
            server.close()
            raise

    def _choose(self, server: "_Server") -> list[Tool]:
        listed = server.run(server.list_tools())
        names = [each.name for each in listed]
        for name in self.allow:
            if name not in names:
                close = nearest(name, names)
                fix = f"write {close}" if close else f"its tools are {', '.join(names) or 'none'}"
                raise EpisodeError(f"the MCP server has no tool {name!r}. Fix: {fix}", "allow")
        if not names:
            raise EpisodeError(f"the MCP server {server.name} has no tools")
        return [server.make_tool(each) for each in listed if each.name in (self.allow or names)]


class _Server:
    """A connection to a server, on an event loop of its own; calls come from any thread."""

    def __init__(self, params: McpToolParams) -> None:
        self._params = params
        self.name = params.url or f"`{shlex.join(params.command)}`"
        self._connection: _Connection | None = None
        self._lock = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpo-mcp", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the connection, the server if it was started here, and the loop."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._drop(self._connection), self._loop).result(
                _CLOSE_S
            )
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def make_tool(self, listed: Any) -> Tool:
        """Return a tool as the server lists it."""
        function = {
            "name": listed.name,
            "description": listed.description or listed.title or listed.name,
            "parameters": listed.input_schema,
        }

        def call(**arguments: Any) -> str:
            text: str = self.run(self._call(listed.name, arguments))
            return text

        return Tool(listed.name, {"type": "function", "function": function}, call)

    async def list_tools(self) -> list[Any]:
        """Return all tools of the server."""
        tools: list[Any] = []
        cursor = None
        while True:
            page = await self._ask(partial(_list_page, cursor=cursor))
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        result = await self._ask(lambda client: client.call_tool(name, arguments))
        text = _read_content(result)
        if result.is_error:
            raise ServerError(text or "no message")
        return text

    async def _ask(self, question: "Callable[[Client], Coroutine[Any, Any, Any]]") -> Any:
        """Ask the server, which is started if it is not there."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        async with self._lock:
            if self._connection is None:
                self._connection = await self._connect()
            connection = self._connection
        try:
            return await question(connection.client)
        except Exception as error:  # of the server, or of the way to it
            if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED:
                raise ServerError(error.message) from error
            await self._drop(connection)
            raise ServerError("the server ended during the call") from error

    async def _connect(self) -> "_Connection":
        connection = _Connection(self._params)
        try:
            await asyncio.wait_for(connection.start(), self._params.timeout_s)
        except Exception as error:  # of the server, or of the way to it
            await connection.stop()
            reason = connection.describe(error)
            fix = "try its command by hand" if self._params.command else "start it"
            raise ServerError(
                f"the MCP server {self.name} cannot be reached: {reason}. Fix: {fix}"
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

    def __init__(self, params: McpToolParams) -> None:
        self._params = params
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
        """Return why it could not be made: the last line of the server's stderr, or the error's text."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text = "no answer" if isinstance(error, TimeoutError) else str(error).strip()
        return self._stderr.get() or text or type(error).__name__

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

        params = self._params
        if params.url:
            return Client(params.url, read_timeout_seconds=params.timeout_s)
        first, *others = reaped_stdio(params.argv())
        server = StdioServerParameters(command=first, args=others, env=params.env)
        transport = stdio_client(server, self._stderr.file)
        return Client(transport, read_timeout_seconds=params.timeout_s)


async def _list_page(client: "Client", cursor: str | None) -> Any:
    return await client.list_tools(cursor=cursor)


def _read_content(result: Any) -> str:
    """Return what a result says: its texts, with a word for everything else."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
