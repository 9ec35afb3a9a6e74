"""The tests of a row: read from the forms in which datasets write them, run on a program, and scored.

If an assertion compares with something that can be computed here, the expected value stays here. What an assertion
does with results is done out of the program's reach.
"""

import ast
import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Score
from grpo_cli.rewards.kinds.assertions import (
    ProgramTest,
    Runnable,
    compute,
    read_code,
    read_doctest,
)
from grpo_cli.rewards.scoring import shorten
from grpo_cli.sandbox.child import MODULE
from grpo_cli.sandbox.runner import Check, Limits, run_program

_FORMS = (
    'a list of {"input": …, "output": …}, {"inputs": […], "outputs": […]}, or assert statements '
    "(one text or a list of them), as themselves or as JSON text"
)
_KEYS = (("inputs", "outputs"), ("input", "output"))
_TOLERANCE = 1e-6
_SHOWN = 40
_HOPELESS = ("SyntaxError", "IndentationError", "TabError")
"""Errors that every other test would end with too."""


@dataclass(frozen=True)
class TestRunner:
    """Runs a program's tests."""

    limits: Limits
    credit: Literal["all", "share"]
    compare: Literal["tokens", "exact", "float"]

    def run(self, program: bytes, tests: Sequence[ProgramTest]) -> Score:
        """Run a program's tests until it can gain no more."""
        faults: list[str] = []
        for test in tests:
            faults += self._run_test(program, test)
            fault = next(filter(None, faults), "")
            if fault and (self.credit == "all" or fault.startswith(_HOPELESS)):
                break
        first = next(
            (f": test {number}: {fault}" for number, fault in enumerate(faults, 1) if fault), ""
        )
        passed, count = faults.count(""), sum(len(test.expected) for test in tests)
        value = passed / count if self.credit == "share" else float(passed == count)
        return Score(value, f"{passed} of {count} tests{first}")

    def _run_test(self, program: bytes, test: ProgramTest) -> list[str]:
        """Return why each test failed; empty for one that passed."""
        # Room for all that may rightly be written, in the longer form of reports.
        room = self.limits.output_bytes + 4 * len(repr(test.expected))
        limits = replace(self.limits, output_bytes=room)
        stdin = test.stdin.encode(errors="replace")
        # Of numbers, those that are nearly equal are told apart here.
        stop = self.credit == "all" and self.compare != "float"
        check = test.check and replace(test.check, stop=stop)
        result = run_program(program, limits, stdin=stdin, check=check)
        reports = result.reports if check else [(result.stdout.decode(errors="replace"), "")]
        count = len(test.expected)
        faults = [
            error or self._find_fault(value, expected, check)
            for (value, error), expected in zip(reports, test.expected, strict=False)
        ]
        if result.reason:
            # It ended in the next test, or in the last after its report.
            faults = [*faults[: count - 1], result.reason]
        return faults + ["not run"] * (count - len(faults))

    def _find_fault(self, value: Any, expected: Any, check: Check | None) -> str:
        if self._is_right(value, expected, check):
            return ""
        if not check and not value:
            return (
                f"expected {_show(expected)}, printed nothing; tests of functions need `function`"
            )
        return f"expected {_show(expected)}, {'got' if check else 'printed'} {_show(value)}"

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
    try:
        number, right = _read_number(value), _read_number(expected)
        if isinstance(number, int) and isinstance(right, int):
            return number == right
        return math.isclose(number, right, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except (TypeError, ValueError, OverflowError):
        return False


def _read_number(value: Any) -> Any:
    """Return a number, or what a text is the number of as contest checkers read it; other values as they are."""
    if not isinstance(value, str):
        return None if isinstance(value, bool) else value
    if re.fullmatch(r"[+-]?[0-9]+", value):
        return int(value)
    is_number = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", value)
    return float(value) if is_number else None


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
    """Read assertions; it is an error if all texts assert nothing."""
    if not any(text.strip() for text in texts):
        return []
    test = read_code([_parse(text) for text in texts], function)
    if not test.expected:
        raise RewardError(
            f"the tests assert nothing, so every program would pass: {texts[0]!r:.60}; tests are {_FORMS}; "
            "a function that asserts must be called, or `function` be set if it is HumanEval's `check`"
        )
    if test.check and not test.check.names:
        raise RewardError(
            f"the tests use nothing that a program defines: {texts[0]!r:.60}; names of the tests' own, and of "
            "Python's, are not taken from a program. Fix: if the function is named like one of Python's, set "
            f"`function` to the column with its name, or import it in the tests (`from {MODULE} import sum`)"
        )
    return [test]


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
        return ProgramTest([_join_lines(expected)], stdin=_join_lines(inputs))
    if isinstance(inputs, str):
        # LiveCodeBench: one argument a line, as JSON, and so the result.
        try:
            inputs = [json.loads(line) for line in inputs.split("\n") if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except ValueError as error:
            raise RewardError(f"arguments and results should be JSON ({error})") from error
    arguments = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    check = Check([function, "Solution"], function=function, arguments=arguments)
    return ProgramTest([expected], check)


def looks_like_call(test: ProgramTest) -> bool:
    """Return whether a test of what is printed looks like a call: all lines are literals, some lists or texts."""
    if test.check or not test.stdin.strip():
        return False
    lines = [*test.stdin.strip().split("\n"), str(test.expected[0]).strip()]
    try:
        return all(_is_literal(line) for line in lines) and any(
            line[:1] in "[{('\"" for line in lines
        )
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def _is_literal(line: str) -> bool:
    with contextlib.suppress(ValueError):
        json.loads(line)
        return True
    return compute(ast.parse(line, mode="eval").body)[0]


def _join_lines(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "\n".join(str(line) for line in value)
    if isinstance(value, Mapping) or value is None:
        raise RewardError(f"a test's input and output should be texts, not {value!r:.60}")
    return str(value)


def _parse(text: str) -> list[ast.stmt]:
    try:
        return Runnable().visit(ast.parse(text)).body
    except (SyntaxError, ValueError, RecursionError) as error:
        if isinstance(error, SyntaxError) and re.search(r"^\s*>>> ", text, re.MULTILINE):
            return _parse(read_doctest(text))
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        why = getattr(error, "msg", None) or str(error)
        raise RewardError(
            f"the tests do not parse as Python ({why}{line}): {text!r:.60}; tests are {_FORMS}"
        ) from error
