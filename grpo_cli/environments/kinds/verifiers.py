"""The environment `verifiers`: those of the package `verifiers`, in an interpreter that has it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from grpo_cli.environments.contract import EpisodeError, Reward
from grpo_cli.environments.kinds.remote import (
    RemoteEnvironment,
    RemoteEnvironmentParams,
    RemoteHost,
)


class VerifiersEnvironmentParams(RemoteEnvironmentParams):
    """Plays the tasks of a taskset of `verifiers`, with its rewards.

    Its dependencies clash with this package's, so it has an interpreter of its own: make one by `python3 -m venv
    verifiers && verifiers/bin/pip install verifiers`, and name it by `python`. Each process that plays episodes
    starts it once. With `dataset: {kind: environment}` the seed of a row chooses the task, so held-out rows are
    drawn from the same tasks. A task's system prompt stands before its question, in the user's message. The score
    is the sum of the task's weighted rewards, each a part by name; it is 0 if the episode ends before the
    environment does, so let `episode.max_turns` allow as many turns.

    Environments of one agent or of several can be played if one conversation is the model's, in text: the agents
    have no tools and run no programs, and others than the model's need a `client` and a `model` in `config`.

    Source: `verifiers.v1.env.Env.run_episode` (verifiers 0.4).
    """

    kind: ClassVar[str] = "verifiers"
    script: ClassVar[str] = "verifiers_child.py"

    taskset: str
    """The taskset's id: a package that is installed beside `verifiers`, or a module beside the recipe."""
    config: dict[str, Any] = Field(default_factory=dict)
    """More of the environment's configuration, as in its block `[env]`, such as `{id: user_sim, taskset: {task:
    …}}`."""

    @property
    def named_by(self) -> str:
        """The parameter that names the environment."""
        return "taskset"

    def make(self, host: RemoteHost) -> "VerifiersEnvironment":
        """Make the environment of an episode."""
        taskset = {**self.config.get("taskset", {}), "id": self.taskset}
        return VerifiersEnvironment(host, config={**self.config, "taskset": taskset})


class VerifiersEnvironment(RemoteEnvironment):
    """A session of the process: one episode."""

    def __init__(self, host: RemoteHost, **arguments: Any) -> None:
        super().__init__(host, **arguments)
        self._reward: Reward | None = 0.0
        self._error: EpisodeError | None = None

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Begin the episode of the task that the seed chooses; return its question."""
        text: str = self.ask("reset", seed=seed)["text"]
        return text

    def step(self, text: str) -> tuple[str, bool]:
        """Answer."""
        result = self.ask("step", text=text)
        if result["done"]:
            self._reward = result["reward"] or None
        return result["text"], result["done"]

    def ask(self, do: str, **arguments: Any) -> Any:
        """Call a method of the session, and keep why it failed."""
        try:
            return super().ask(do, **arguments)
        except EpisodeError as error:
            self._error = self._error or error
            raise

    def reward(self) -> Reward | None:
        """Return the task's rewards, or raise why the episode failed."""
        if self._error is not None:
            raise self._error
        return self._reward
