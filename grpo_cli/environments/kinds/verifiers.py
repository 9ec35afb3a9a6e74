"""The environment `verifiers`: those of the package `verifiers`, in an interpreter that has it."""

from collections.abc import Mapping
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
from grpo_cli.environments.kinds.remote import (
    RemoteHost,
    RemoteSession,
    find_interpreter_faults,
    open_host,
)
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Number

_CHILD = Path(__file__).with_name("verifiers_child.py")


class VerifiersEnvironmentParams(EnvironmentParams):
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

    python: str
    """The interpreter with `verifiers`, such as `verifiers/bin/python`, relative to the recipe."""
    taskset: str
    """The taskset's id: a package that is installed beside `verifiers`, or a module beside the recipe."""
    config: dict[str, Any] = Field(default_factory=dict)
    """More of the environment's configuration, as in its block `[env]`, such as `{id: user_sim, taskset: {task:
    …}}`."""
    timeout_s: Number = Field(default=120.0, gt=0)
    """Longest that the process may take to start, or to answer, in seconds; `episode.tool_timeout_s` limits a step
    too."""

    def problems(self) -> list[Issue]:
        """Report an interpreter that is not there; starts nothing."""
        return find_interpreter_faults(self.python, "verifiers")

    def open(self) -> EnvironmentSource:
        """Start the process, and load the taskset."""
        if faults := self.problems():
            raise EpisodeError(str(faults[0]), faults[0].path)
        host = RemoteHost(self.python, _CHILD, self.timeout_s)
        taskset = {**self.config.get("taskset", {}), "id": self.taskset}
        config = {**self.config, "taskset": taskset}

        def make() -> VerifiersEnvironment:
            return VerifiersEnvironment(host.open(config=config))

        open_host(host, make, "verifiers", self.python, "taskset")
        return EnvironmentSource(make, close=host.close)


class VerifiersEnvironment(Environment):
    """A session of the process: one episode."""

    takes_text = True

    def __init__(self, session: RemoteSession) -> None:
        self._session = session
        self._reward: Reward | None = 0.0
        self._error: EpisodeError | None = None

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Begin the episode of the task that the seed chooses; return its question."""
        text: str = self._ask("reset", seed=seed)["text"]
        return text

    def step(self, text: str) -> tuple[str, bool]:
        """Answer."""
        result = self._ask("step", text=text)
        if result["done"]:
            self._reward = result["reward"] or None
        return result["text"], result["done"]

    def _ask(self, do: str, **arguments: Any) -> Any:
        try:
            return self._session.ask(do, **arguments)
        except EpisodeError as error:
            self._error = self._error or error
            raise

    def reward(self) -> Reward | None:
        """Return the task's rewards.

        Raises:
            EpisodeError: The episode failed.
        """
        if self._error is not None:
            raise self._error
        return self._reward

    def close(self) -> None:
        """End the episode."""
        self._session.close()
