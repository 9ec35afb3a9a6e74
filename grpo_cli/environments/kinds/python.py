"""The environment `python`: a class of the user's, as this project or TRL knows them."""

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from grpo_cli.data.rows import suggest
from grpo_cli.environments.calls import settle
from grpo_cli.environments.contract import (
    Environment,
    EnvironmentParams,
    EnvironmentSource,
    EpisodeError,
    Reward,
)
from grpo_cli.environments.kinds.function import find_path_faults, make_tool
from grpo_cli.issues import Issue
from grpo_cli.user_code import Function, SourceError, bindings, find_name, load_name, signature_of

_OWN = frozenset({"reset", "step", "reward", "get_reward", "gold", "close"})
"""Methods that are not tools."""
_SCORES = ("reward", "get_reward")


class PythonEnvironmentParams(EnvironmentParams):
    """Acts in a class of yours; each episode has an instance of its own.

    `reset(**row)` begins an episode and returns the first observation, or None if the prompt says all. It gets the
    row's columns that it names, and `seed`, which is the same for all completions of a prompt: whatever is random
    has to follow from it. With a method `step(text) -> (text, done)` the class is a text environment: each
    answer goes to it. Without one, its public methods are tools, and an answer without a call ends the episode;
    these need type hints and docstrings, like the tool `function`. `reward()` returns a number, or a dict of named
    parts that are added up. Optional: `gold()`, answers that should win, for `grpo env test`; `done`, true once
    the episode is over; `close()`.

    Environments of TRL's `environment_factory` work as they are: `get_reward()` is read as `reward()`.

    Source: `GRPOTrainer`, `environment_factory` (TRL 1.16).
    """

    kind: ClassVar[str] = "python"

    path: str
    """`file.py:Class`, relative to the recipe, or `package.module:Class`; a function that returns an instance
    works too."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""

    def problems(self) -> list[Issue]:
        """Report a missing class, and arguments that it needs and `kwargs` lacks."""
        if faults := [*find_path_faults(self.path), *self._find_wrong_names()]:
            return faults
        needed = [name for name in self._needed("__init__") if name not in self.kwargs]
        fix = f"add `kwargs: {{{', '.join(f'{name}: …' for name in needed)}}}`"
        return [Issue(f"the class needs {', '.join(needed)}", fix, "path")] if needed else []

    def _find_wrong_names(self) -> Iterator[Issue]:
        """Find a class without `reset`, and `kwargs` that its `__init__` does not take."""
        try:
            node = find_name(self.path)
        except SourceError:
            return  # `find_path_faults` says so
        if not isinstance(node, ast.ClassDef) or node.bases or node.decorator_list or node.keywords:
            return  # what else it has is known once it is imported
        methods, names = _definitions(node), bindings(ast.Module(node.body, [])).keys()
        if names & {"__new__", "__getattr__"}:
            return
        if "reset" not in names:
            own = ", ".join(f"{name}()" for name in methods if not name.startswith("_"))
            fix = "write `def reset(self, seed)`, which begins an episode, or rename the method that does"
            yield Issue(
                f"{node.name} has no method reset(){own and f'; it has {own}'}", fix, "path"
            )
        init = methods.get("__init__")
        parameters = list(signature_of(init).parameters.values())[1:] if init else []
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return
        accepted = [each.name for each in parameters]
        for name in self.kwargs:
            if name not in accepted:
                fix = suggest(name, accepted, "remove it, or add it to `__init__`")
                yield Issue(f"{node.name}() takes no argument {name!r}", fix, f"kwargs.{name}")

    def required_columns(self) -> tuple[str, ...]:
        """Return the arguments of `reset` that have no default."""
        return tuple(name for name in self._needed("reset") if name != "seed")

    def gives_reward(self) -> bool:
        """Return whether the class has a method that scores."""
        node = find_name(self.path)
        methods = _definitions(node) if isinstance(node, ast.ClassDef) else {}
        return not methods.keys().isdisjoint(_SCORES)

    def _needed(self, method: str) -> list[str]:
        node = find_name(self.path)
        definition = _definitions(node).get(method) if isinstance(node, ast.ClassDef) else None
        return [
            each.name
            for each in list(signature_of(definition).parameters.values())[1:]
            if each.default is each.empty
            and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]

    def tool_names(self) -> list[str] | None:
        """Return the methods that are tools; none of a text environment."""
        node = find_name(self.path)
        if not isinstance(node, ast.ClassDef) or node.bases:
            return None  # what a base class defines is known once it is imported
        methods = _definitions(node)
        tools = [name for name in methods if name not in _OWN and not name.startswith("_")]
        return [] if "step" in methods else tools

    def open(self) -> EnvironmentSource:
        """Import the class, and look at an instance."""
        factory = load_name(self.path)
        if not callable(factory):
            source, _, name = self.path.rpartition(":")
            kind = type(factory).__name__
            fix = f"name its class, of which each episode has an instance: {source}:{kind}"
            raise EpisodeError(f"`{name}` is an instance of {kind}", fix, path="path")
        methods = _methods(factory) if inspect.isclass(factory) else None
        takes_text = methods is not None and "step" in methods
        return EnvironmentSource(
            lambda: PythonEnvironment(factory(**self.kwargs)), has_tools=not takes_text
        )


class PythonEnvironment(Environment):
    """An instance of a user's class."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance
        self.takes_text = callable(getattr(instance, "step", None))
        if not callable(getattr(instance, "reset", None)):
            raise EpisodeError(f"{type(instance).__name__} has no method reset()")
        names = [] if self.takes_text else _methods(type(instance))
        self.tools = [make_tool(getattr(instance, name)) for name in names if name not in _OWN]
        if not self.takes_text and not self.tools:
            raise EpisodeError(
                f"{type(instance).__name__} has neither step() nor a public method as a tool",
                "add `def step(self, text: str) -> tuple[str, bool]`, or methods that are tools",
            )

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        """True if the instance says that it is done."""
        return getattr(self._instance, "done", False) is True

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Call `reset` with the arguments that it names; with all of them if it takes any."""
        function, arguments = self._instance.reset, {**row, "seed": seed}
        parameters = inspect.signature(function).parameters.values()
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            named = {each.name for each in parameters}
            arguments = {name: value for name, value in arguments.items() if name in named}
        return settle(function(**arguments))

    def step(self, text: str) -> tuple[Any, bool]:
        """Call `step`."""
        result: tuple[Any, bool] = settle(self._instance.step(text))
        return result

    def reward(self) -> Reward | None:
        """Call `reward`, or TRL's `get_reward`."""
        for name in _SCORES:
            if callable(method := getattr(self._instance, name, None)):
                value: Reward | None = settle(method())
                return value
        return None

    def gold(self) -> Sequence[str | Mapping[str, Any]] | None:
        """Call `gold`, if there is one."""
        method = getattr(self._instance, "gold", None)
        answers = method() if callable(method) else None
        return [answers] if isinstance(answers, str | Mapping) else answers

    def close(self) -> None:
        """Call `close`, if there is one."""
        if callable(method := getattr(self._instance, "close", None)):
            settle(method())


def _methods(owner: type) -> list[str]:
    """Return the public methods of a class, in the order of their definition."""
    names: dict[str, None] = {}
    for each in reversed(owner.__mro__):
        names.update(dict.fromkeys(name for name, value in vars(each).items() if callable(value)))
    return [
        name
        for name in names
        if not name.startswith("_") and inspect.isfunction(getattr(owner, name))
    ]


def _definitions(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, Function)}
