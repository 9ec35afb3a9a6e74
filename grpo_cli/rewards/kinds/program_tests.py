"""The tests of a row: read from the forms in which datasets write them, run on a program, and scored."""

import ast
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Score
from grpo_cli.rewards.kinds.assertions import ProgramTest, Runnable, read_code, read_doctest
from grpo_cli.sandbox.child import MODULE
from grpo_cli.sandbox.results import find_difference
from grpo_cli.sandbox.runner import Check, Limits, Step, count_tests, run_program
from grpo_cli.sandbox.unit_tests import COUNTER

_FORMS = (
    'a list of {"input": …, "output": …}, {"inputs": […], "outputs": […]}, or assert statements '
    "(one text or a list of them), as themselves or as JSON text"
)
_KEYS = (("inputs", "outputs"), ("input", "output"))
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
        passed, count = faults.count(""), sum(count_tests(test.check) for test in tests)
        value = passed / count if self.credit == "share" else float(passed == count)
        return Score(value, f"{passed} of {count} tests{first}")

    def _run_test(self, program: bytes, test: ProgramTest) -> list[str]:
        """Return why each test failed; empty for one that passed."""
        # Room for all that may rightly be written.
        room = self.limits.output_bytes + 4 * len(test.output)
        limits = replace(self.limits, output_bytes=room)
        stdin = test.stdin.encode(errors="replace")
        stop = self.credit == "all"
        check = test.check and replace(test.check, stop=stop, compare=self.compare)
        result = run_program(program, limits, stdin=stdin, check=check)
        faults = result.reports if check else [self._find_fault(result.stdout, test.output)]
        count = count_tests(check)
        if result.reason:
            # It ended in the next test, or in the last after its report.
            faults = [*faults[: count - 1], result.reason]
        return faults + ["not run"] * (count - len(faults))

    def _find_fault(self, stdout: bytes, expected: str) -> str:
        """Return how the output differs from what was expected."""
        printed = stdout.decode(errors="replace")
        if self.compare == "exact":
            fault = find_difference(printed.rstrip("\n"), expected.rstrip("\n"), "exact")
        else:
            fault = find_difference(printed.split(), expected.split(), self.compare)
        if not fault:
            return ""
        fault = find_difference(printed, expected, "exact", "printed")
        return fault if printed else f"{fault}; tests of functions need `function`"


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
    if not count_tests(test.check):
        raise RewardError(
            f"the tests assert nothing, so every program would pass: {texts[0]!r:.60}; tests are {_FORMS}; "
            "a function that asserts must be called, or `function` be set if it is HumanEval's `check`"
        )
    if test.check and not test.check.names:
        raise RewardError(
            f"the tests use nothing that a program defines: {texts[0]!r:.60}; names of the tests' own, and of "
            "Python's, are not taken from a program",
            "if the function is named like one of Python's, set "
            f"`function` to the column with its name, or import it in the tests (`from {MODULE} import sum`)",
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
        return [_make_test(inputs, outputs, function, is_wrapped=False)]
    lists = isinstance(inputs, list) and isinstance(outputs, list)
    if not lists or len(inputs) != len(outputs):
        raise RewardError(
            "the tests' inputs and outputs are not two lists of the same length: "
            f"{inputs!r:.40} and {outputs!r:.40}"
        )
    # APPS has rows in which each result is the only item of a list.
    is_wrapped = all(isinstance(each, list) and len(each) == 1 for each in outputs)
    pairs = zip(inputs, outputs, strict=True)
    return [_make_test(*pair, function, is_wrapped=is_wrapped) for pair in pairs]


def _make_test(
    inputs: Any, expected: Any, function: str | None, *, is_wrapped: bool
) -> ProgramTest:
    if function is None:
        return ProgramTest(output=_join_lines(expected), stdin=_join_lines(inputs))
    if isinstance(inputs, str):
        # LiveCodeBench: one argument a line, as JSON, and so the result.
        try:
            inputs = [json.loads(line) for line in inputs.split("\n") if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except ValueError as error:
            raise RewardError(f"arguments and results should be JSON ({error})") from error
    arguments = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    code = (
        f"import {MODULE}\nnan, inf = float('nan'), float('inf')\n"
        f"call = getattr({MODULE}, {function!r}, None) or getattr({MODULE}.Solution(), {function!r})\n"
        f"{COUNTER}.returned(call(*{arguments!r}), {expected!r}, {is_wrapped})"
    )
    return ProgramTest(Check([function, "Solution"], steps=[Step(code, asserts=True)]))


def looks_like_call(test: ProgramTest) -> bool:
    """Return whether a test of what is printed looks like a call: all lines are literals, some lists or texts."""
    if test.check or not test.stdin.strip():
        return False
    lines = [*test.stdin.strip().split("\n"), test.output.strip()]
    with contextlib.suppress(ValueError, RecursionError):
        values = [json.loads(line.replace("'", '"')) for line in lines]
        return any(isinstance(value, str | list | dict) for value in values)
    return False


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
