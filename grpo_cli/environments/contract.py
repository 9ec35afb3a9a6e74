"""What every kind of tool and environment implements."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from grpo_cli.errors import RunError
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Section

Failure = Literal["", "failed", "late", "unknown", "malformed"]
Reward = float | dict[str, float]
"""A number, or its named parts, which are added up."""


class EpisodeError(RunError):
    """A tool or an environment raised, or returned what it may not return."""


class ProcessEndedError(EpisodeError):
    """The process behind a tool or an environment has ended: its own fault, not a call that was refused."""


@dataclass(frozen=True)
class Tool:
    """One tool, as the model sees it and as it is called."""

    name: str
    schema: Mapping[str, Any]
    """JSON Schema of the function, as chat templates take it: `{"type": "function", "function": {…}}`."""
    call: Callable[..., Any]
    """Takes the arguments by name. May run on any thread, several at a time; may be a coroutine function."""


def find_repeated(tools: Sequence[Tool]) -> str | None:
    """Return a name that two tools have."""
    counts = Counter(tool.name for tool in tools)
    return next((name for name, count in counts.items() if count > 1), None)


class Environment(ABC):
    """The environment of one episode."""

    takes_text = False
    """Whether answers without a call go to `step`; otherwise such an answer ends the episode."""
    is_done = False
    """Whether the episode is over; looked at after each call."""

    tools: Sequence[Tool] = ()
    """The tools that belong to it, once it was reset."""

    @abstractmethod
    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Begin the episode; return what is added to the end of the prompt, if anything: text, or images."""

    def step(self, text: str) -> tuple[Any, bool]:
        """Take an answer; return what the environment says to it, as `reset`, and whether the episode is over."""
        raise NotImplementedError(f"{type(self).__name__} takes no text")

    def reward(self) -> Reward | None:
        """Return the score of the episode so far; None if the environment gives none."""
        return None

    def gold(self) -> Sequence[str | Mapping[str, Any]] | None:
        """Return answers that should win from the start, for tests; None if none are known.

        A mapping of `name` and `arguments` is a call.
        """
        return None

    def close(self) -> None:  # noqa: B027
        """Free what the episode holds; called once, however it ended."""


class _KindParams(Section):
    kind: ClassVar[str]
    """The kind's name in recipes."""

    def problems(self) -> list[Issue]:
        """Return what the disk says is wrong; imports nothing heavy. The path of each is a parameter."""
        return []

    def tool_names(self) -> list[str] | None:
        """Return the names of its tools; None if they are known only once it is opened."""
        return None

    def open(self) -> Any:
        """Return its `ToolSource` or `EnvironmentSource`, or raise `EpisodeError` or `SetupError`."""
        raise NotImplementedError


class ToolParams(_KindParams):
    """The parameters of one kind of tools; a subclass's docstring says what it offers."""


@dataclass
class ToolSource:
    """Tools that were opened together, and how to close them."""

    tools: Sequence[Tool]
    close: Callable[[], None] = lambda: None


class EnvironmentParams(_KindParams):
    """The parameters of one kind of environment; a subclass's docstring says what it is."""

    def required_columns(self) -> tuple[str, ...]:
        """Return the dataset's columns without which it cannot be reset."""
        return ()

    def gives_reward(self) -> bool:
        """Return whether its episodes visibly have a score for the reward `environment` to read."""
        return True


@dataclass
class EnvironmentSource:
    """Makes an environment for each episode."""

    make: Callable[[], Environment]
    has_tools: bool = False
    """Whether its environments have tools."""
    close: Callable[[], None] = lambda: None


def tool_template_fix() -> str:
    """Return what helps a model whose chat template has no tools, or none whose calls can be read."""
    spec = find_spec("trl")
    folder = Path(str(spec.origin)).parent if spec else Path("trl")
    return (
        f"set `model.chat_template` to a copy of one of TRL's that has the model's special tokens, such as "
        f"{folder / 'chat_templates' / 'qwen2_5.jinja'} for `<|im_start|>`, or take a model that was trained to "
        "call tools"
    )
