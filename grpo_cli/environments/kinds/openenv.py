"""The environment `openenv`: OpenEnv's environments, in an interpreter that has OpenEnv."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from grpo_cli.environments.contract import (
    Environment,
    EnvironmentParams,
    EnvironmentSource,
    EpisodeError,
    Reward,
)
from grpo_cli.environments.kinds.function import find_path_faults
from grpo_cli.environments.kinds.remote import (
    RemoteHost,
    RemoteSession,
    find_interpreter_faults,
    open_host,
)
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Number
from grpo_cli.user_code import is_file

_CHILD = Path(__file__).with_name("openenv_child.py")


class OpenEnvEnvironmentParams(EnvironmentParams):
    """Acts in an environment of OpenEnv: a class of yours or a package's, or a server that runs.

    OpenEnv's dependencies clash with this package's, so it has an interpreter of its own: make one by
    `python3 -m venv openenv && openenv/bin/pip install openenv`, and name it by `python`. Each process that plays
    episodes starts it once, for all of its environments, and ends it. Each answer of the model is an action: its
    field `action` or, without one, the JSON object that the answer is. The score is the sum of the rewards of all
    steps; the reward does not apply to episodes without any. Environments whose actions are calls of MCP tools
    are not supported. A server has to allow as many sessions at a time (`max_concurrent_envs`) as episodes are
    played side by side.

    Source: `openenv.core.env_server.interfaces.Environment` and `openenv.core.GenericEnvClient` (openenv 0.10).
    """

    kind: ClassVar[str] = "openenv"

    python: str
    """The interpreter with OpenEnv, such as `openenv/bin/python`, relative to the recipe."""
    path: str | None = None
    """`file.py:Class`, relative to the recipe, or `package.module:Class`: an `Environment` of OpenEnv."""
    url: str | None = None
    """Address of a server that runs, such as `http://localhost:8000`; instead of `path`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""
    action: str | None = None
    """The field of the action that gets the model's answer; leave out if the answer is the action, as JSON."""
    observation: str | None = None
    """The field of an observation that the model reads; leave out for all, as JSON if there are several."""
    columns: tuple[str, ...] = ()
    """Columns of the row that `reset` gets beside `seed`."""
    timeout_s: Number = Field(default=120.0, gt=0)
    """Longest that the process may take to start, or to answer, in seconds; `episode.tool_timeout_s` limits a step
    too."""

    def problems(self) -> list[Issue]:
        """Report an interpreter or a class that is not there; starts nothing."""
        return list(self._find_faults())

    def _find_faults(self) -> Iterator[Issue]:
        yield from find_interpreter_faults(self.python, "openenv")
        if bool(self.path) == bool(self.url):
            seen = "both `path` and `url` are set" if self.url else "there is no environment"
            fix = "set `path: file.py:Class`, or `url`, not both"
            yield Issue(seen, fix, "url" if self.url else "path")
        elif self.path and is_file(self.path.rpartition(":")[0]):
            yield from find_path_faults(self.path)

    def required_columns(self) -> tuple[str, ...]:
        """Return `columns`."""
        return self.columns

    def open(self) -> EnvironmentSource:
        """Start the process, and make an environment as a trial."""
        if faults := self.problems():
            raise EpisodeError(str(faults[0]), faults[0].path)
        host = RemoteHost(self.python, _CHILD, self.timeout_s)

        def make() -> OpenEnvEnvironment:
            session = host.open(path=self.path, url=self.url, kwargs=self.kwargs)
            return OpenEnvEnvironment(self, session)

        open_host(host, make, "openenv", self.python, "path" if self.path else "url")
        return EnvironmentSource(make, close=host.close)


class OpenEnvEnvironment(Environment):
    """A session of the process."""

    takes_text = True

    def __init__(self, params: OpenEnvEnvironmentParams, session: RemoteSession) -> None:
        self._params, self._session = params, session
        self._rewards: list[float] = []

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Reset it; return its first observation."""
        arguments = {"seed": seed, **{name: row[name] for name in self._params.columns}}
        result = self._session.ask("reset", arguments=arguments)
        return self._read(result)

    def step(self, text: str) -> tuple[str, bool]:
        """Take an action."""
        result = self._session.ask("step", action=self._make_action(text))
        return self._read(result), bool(result["done"])

    def _make_action(self, text: str) -> Mapping[str, Any]:
        if self._params.action is not None:
            return {self._params.action: text}
        try:
            action = json.loads(text)
        except ValueError:
            action = None
        if not isinstance(action, dict):
            raise EpisodeError("the answer should be an action, as a JSON object")
        return action

    def _read(self, result: Mapping[str, Any]) -> str:
        """Return an observation as the model reads it, and keep its reward."""
        if result["reward"] is not None:
            self._rewards.append(float(result["reward"]))
        fields = {
            name: value for name, value in result["observation"].items() if name != "metadata"
        }
        if self._params.observation is not None:
            fields = {self._params.observation: fields[self._params.observation]}
        value = next(iter(fields.values())) if len(fields) == 1 else fields
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def reward(self) -> Reward | None:
        """Return the sum of all rewards; None if there were none."""
        return sum(self._rewards) if self._rewards else None

    def close(self) -> None:
        """Close the session."""
        self._session.close()
