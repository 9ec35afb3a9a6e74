"""The tool `function`: a function of the user's, described by its type hints and docstring."""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from grpo_cli.environments.contract import EpisodeError, Tool, ToolParams, ToolSource
from grpo_cli.issues import Issue
from grpo_cli.user_code import Function, SourceError, find_name, load_name


class FunctionToolParams(ToolParams):
    """Offers a function of yours, as TRL's `tools` take it.

    The model sees its name, the type hints of its arguments, and its docstring: what it does, and under `Args:`
    a line for each argument. The model reads what it returns, as text or as JSON. It may be `async`, and runs
    on a thread beside others: it must not keep a state.

    Source: `transformers.utils.get_json_schema` (transformers 5.17), which makes the schema.
    """

    kind: ClassVar[str] = "function"

    path: str
    """`file.py:function`, relative to the recipe, or `package.module:function`."""

    def problems(self) -> list[Issue]:
        """Report a missing function, and arguments without a type hint or a description."""
        try:
            node = find_name(self.path)
        except SourceError as error:
            return [Issue(error.seen, error.fix, "path")]
        return list(find_signature_faults(node, "path")) if isinstance(node, Function) else []

    def tool_names(self) -> list[str]:
        """Return the name of the function."""
        return [self.path.rpartition(":")[2]]

    def open(self) -> ToolSource:
        """Import the function."""
        return ToolSource([make_tool(load_name(self.path))])


def make_tool(function: Callable[..., Any]) -> Tool:
    """Return a function or a bound method as a tool.

    Raises:
        EpisodeError: Its schema cannot be made.
    """
    from transformers.utils import get_json_schema

    name = getattr(function, "__name__", type(function).__name__)
    try:
        return Tool(name, get_json_schema(function), function)
    except Exception as error:  # transformers raises what it meets in annotations
        raise EpisodeError(
            f"{name}() cannot be described to the model: {str(error).splitlines()[0]} Fix: give each argument "
            "a type hint, and the docstring a line for each under `Args:`"
        ) from error


def find_signature_faults(
    node: ast.FunctionDef | ast.AsyncFunctionDef, path: str
) -> Iterator[Issue]:
    """Find what a tool's definition lacks: a docstring, type hints, and descriptions of its arguments."""
    call = f"{node.name}()"
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    arguments = [each for each in given if each.arg != "self"]
    doc = ast.get_docstring(node)
    if doc is None:
        fix = f"say in a docstring of {call} what it does, with a line for each argument under `Args:`"
        yield Issue(f"{call} has no docstring, by which the model knows it", fix, path)
    for each in arguments:
        if each.annotation is None:
            fix = f"write its type, such as `{each.arg}: str`"
            yield Issue(f"{call} has no type hint for {each.arg!r}", fix, path)
        if doc is not None and not re.search(rf"^\s*{re.escape(each.arg)}\b.*:", doc, re.MULTILINE):
            fix = f"add a line such as `{each.arg}: …` under `Args:`"
            yield Issue(f"the docstring of {call} does not describe {each.arg!r}", fix, path)
    if node.args.vararg or node.args.kwarg:
        fix = "name each argument"
        yield Issue(f"{call} takes any arguments, which no schema can describe", fix, path)
