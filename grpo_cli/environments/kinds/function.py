"""The tool `function`: a function of the user's, described by its type hints and docstring."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from grpo_cli.environments.arguments import (
    UndescribedError,
    convert_arguments,
    find_declared,
    make_schema,
)
from grpo_cli.environments.contract import EpisodeError, Tool, ToolParams, ToolSource
from grpo_cli.issues import Issue
from grpo_cli.user_code import Function, SourceError, find_name, load_name
from grpo_cli.user_imports import find_missing_imports


class FunctionToolParams(ToolParams):
    """Offers a function of yours, as TRL's `tools` take it.

    The model sees its name, the type hints of its arguments, and its docstring: what it does, and under `Args:`
    a line for each argument. Pydantic models, dataclasses, `TypedDict`s, enums and dates, also inside of lists and
    unions, are described with their fields, and arrive as the types that were declared; a call that does not
    fit them returns what is wrong. The model reads what the function returns, as text or as JSON. It may be
    `async`, and runs on a thread beside others: it must not keep a state.

    Source: `transformers.utils.get_json_schema` (transformers 5.24), and pydantic's `TypeAdapter`.
    """

    kind: ClassVar[str] = "function"

    path: str
    """`file.py:function`, relative to the recipe, or `package.module:function`."""

    def problems(self) -> list[Issue]:
        """Report a missing function, and arguments that its schema cannot describe."""
        return find_path_faults(self.path) or list(self._find_undescribed())

    def _find_undescribed(self) -> Iterator[Issue]:
        function = find_name(self.path)
        # A decorator may give it another signature and docstring.
        if not isinstance(function, Function) or function.decorator_list:
            return
        text = ast.get_docstring(function) or ""
        for argument in (*function.args.args, *function.args.kwonlyargs):
            lacks = [] if argument.annotation else ["type hint"]
            has_own = argument.annotation and "description=" in ast.unparse(argument.annotation)
            if not has_own and not re.search(rf"^\s*{argument.arg}\b.*:", text, re.MULTILINE):
                lacks.append("line under `Args:` in the docstring")
            if lacks:
                lack = f"`{argument.arg}` has no {' and no '.join(lacks)}"
                seen = f"{function.name}() cannot be described to the model: {lack}"
                yield Issue(seen, "add it; the model reads it", "path")
                return

    def tool_names(self) -> list[str]:
        """Return the name of the function."""
        return [self.path.rpartition(":")[2]]

    def open(self) -> ToolSource:
        """Import the function."""
        return ToolSource([make_tool(load_name(self.path))])


def find_path_faults(path: str) -> list[Issue]:
    """Report that a file, the name in it, or what it imports is missing; imports nothing."""
    try:
        find_name(path)
    except SourceError as error:
        return [error.as_issue()]
    return find_missing_imports(path.rpartition(":")[0])


def make_tool(function: Callable[..., Any]) -> Tool:
    """Return a function or a bound method as a tool; raises `EpisodeError` if its schema cannot be made."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        declared = find_declared(function)
        return Tool(name, make_schema(function, declared), convert_arguments(function, declared))
    except UndescribedError as error:
        seen = f"{name}() cannot be described to the model: {error.seen}"
        raise EpisodeError(seen, error.fix) from error
    except Exception as error:  # transformers raises what it meets in annotations
        reason = str(error).splitlines()[0].rstrip(".! ")
        fix = "give each argument a type hint, and the docstring a line for each under `Args:`"
        kinds = [each.kind for each in inspect.signature(function).parameters.values()]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            fix = f"name the arguments in place of `**`, such as `number: int`; {fix}"
        if inspect.ismethod(function):
            fix = f"if the model is not to call it, rename it `_{name}`; otherwise {fix}"
        raise EpisodeError(f"{name}() cannot be described to the model: {reason}", fix) from error
