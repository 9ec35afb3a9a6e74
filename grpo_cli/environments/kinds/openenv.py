"""The environment `openenv`: OpenEnv's environments, in an interpreter that has OpenEnv."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from grpo_cli.environments.contract import EpisodeError, Reward
from grpo_cli.environments.kinds.function import find_path_faults
from grpo_cli.environments.kinds.remote import (
    RemoteEnvironment,
    RemoteEnvironmentParams,
    RemoteHost,
)
from grpo_cli.issues import Issue
from grpo_cli.user_code import is_file


class OpenEnvEnvironmentParams(RemoteEnvironmentParams):
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
    script: ClassVar[str] = "openenv_child.py"

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

    def problems(self) -> list[Issue]:
        """Report an interpreter or a class that is not there; starts nothing."""
        return [*super().problems(), *self._find_faults()]

    def _find_faults(self) -> Iterator[Issue]:
        if bool(self.path) == bool(self.url):
            seen = "both `path` and `url` are set" if self.url else "there is no environment"
            fix = "set `path: file.py:Class`, or `url`, not both"
            yield Issue(seen, fix, self.named_by)
        elif self.path and is_file(self.path.rpartition(":")[0]):
            yield from find_path_faults(self.path)

    def required_columns(self) -> tuple[str, ...]:
        """Return `columns`."""
        return self.columns

    @property
    def named_by(self) -> str:
        """The parameter that names the environment."""
        return "url" if self.url else "path"

    def make(self, host: RemoteHost) -> "OpenEnvEnvironment":
        """Make the environment of an episode."""
        return OpenEnvEnvironment(self, host)


class OpenEnvEnvironment(RemoteEnvironment):
    """A session of the process."""

    def __init__(self, params: OpenEnvEnvironmentParams, host: RemoteHost) -> None:
        super().__init__(host, path=params.path, url=params.url, kwargs=params.kwargs)
        self._params = params
        self._rewards: list[float] = []

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Reset it; return its first observation."""
        arguments = {"seed": seed, **{name: row[name] for name in self._params.columns}}
        return self._read(self.ask("reset", arguments=arguments))

    def step(self, text: str) -> tuple[str, bool]:
        """Take an action."""
        try:
            field = self._params.action
            action = json.loads(text) if field is None else {field: text}
        except ValueError:
            action = None
        if not isinstance(action, dict):
            raise EpisodeError("the answer should be an action, as a JSON object")
        result = self.ask("step", action=action)
        return self._read(result), bool(result["done"])

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
