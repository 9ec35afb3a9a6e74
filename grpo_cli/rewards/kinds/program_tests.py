"""The tests of a row: read from the forms in which datasets write them, run on a program, and scored.

If an assertion compares with something that can be computed here, the expected value stays here. What an assertion
does with results is done out of the program's reach.
"""

import ast
import contextlib
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Score
from grpo_cli.rewards.sandbox.runner import Check, Limits, run_program
from grpo_cli.rewards.sandbox.values import Opaque
from grpo_cli.rewards.scoring import shorten

_FORMS = (
    'a list of {"input": …, "output": …}, {"inputs": […], "outputs": […]}, or assert statements '
    "(one text or a list of them), as themselves or as JSON text"
)
_KEYS = (("inputs", "outputs"), ("input", "output"))
_CONSTRUCTORS: Mapping[str, Any] = {
    each.__name__: each for each in (set, frozenset, tuple, list, dict, sorted, float)
}
"""What may be called in an expected value."""
_LIBRARY = (
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools math operator random re "
    "statistics string"
).split()
"""Modules that tests use without importing them, as their programs do."""
_TOLERANCE = 1e-6
_SHOWN = 40
_HOPELESS = ("SyntaxError", "IndentationError", "TabError")
"""Errors that every other test would end with too."""


@dataclass(frozen=True)
class ProgramTest:
    """One test."""

    expected: Any = None
    """What has to equal the check's value, which is None of statements; without a check, what is printed."""
    check: Check | None = None
    stdin: str = ""


@dataclass(frozen=True)
class TestRunner:
    """Runs a program's tests."""

    limits: Limits
    credit: Literal["all", "share"]
    compare: Literal["tokens", "exact", "float"]

    def run(self, program: bytes, tests: Sequence[ProgramTest]) -> Score:
        """Run a program's tests until it can gain no more."""
        passed, first = 0, ""
        for number, test in enumerate(tests, 1):
            fault = self._run_test(program, test)
            passed += not fault
            first = first or (f"test {number}: {fault}" if fault else "")
            if fault and (self.credit == "all" or fault.startswith(_HOPELESS)):
                break
        summary = f"{passed} of {len(tests)} tests"
        value = passed / len(tests) if self.credit == "share" else float(passed == len(tests))
        return Score(value, f"{summary}: {first}" if first else summary)

    def _run_test(self, program: bytes, test: ProgramTest) -> str:
        # Room for all that may rightly be written, in the longer form of reports.
        room = self.limits.output_bytes + 4 * len(repr(test.expected))
        limits = replace(self.limits, output_bytes=room)
        stdin = test.stdin.encode(errors="replace")
        result = run_program(program, limits, stdin=stdin, check=test.check)
        if result.reason:
            return result.reason
        printed = result.stdout.decode(errors="replace")
        verb, value = ("got", result.value) if test.check else ("printed", printed)
        if self._is_right(value, test.expected, test.check):
            return ""
        return f"expected {_show(test.expected)}, {verb} {_show(value)}"

    def _is_right(self, value: Any, expected: Any, check: Check | None) -> bool:
        if check is None:
            if self.compare == "exact":
                return bool(value.rstrip("\n") == expected.rstrip("\n"))
            return self._is_equal(value.split(), expected.split())
        if check.function:
            plain, expected = _as_json(value), _as_json(expected)
            # APPS wraps the results of calls in lists.
            return self._is_equal(plain, expected) or self._is_equal([plain], expected)
        return self._is_equal(value, expected)

    def _is_equal(self, value: Any, expected: Any) -> bool:
        return bool(value == expected) or (self.compare == "float" and _is_close(value, expected))


def _is_close(value: Any, expected: Any) -> bool:
    """Return whether two values are alike, with numbers (or texts of numbers) nearly equal."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(_is_close(*pair) for pair in pairs)
    if isinstance(value, dict) and isinstance(expected, dict):
        keys = value.keys() == expected.keys()
        return keys and all(_is_close(value[key], expected[key]) for key in expected)
    if value == expected:
        return True
    if isinstance(value, Opaque) or isinstance(expected, bool | None):
        return False
    try:
        return math.isclose(float(value), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except (TypeError, ValueError, OverflowError):
        return False


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return value


def _show(value: Any) -> str:
    try:
        return shorten(repr(value.strip() if isinstance(value, str) else value), _SHOWN)
    except (ValueError, RecursionError):
        # Python refuses to write integers of thousands of digits.
        return f"a {type(value).__name__}"


def read_tests(cell: Any, function: str | None) -> list[ProgramTest]:
    """Read a row's tests.

    Args:
        cell: The cell of the tests' column.
        function: The function that tests call, if the row names one.

    Returns:
        The tests; empty if the cell is.

    Raises:
        RewardError: The cell is in none of the known forms.
    """
    if isinstance(cell, str):
        if cell.lstrip()[:1] in ("[", "{", '"'):
            with contextlib.suppress(ValueError, RecursionError):
                return read_tests(json.loads(cell), function)
        return _read_texts([cell], function)
    if not cell:
        return []
    if isinstance(cell, Mapping):
        return _read_mapping(cell, function)
    if isinstance(cell, Sequence) and all(isinstance(item, str) for item in cell):
        return _read_texts(cell, function)
    if isinstance(cell, Sequence) and all(isinstance(item, Mapping) for item in cell):
        return [test for item in cell for test in _read_mapping(item, function)]
    raise RewardError(f"the tests are not {_FORMS}: {cell!r:.80}")


def _read_texts(texts: Sequence[str], function: str | None) -> list[ProgramTest]:
    """Read assertions; texts that assert nothing prepare the next ones, and are an error if all are such."""
    tests: list[ProgramTest] = []
    before: list[ast.stmt] = []
    for text in texts:
        body = [*before, *_parse(text)]
        read = _read_code(body, function)
        tests += read
        own = body[len(before) :]
        before = [*before, *(_repeat(before, own) if read else own)]
    if not tests and any(text.strip() for text in texts):
        raise RewardError(
            f"the tests assert nothing, so every program would pass: {texts[0]!r:.60}; tests are {_FORMS}; "
            "a function that asserts must be called, or `function` be set if it is HumanEval's `check`"
        )
    return tests


def _read_mapping(cell: Mapping[str, Any], function: str | None) -> list[ProgramTest]:
    name = cell.get("fn_name") or function
    for inputs, outputs in _KEYS:
        if inputs in cell and outputs in cell:
            return _pair(cell[inputs], cell[outputs], name, is_many=inputs == "inputs")
    raise RewardError(f"the tests are not {_FORMS}: {cell!r:.80}")


def _pair(inputs: Any, outputs: Any, function: str | None, is_many: bool) -> list[ProgramTest]:
    # `datasets` turns a list of mappings into a mapping of lists, whose names stay singular.
    texts = isinstance(inputs, list) and all(isinstance(item, str) for item in inputs)
    is_many = is_many or (function is None and texts and isinstance(outputs, list))
    if not is_many:
        return [_make_test(inputs, outputs, function)]
    lists = isinstance(inputs, list) and isinstance(outputs, list)
    if not lists or len(inputs) != len(outputs):
        raise RewardError(
            "the tests' inputs and outputs are not two lists of the same length: "
            f"{inputs!r:.40} and {outputs!r:.40}"
        )
    return [_make_test(*pair, function) for pair in zip(inputs, outputs, strict=True)]


def _make_test(inputs: Any, expected: Any, function: str | None) -> ProgramTest:
    if function is None:
        return ProgramTest(_join_lines(expected), stdin=_join_lines(inputs))
    if isinstance(inputs, str):
        # LiveCodeBench: one argument a line, as JSON, and so the result.
        try:
            inputs = [json.loads(line) for line in inputs.split("\n") if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except ValueError as error:
            raise RewardError(f"arguments and results should be JSON ({error})") from error
    arguments = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    check = Check(function=function, arguments=arguments)
    return ProgramTest(expected, check)


def _join_lines(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "\n".join(str(line) for line in value)
    if isinstance(value, Mapping) or value is None:
        raise RewardError(f"a test's input and output should be texts, not {value!r:.60}")
    return str(value)


def _parse(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        why = getattr(error, "msg", None) or str(error)
        raise RewardError(
            f"the tests do not parse as Python ({why}{line}): {text!r:.60}; tests are {_FORMS}"
        ) from error


def _read_code(body: list[ast.stmt], function: str | None) -> list[ProgramTest]:
    """Read one test per assertion if all else between them is preparation; else one in all."""
    defined = {part.name for part in body if isinstance(part, ast.FunctionDef)}
    called = [ast.unparse(part) for part in body if isinstance(part, ast.Expr)]
    if function and "check" in defined and not any("check(" in each for each in called):
        # HumanEval's `check(candidate)`, which somebody else has to call.
        body = [*body, *_parse(f"check({function})")]
    tests = []
    setup: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Assert):
            tests.append(_read_assertion(setup, statement))
            setup += _repeat(setup, [statement])
        else:
            setup.append(statement)
    if tests and isinstance(body[-1], ast.Assert):
        return tests
    may_fail = _runs_something(body) and any(map(_may_fail, _walk(body)))
    return [ProgramTest(check=_isolate(body))] if may_fail else []


def _names(body: Sequence[ast.AST], context: type[ast.expr_context]) -> set[str]:
    nodes = (node for node in _walk(body) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, context)}


def _repeat(setup: Sequence[ast.stmt], body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements that evaluate again, whatever comes of it, what is asserted of objects that `setup` made.

    `assert s.pop() == 2` changes what the next assertion sees.
    """
    anything = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
    made = _names(setup, ast.Store)
    return [
        ast.Try([ast.Expr(each.test)], [anything], [], [])
        for each in body
        if isinstance(each, ast.Assert) and made & _names([each.test], ast.Load)
    ]


def _runs_something(body: Sequence[ast.stmt]) -> bool:
    """Return whether more than definitions is run: a function that asserts and is never called tests nothing."""
    run = [
        part
        for part in body
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    return any(isinstance(node, ast.Call | ast.Assert | ast.Raise) for node in _walk(run))


def _may_fail(node: ast.AST) -> bool:
    """Return whether a part of a test can refuse a program: `assert`, `raise`, `exit`, `assertEqual`."""
    name = getattr(node, "id", None) or getattr(node, "attr", None) or ""
    return isinstance(node, ast.Assert | ast.Raise) or "assert" in name.lower() or "exit" in name


def _read_assertion(setup: list[ast.stmt], statement: ast.Assert) -> ProgramTest:
    match statement.test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            for expression, expected in ((left, right), (right, left)):
                known, value = _compute(expected)
                if known:
                    return ProgramTest(value, _isolate(setup, expression))
    return ProgramTest(check=_isolate([*setup, statement]))


def _walk(body: Sequence[ast.AST]) -> list[ast.AST]:
    return [node for part in body for node in ast.walk(part)]


def _defined_names(body: Sequence[ast.AST]) -> set[str]:
    """Return the names that statements import, or define as functions or classes."""
    names: set[str] = set()
    for node in _walk(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((each.asname or each.name).partition(".")[0] for each in node.names)
    return names


def _isolate(body: list[ast.stmt], expression: ast.expr | None = None) -> Check:
    """Return a check that imports the library modules it uses."""
    used = set()
    for node in _walk([*body, expression] if expression else body):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in _LIBRARY:
                if hasattr(importlib.import_module(name), attribute):
                    used.add(name)
    imports = [f"import {name}\n" for name in sorted(used - _defined_names(body))]
    module = ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))
    code = "".join(imports) + ast.unparse(module)
    return Check(code, ast.unparse(expression) if expression else "None")


def _compute(node: ast.expr) -> tuple[bool, Any]:
    """Return whether a node is a literal, or a call such as `set([1, 2])`, and its value."""
    try:
        match node:
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CONSTRUCTORS:
                parts = [_compute(argument) for argument in args]
                if all(known for known, _ in parts):
                    return True, _CONSTRUCTORS[name](*(value for _, value in parts))
                return False, None
        return True, ast.literal_eval(node)
    except (ValueError, TypeError):
        return False, None
