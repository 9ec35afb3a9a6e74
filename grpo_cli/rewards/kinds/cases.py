"""The tests of a row, read from its cell: what a program is given, and what is expected of it.

Owns the forms in which datasets write tests. Where an assertion compares with something that can be
computed here, the expected value stays here, and never comes near the program. What an assertion
does with results is done out of the program's reach.
"""

import ast
import builtins
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_cli.errors import RewardError
from grpo_cli.rewards.sandbox.runner import Check

_FORMS = (
    'a list of {"input": …, "output": …}, {"inputs": […], "outputs": […]}, or assert statements '
    "(one text or a list of them), as themselves or as JSON text"
)
_NAMES = (("inputs", "outputs"), ("input", "output"))
_MAKERS: Mapping[str, Any] = {
    each.__name__: each for each in (set, frozenset, tuple, list, dict, sorted, float)
}
"""What may be called in an expected value."""
_LIBRARY = (
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools math operator random re \
statistics string".split()
)
"""Modules that tests use without importing them, as their programs do."""


@dataclass(frozen=True)
class Case:
    """One test."""

    kind: Literal["stdin", "value", "same", "call", "run"]
    """By what it is judged: stdout, an equal value, the very same constant, a call's result, or
    an end without exceptions."""
    stdin: str = ""
    check: Check | None = None
    expected: Any = None


def read_cases(cell: Any, function: str | None) -> list[Case]:
    """Reads a row's tests.

    Args:
        cell: The cell of the tests' column.
        function: The function that tests call, where the row names one.

    Returns:
        The tests; none where the cell is empty.

    Raises:
        RewardError: The cell is in none of the forms that are known.
    """
    if isinstance(cell, str):
        return _read_text(cell, function)
    if not cell:
        return []
    if isinstance(cell, Mapping):
        return _read_mapping(cell, function)
    if isinstance(cell, Sequence) and all(isinstance(item, str) for item in cell):
        return [case for item in cell for case in _read_snippet(item, function)]
    if isinstance(cell, Sequence) and all(isinstance(item, Mapping) for item in cell):
        return [case for item in cell for case in _read_mapping(item, function)]
    raise _malformed(cell)


def _malformed(cell: Any) -> RewardError:
    return RewardError(f"the tests are not {_FORMS}: {cell!r:.80}")


def _read_text(text: str, function: str | None) -> list[Case]:
    if not text.strip():
        return []
    if text.lstrip()[0] in '[{"':
        try:
            return read_cases(json.loads(text), function)
        except (ValueError, RecursionError):
            pass
    return _read_snippet(text, function)


def _read_mapping(cell: Mapping[str, Any], function: str | None) -> list[Case]:
    """One case, or parallel lists of inputs and outputs."""
    named = cell.get("fn_name") or function
    for inputs, outputs in _NAMES:
        if inputs in cell and outputs in cell:
            return _pair(cell[inputs], cell[outputs], named, is_many=inputs == "inputs")
    raise _malformed(cell)


def _pair(inputs: Any, outputs: Any, named: str | None, is_many: bool) -> list[Case]:
    # `datasets` turns a list of mappings into a mapping of lists, whose names stay singular.
    texts = isinstance(inputs, list) and all(isinstance(item, str) for item in inputs)
    is_many = is_many or (named is None and texts and isinstance(outputs, list))
    if not is_many:
        return [_make_case(inputs, outputs, named)]
    lists = isinstance(inputs, list) and isinstance(outputs, list)
    if not lists or len(inputs) != len(outputs):
        raise RewardError(
            "the tests' inputs and outputs are not two lists of the same length: "
            f"{inputs!r:.40} and {outputs!r:.40}"
        )
    return [_make_case(*pair, named) for pair in zip(inputs, outputs, strict=True)]


def _make_case(given: Any, expected: Any, named: str | None) -> Case:
    if named is None:
        return Case("stdin", stdin=_lines(given), expected=_lines(expected))
    if isinstance(given, str):
        # LiveCodeBench: one argument a line, as JSON, and so the result.
        try:
            given = [json.loads(line) for line in given.split("\n") if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except ValueError as error:
            raise RewardError(f"arguments and results should be JSON ({error})") from error
    arguments = list(given) if isinstance(given, list | tuple) else [given]
    return Case("call", check=Check("call", text=named, arguments=arguments), expected=expected)


def _lines(value: Any) -> str:
    """A text, or a list of lines."""
    if isinstance(value, list | tuple):
        return "\n".join(str(line) for line in value)
    if isinstance(value, Mapping) or value is None:
        raise RewardError(f"a test's input and output should be texts, not {value!r:.60}")
    return str(value)


def _read_snippet(text: str, function: str | None) -> list[Case]:
    """One case an assertion, where nothing but preparation stands between them; else one in all."""
    try:
        body = _inline_check(ast.parse(text).body, function)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RewardError(f"the tests are not {_FORMS}: {error} in {text!r:.60}") from error
    cases = []
    setup: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Assert):
            cases.append(_make_assertion(setup, statement))
        else:
            setup.append(statement)
    if cases and isinstance(body[-1], ast.Assert):
        return cases
    return [Case("run", check=_make_test(body))] if body else []


def _inline_check(body: list[ast.stmt], function: str | None) -> list[ast.stmt]:
    """HumanEval's `check(candidate)`: its assertions where it has nothing else, else a call of it."""
    named = [part for part in body if isinstance(part, ast.FunctionDef) and part.name == "check"]
    called = _called_with(body[-1]) if body else None
    candidate = called or function
    if len(named) != 1 or len(named[0].args.args) != 1 or candidate is None:
        return body
    rest = [part for part in body if part is not named[0] and part is not body[-1]]
    if all(isinstance(part, ast.Assert) for part in named[0].body):
        rename = _Rename(named[0].args.args[0].arg, candidate)
        return [*rest, *(rename.visit(part) for part in named[0].body)]
    return body if called else [*body, *ast.parse(f"check({candidate})").body]


def _called_with(statement: ast.stmt) -> str | None:
    """The name in `check(name)`."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id="check"), args=[ast.Name(id=name)])):
            return name
    return None


class _Rename(ast.NodeTransformer):
    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id == self._old:
            return ast.Name(id=self._new, ctx=node.ctx)
        return node


def _make_assertion(setup: list[ast.stmt], statement: ast.Assert) -> Case:
    match statement.test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            for asked, expected in ((left, right), (right, left)):
                known, value = _compute(expected)
                if known:
                    return Case("value", check=_ask(setup, asked), expected=value)
        case ast.Compare(
            left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None | True | False) as same]
        ):
            return Case("same", check=_ask(setup, left), expected=same.value)
    return Case("run", check=_make_test([*setup, statement]))


def _ask(setup: list[ast.stmt], asked: ast.expr) -> Check:
    """Asks for a value: the program's process if it is what a function of the program's returns."""
    if _is_own_call(setup, asked):
        return Check("value", _write(setup), ast.unparse(asked))
    return _make_test(setup, asked)


def _is_own_call(setup: list[ast.stmt], asked: ast.expr) -> bool:
    """Whether an expression is `f(…)` or `Solution().f(…)` of a name that is the program's."""
    names = []
    while isinstance(asked, ast.Call | ast.Attribute):
        names.append(isinstance(asked, ast.Call))
        asked = asked.func if isinstance(asked, ast.Call) else asked.value
    if not isinstance(asked, ast.Name) or not names or not names[0]:
        return False
    bound = {each.id for part in setup for each in ast.walk(part) if isinstance(each, ast.Name)}
    is_library = hasattr(builtins, asked.id) or (len(names) > 1 and asked.id in _LIBRARY)
    return not is_library and asked.id not in bound and not _defines(setup, asked.id)


def _defines(body: list[ast.stmt], name: str) -> bool:
    """Whether statements import a name, or define a function or class of it."""
    kinds = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    return any(
        name in {getattr(each, "name", None), *_imported(each)}
        for part in body
        for each in ast.walk(part)
        if isinstance(each, kinds)
    )


def _imported(node: ast.AST) -> list[str]:
    aliases = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
    return [(each.asname or each.name).partition(".")[0] for each in aliases]


def _make_test(body: list[ast.stmt], asked: ast.expr | None = None) -> Check:
    """A test for a process of its own, which imports what it uses of the library."""
    nodes = [each for part in (*body, *([asked] if asked else [])) for each in ast.walk(part)]
    bases = [(each.value, each.attr) for each in nodes if isinstance(each, ast.Attribute)]
    used = {
        base.id for base, name in bases if isinstance(base, ast.Name) and _is_library(base.id, name)
    }
    inside = {id(base) for base, _ in bases}
    bare = {each.id for each in nodes if isinstance(each, ast.Name) and id(each) not in inside}
    missing = sorted(name for name in used - bare if not _defines(body, name))
    imports = "".join(f"import {name}\n" for name in missing)
    return Check("test", imports + _write(body), ast.unparse(asked) if asked else "")


def _is_library(name: str, attribute: str) -> bool:
    return name in _LIBRARY and hasattr(importlib.import_module(name), attribute)


def _compute(node: ast.expr) -> tuple[bool, Any]:
    """The value of a literal, or of a call such as `set([1, 2])`; whether it is one comes first."""
    try:
        match node:
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _MAKERS:
                found = [_compute(argument) for argument in arguments]
                if all(known for known, _ in found):
                    return True, _MAKERS[name](*(value for _, value in found))
                return False, None
        return True, ast.literal_eval(node)
    except (ValueError, TypeError):
        return False, None


def _write(body: list[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(body=body, type_ignores=[])))
