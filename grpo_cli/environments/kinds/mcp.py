"""The tools and the environment `mcp`: those of a server of the Model Context Protocol."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from grpo_cli.environments.calls import as_reward
from grpo_cli.environments.contract import (
    Environment,
    EnvironmentParams,
    EnvironmentSource,
    EpisodeError,
    Reward,
    Tool,
    ToolParams,
    ToolSource,
)
from grpo_cli.environments.kinds.mcp_client import McpLoop, McpServer, McpSession
from grpo_cli.errors import nearest
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Number, Section
from grpo_cli.rewards.kinds import find_missing, import_optional


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
        return [*find_missing("mcp", "mcp", "mcp"), *self._find_faults()]

    def _find_faults(self) -> Iterator[Issue]:
        if bool(self.command) == bool(self.url):
            seen = "both `command` and `url` are set" if self.url else "there is no server"
            fix = "set `command: [python, server.py]`, or `url`, not both"
            yield Issue(seen, fix, "url" if self.url else "command")
        if self.url and not self.url.startswith(("http://", "https://")):
            fix = "write it as http://HOST:PORT/mcp"
            yield Issue(f"{self.url!r} is not an address of HTTP", fix, "url")
        if self.command and shutil.which(self.server().argv()[0]) is None:
            fix = "install it, or correct the path"
            yield Issue(f"there is no command {self.command[0]!r} on this machine", fix, "command")
        for word in self.command[1:]:
            if word.endswith((".py", ".js")) and not Path(word).is_file():
                yield Issue(f"there is no file {word}", "correct the path", "command")

    def server(self) -> McpServer:
        """Return where the server is."""
        keeps_state = isinstance(self, EnvironmentParams)
        return McpServer(self.command, self.url, self.env, self.timeout_s, keeps_state)

    def tool_names(self) -> list[str] | None:
        """Return the tools that are offered, if they are listed; the server has the names of all."""
        return list(self.allow) or None

    def _open_loop(self) -> McpLoop:
        import_optional("mcp", "mcp", "mcp")
        if faults := list(self._find_faults()):
            raise EpisodeError(str(faults[0]), faults[0].path)
        return McpLoop()

    def _choose(self, listed: Sequence[Any], hidden: Sequence[str] = ()) -> list[Any]:
        """Return the tools that the model sees, of those that the server lists."""
        names = [each.name for each in listed]
        for name in self.allow:
            self._find_tool(listed, name, "allow")
        if not names:
            raise EpisodeError(f"the MCP server {self.server().name} has no tools")
        offered = self.allow or [name for name in names if name not in hidden]
        return [each for each in listed if each.name in offered]

    def _find_tool(self, listed: Sequence[Any], name: str, path: str) -> Any:
        tools = {each.name: each for each in listed}
        if name not in tools:
            close = nearest(name, list(tools))
            fix = f"write {close}" if close else f"its tools are {', '.join(tools) or 'none'}"
            raise EpisodeError(f"the MCP server has no tool {name!r}. Fix: {fix}", path)
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
        loop = self._open_loop()
        session = McpSession(self.server(), loop, restarts=True)

        def close() -> None:
            session.close()
            loop.close()

        try:
            tools = [session.make_tool(each) for each in self._choose(session.list_tools())]
        except BaseException:
            close()
            raise
        return ToolSource(tools, close)


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

    def open(self) -> EnvironmentSource:
        """Start the server as a trial, or connect to it, and list its tools."""
        loop = self._open_loop()
        session = McpSession(self.server(), loop, restarts=False)
        try:
            listed = session.list_tools()
            hidden = [name for name in (self.reset, self.reward) if name]
            tools = self._choose(listed, hidden)
            begin = self._find_tool(listed, self.reset, "reset") if self.reset else None
            if self.reward:
                self._check_reward(self._find_tool(listed, self.reward, "reward"))
        except BaseException:
            session.close()
            loop.close()
            raise
        session.close()

        def make() -> McpEnvironment:
            own = McpSession(self.server(), loop, restarts=False)
            return McpEnvironment(own, tools, begin, self.reward)

        return EnvironmentSource(make, has_tools=True, close=loop.close)

    def _check_reward(self, tool: Any) -> None:
        if required := tool.input_schema.get("required"):
            raise EpisodeError(
                f"the tool {tool.name} needs {_quote(required)}, and the reward is read without arguments. "
                "Fix: name a tool without required arguments",
                "reward",
            )


class McpEnvironment(Environment):
    """A session of an episode."""

    def __init__(
        self, session: McpSession, listed: Sequence[Any], begin: Any, reward: str | None
    ) -> None:
        self._session, self._begin, self._reward = session, begin, reward
        self._tools = [session.make_tool(each) for each in listed]

    @property
    def tools(self) -> Sequence[Tool]:
        """The server's tools."""
        return self._tools

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        """Connect, and call the server's tool for it, if there is one."""
        if self._begin is None:
            self._session.connect()
            return None
        schema = self._begin.input_schema
        named = schema.get("properties") or {}
        values = {**row, "seed": seed}
        if missing := [name for name in schema.get("required") or () if name not in values]:
            raise EpisodeError(
                f"the tool {self._begin.name} needs {_quote(missing)}, and the columns are {_quote(values)}. "
                "Fix: add what is missing to the dataset, or give it a default in the server",
                "reset",
            )
        arguments = {name: values[name] for name in named if name in values}
        return self._session.call(self._begin.name, arguments)

    def reward(self) -> Reward | None:
        """Return what the server's tool for it says."""
        if self._reward is None:
            return None
        text = self._session.call(self._reward, {})
        try:
            return as_reward(json.loads(text))
        except (TypeError, ValueError):
            raise EpisodeError(
                f"the tool {self._reward} returned {text!r:.100}, not a number or a JSON object of numbers. "
                "Fix: name a tool that returns the score, or correct it",
                "reward",
            ) from None

    def close(self) -> None:
        """End the session, and the server if it was started for it."""
        self._session.close()


def _quote(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
