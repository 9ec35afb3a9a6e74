"""The tools and the environment `mcp`: those of a server of the Model Context Protocol."""

import asyncio
import base64
import contextlib
import json
import logging
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, ValidationError

from grpo_cli.data.rows import show_names
from grpo_cli.environments.calls import Content, as_reward, settle
from grpo_cli.environments.contract import (
    Environment,
    EnvironmentParams,
    EnvironmentSource,
    EpisodeError,
    ProcessEndedError,
    Reward,
    Tool,
    ToolParams,
    ToolSource,
)
from grpo_cli.environments.kinds.remote import LastLine
from grpo_cli.errors import nearest
from grpo_cli.input_files import find_fault
from grpo_cli.issues import Issue
from grpo_cli.processes import reaped_stdio
from grpo_cli.recipe.base import Number, Section
from grpo_cli.rewards.kinds import find_missing, import_optional

if TYPE_CHECKING:
    from mcp import Client

_SERVES_HTTP = re.compile(
    r"transport\s*=\s*[\"'](?:streamable-http|sse)\b|Uvicorn running|(?:Started|Finished) server process"
)
"""What the source and the log of a server over HTTP hold."""
_STDIO_FIX = "let it serve stdio (`mcp.run()`), or start it yourself and name its `url` in place of `command`"
_KEY_ERROR = re.compile(r"KeyError: '(\w+)'")
_CLOSE_S = 15.0
"""Longest a server may take to end; the client kills it after 4 s."""
_MOST_TOOLS = 1000


class ServerError(EpisodeError):
    """A tool of an MCP server failed, or the server cannot be reached."""


class ServerEndedError(ServerError, ProcessEndedError):
    """The server ended during a call, or before it."""


class _ServerParams(Section):
    """Where the server is, and which of its tools the model sees."""

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
        faults = [*find_missing("mcp", "mcp", "mcp"), *self._find_faults()]
        for word in () if faults else self.command[1:]:
            text = Path(word).read_text(errors="replace") if word.endswith(".py") else ""
            if _SERVES_HTTP.search(text) and "stdio" not in text:
                seen = f"{word} serves HTTP, and a `command` is spoken to over stdio"
                faults.append(Issue(seen, _STDIO_FIX, "command", level="warning"))
        return faults

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
            if word.endswith((".py", ".js")) and (fault := find_fault(word)):
                yield Issue(fault, "correct the path", "command")

    def argv(self) -> list[str]:
        """Return the command with the path of its interpreter."""
        first, *others = self.command
        return [sys.executable if first == "python" else first, *others]

    def tool_names(self) -> list[str] | None:
        """Return the tools that are offered, if they are listed; the server has the names of all."""
        return list(self.allow) or None

    def _require_package(self) -> None:
        import_optional("mcp", "mcp", "mcp")
        if faults := list(self._find_faults()):
            raise EpisodeError(faults[0].seen, faults[0].fix, faults[0].path)

    def _choose(self, listed: Sequence[Any], hidden: Sequence[str] = ()) -> list[Any]:
        """Return the tools that the model sees, of those that the server lists."""
        names = [each.name for each in listed]
        for name in self.allow:
            self._find_tool(listed, name, "allow")
        if not names:
            raise EpisodeError("the MCP server has no tools")
        offered = self.allow or [name for name in names if name not in hidden]
        return [each for each in listed if each.name in offered]

    def _find_tool(self, listed: Sequence[Any], name: str, path: str) -> Any:
        tools = {each.name: each for each in listed}
        if name not in tools:
            close = nearest(name, list(tools))
            fix = f"write {close}" if close else f"its tools are {', '.join(tools) or 'none'}"
            raise EpisodeError(f"the MCP server has no tool {name!r}", fix, path=path)
        return tools[name]


class McpToolParams(_ServerParams, ToolParams):
    """Offers the tools of an MCP server (Model Context Protocol), over stdio or HTTP.

    With `command` the server is started once in each process that plays episodes, and ends with it, however that
    ends; with `url` it runs elsewhere. The model sees the server's names, descriptions and schemas, and the text
    of its results. Calls of several episodes reach the server at the same time. If the server dies, the
    call's result says so, and the next call starts it again. A server that keeps a state shares it
    between episodes: use it for reading, and the environment `mcp` for everything else.

    Source: MCP's Python SDK, `mcp.Client` (mcp 2.3).
    """

    kind: ClassVar[str] = "mcp"

    def open(self) -> ToolSource:
        """Start the server, or connect to it, and list its tools."""
        self._require_package()
        session = McpSession(self, restarts=True)
        try:
            tools = [session.make_tool(each) for each in self._choose(session.list_tools())]
        except BaseException:
            session.close()
            raise
        return ToolSource(tools, session.close)


class McpEnvironmentParams(_ServerParams, EnvironmentParams):
    """Acts in an MCP server (Model Context Protocol) that keeps a state; each episode has a session of its own.

    With `command` each episode starts the server, and ends it however the episode ends; a server in Python takes
    about a second of a core. With `url` each episode opens an MCP session with a server that runs elsewhere and
    has to keep its state by session (the header `mcp-session-id`). The model sees the server's tools but for
    `reset` and `reward`, and an answer without a call ends the episode. If the server dies, all later calls of its
    episode fail.

    Source: MCP's Python SDK, `mcp.Client` (mcp 2.3).
    """

    kind: ClassVar[str] = "mcp"

    reset: str | None = None
    """The tool that begins an episode: it gets the row's columns that its schema names, and `seed`; its text is
    added to the prompt. Leave out if the prompt says all."""
    reward: str | None = None
    """The tool that gives the score at the end, without arguments: a number, or a JSON object of named ones that
    are added up. Leave out if other rewards score the episode."""

    def gives_reward(self) -> bool:
        """Return whether a tool gives the score."""
        return self.reward is not None

    def open(self) -> EnvironmentSource:
        """Start the server as a trial, or connect to it, and list its tools."""
        self._require_package()
        session = McpSession(self, restarts=False)
        try:
            listed = session.list_tools()
            hidden = [name for name in (self.reset, self.reward) if name]
            tools = self._choose(listed, hidden)
            begin = self._find_tool(listed, self.reset, "reset") if self.reset else None
            if self.reward:
                self._find_tool(listed, self.reward, "reward")
        finally:
            session.close()

        def make() -> McpEnvironment:
            return McpEnvironment(McpSession(self, restarts=False), tools, begin, self.reward)

        return EnvironmentSource(make, has_tools=True)


class McpEnvironment(Environment):
    """A session of an episode."""

    def __init__(
        self, session: "McpSession", listed: Sequence[Any], begin: Any, reward: str | None
    ) -> None:
        self._session, self._begin, self._reward = session, begin, reward
        self.tools = [session.make_tool(each) for each in listed]

    def reset(self, row: Mapping[str, Any], seed: int) -> Content | None:
        """Connect, and call the server's tool for it, if there is one."""
        if self._begin is None:
            self._session.connect()
            return None
        schema = self._begin.input_schema
        named = schema.get("properties") or {}
        values = {**row, "seed": seed}
        if missing := [name for name in schema.get("required") or () if name not in values]:
            raise EpisodeError(
                f"the tool {self._begin.name} needs {show_names(missing)}, and the columns are "
                f"{show_names(values)}",
                "add what is missing to the dataset, or give it a default in the server",
                path="reset",
            )
        arguments = {name: values[name] for name in named if name in values}
        return self._session.call(self._begin.name, arguments)

    def reward(self) -> Reward | None:
        """Return what the server's tool for it says."""
        if self._reward is None:
            return None
        text = self._session.call(self._reward, {})
        try:
            return as_reward(json.loads(str(text)))
        except (TypeError, ValueError):
            raise EpisodeError(
                f"the tool {self._reward} returned {text!r:.100}, not a number or a JSON object of numbers",
                "name a tool that returns the score, or correct it",
                path="reward",
            ) from None

    def close(self) -> None:
        """End the session, and the server if it was started for it."""
        self._session.close()


# --- sessions ----------------------------------------------------------------------------------


class McpSession:
    """A session with a server, which is started for it if it has a command; calls come from any thread."""

    def __init__(self, server: _ServerParams, *, restarts: bool) -> None:
        """Make a session, which the first question connects; `restarts` starts a server that ended again."""
        self._server, self._restarts = server, restarts
        self._connection: _Connection | None = None
        self._lock = asyncio.Lock()
        self._why_over = ""

    def close(self) -> None:
        """End the connection, and the server if it was started here; waits for one that is being made."""

        async def close() -> None:
            async with self._lock:
                self._why_over = self._why_over or "the server has ended"
                await self._drop(self._connection)

        with contextlib.suppress(TimeoutError):
            settle(close(), _CLOSE_S)

    def connect(self) -> None:
        """Start the server, or connect to it."""
        settle(self._ask(lambda client: asyncio.sleep(0)))

    def list_tools(self) -> list[Any]:
        """Return all tools of the server."""
        tools: dict[str, Any] = {}

        async def read(client: "Client") -> None:
            async with asyncio.timeout(self._server.timeout_s):
                page = await client.list_tools()
                tools.update({each.name: each for each in page.tools})
                while page.next_cursor is not None and len(tools) <= _MOST_TOOLS:
                    known = len(tools)
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools.update({each.name: each for each in page.tools})
                    if len(tools) == known and page.next_cursor is not None:
                        raise EpisodeError(
                            "the MCP server's list of tools does not end: a page has no new tool, and a "
                            "`nextCursor`",
                            "leave `nextCursor` out of the last page",
                        )

        self.connect()
        try:
            settle(self._ask(read))
        except ServerError as error:
            fix = f"{'raise `timeout_s`, or ' if error.path else ''}correct it in the server"
            seen = f"the MCP server's tools cannot be listed: {error.seen:.200}"
            raise ServerError(seen, fix, error.path) from error
        if len(tools) > _MOST_TOOLS:
            raise EpisodeError(
                f"the MCP server lists more than {_MOST_TOOLS:,} tools", "serve fewer"
            )
        return list(tools.values())

    def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call a tool; return its result: text, or parts if it has images."""
        result = settle(self._ask(lambda client: client.call_tool(name, dict(arguments))))
        if result.is_error:
            raise ServerError(_read_content(result) or "no message")
        if any(part.type == "image" for part in result.content):
            return [_read_part(part) for part in result.content]
        return _read_content(result)

    def make_tool(self, listed: Any) -> Tool:
        """Return a tool as the server lists it."""
        function = {
            "name": listed.name,
            "description": listed.description or listed.title or listed.name,
            "parameters": listed.input_schema,
        }

        def call(**arguments: Any) -> Content:
            return self.call(listed.name, arguments)

        return Tool(listed.name, {"type": "function", "function": function}, call)

    async def _ask(self, question: "Callable[[Client], Coroutine[Any, Any, Any]]") -> Any:
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
        except EpisodeError:
            raise
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ServerError(
                f"what it sent is not of the protocol: `{where}`: {first['msg']}, not {first['input']!r:.80}"
            ) from error
        except Exception as error:  # of the server, or of the way to it
            late = f"no answer in {self._server.timeout_s:g} s (`timeout_s`)"
            if isinstance(error, TimeoutError):
                raise ServerError(late, path="timeout_s") from error
            if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED:
                is_late = error.code == REQUEST_TIMEOUT
                raise ServerError(late if is_late else _clean(error.message)) from error
            await self._drop(connection)
            why = f"the server ended during the call: {connection.describe(error)}"
            self._why_over = self._why_over or ("" if self._restarts else why)
            raise ServerEndedError(why) from error

    async def _connect(self) -> "_Connection":
        connection = _Connection(self._server)
        try:
            await connection.ready
        except Exception as error:  # of the server, or of the way to it
            await connection.stop()
            reason = connection.describe(error)
            server = self._server.url or f"`{shlex.join(self._server.command)}`"
            fix = "try its command by hand" if self._server.command else "start it"
            path = "timeout_s" if isinstance(error, TimeoutError) else ""
            if _SERVES_HTTP.search(reason) and self._server.command:
                fix, path = f"the command serves HTTP: {_STDIO_FIX}", ""
            elif name := _KEY_ERROR.fullmatch(reason):
                fix = f"set `env: {{{name[1]}: …}}`, as the command has few variables of the shell; or {fix}"
            elif self._server.command and "closed" in reason:
                fix = f"let the script serve until its input ends, as `mcp.run()` does; or {fix}"
            raise ServerError(
                f"the MCP server {server} cannot be reached: {reason}",
                f"{f'raise `{path}`, or ' if path else ''}{fix}",
                path=path,
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

    def __init__(self, server: _ServerParams) -> None:
        self._server = server
        self._stderr = LastLine()
        self._stopping = asyncio.Event()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once it is connected, or cannot be."""
        self._task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        """Leave the client, and wait until the server has ended."""
        self._stopping.set()
        await asyncio.wait([self._task])

    def describe(self, error: BaseException) -> str:
        """Return why it ended, or could not be made: the last line of the server's stderr, or the error's text."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        line = self._stderr.get()
        if isinstance(error, TimeoutError):
            late = f"no answer in {self._server.timeout_s:g} s"
            return f"{late}, and its last line is {line!r}" if line else late
        return line or _clean(str(error)) or type(error).__name__

    async def _serve(self) -> None:
        try:
            async with (
                asyncio.timeout(self._server.timeout_s) as limit,
                self._make_client() as self.client,
            ):
                limit.reschedule(None)
                self.ready.set_result(None)
                await self._stopping.wait()
        except Exception as error:  # once it was ready, calls have failed of the same
            if not self.ready.done():
                self.ready.set_exception(error)
        finally:
            self._stderr.file.close()

    def _make_client(self) -> "Client":
        from mcp import Client, StdioServerParameters, stdio_client

        server = self._server
        if server.url:
            # Versions of the protocol from 2026 on have no sessions over HTTP.
            mode = "legacy" if isinstance(server, EnvironmentParams) else "auto"
            return Client(server.url, read_timeout_seconds=server.timeout_s, mode=mode)
        # It would log a traceback for each line that the server prints besides.
        logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
        first, *others = reaped_stdio(server.argv())
        process = StdioServerParameters(command=first, args=others, env=dict(server.env))
        transport = stdio_client(process, self._stderr.file)
        return Client(transport, read_timeout_seconds=server.timeout_s)


def _clean(text: str) -> str:
    """Return a server's words on one line, shortened, without what a terminal would obey."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text[:500]).split())


def _read_content(result: Any) -> str:
    """Return what a result says: its texts, with a word for everything else."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_read_text, result.content))


def _read_text(part: Any) -> str:
    return str(getattr(part, "text", f"[{part.type}]"))


def _read_part(part: Any) -> dict[str, Any]:
    """Return a part of a result with images; the word for one is read in a recipe without images."""
    if part.type != "image":
        return {"type": "text", "text": _read_text(part)}
    return {"type": "image", "image": base64.b64decode(part.data), "alt": _read_text(part)}
