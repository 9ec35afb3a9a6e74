"""A program on trial: its tests run one by one, its score, and why it has no better one.

Owns comparing what a program printed or returned with what was expected.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo_cli.rewards.contract import Score
from grpo_cli.rewards.failures import shorten
from grpo_cli.rewards.kinds.cases import Case
from grpo_cli.rewards.sandbox.runner import Limits, run_program
from grpo_cli.rewards.sandbox.values import Opaque

Credit = Literal["all", "share"]
Comparison = Literal["tokens", "exact", "float"]

_TOLERANCE = 1e-6
_SHOWN = 40
_HOPELESS = ("SyntaxError", "IndentationError", "TabError")
"""What no other test would end otherwise."""


@dataclass(frozen=True)
class Trial:
    """How programs are judged."""

    limits: Limits
    credit: Credit
    compare: Comparison

    def run(self, program: bytes, cases: Sequence[Case]) -> Score:
        """Runs a program on its tests, until it can gain no more."""
        passed, first = 0, ""
        for number, case in enumerate(cases, 1):
            fault = self._run_case(program, case)
            passed += not fault
            first = first or (f"test {number}: {fault}" if fault else "")
            if fault and (self.credit == "all" or fault.startswith(_HOPELESS)):
                break
        summary = f"{passed} of {len(cases)} tests"
        value = passed / len(cases) if self.credit == "share" else float(passed == len(cases))
        return Score(value, f"{summary}: {first}" if first else summary)

    def _run_case(self, program: bytes, case: Case) -> str:
        """What is wrong with a program; empty where it passes."""
        # Room for all that may rightly be written, in the longer form of reports.
        room = self.limits.output_bytes + 4 * len(repr(case.expected))
        limits = replace(self.limits, output_bytes=room)
        stdin = case.stdin.encode(errors="replace")
        result = run_program(program, limits, stdin=stdin, check=case.check)
        if result.reason:
            return result.reason
        if case.kind == "stdin":
            return self._fault_of_text(result.stdout.decode(errors="replace"), case.expected)
        if case.kind == "run":
            return "" if result.passed else "the program ended before the test did"
        return self._fault_of_value(result.value, case)

    def _fault_of_text(self, printed: str, expected: str) -> str:
        if self.compare == "exact":
            same = printed.rstrip("\n") == expected.rstrip("\n")
        else:
            got, wanted = printed.split(), expected.split()
            same = got == wanted or (self.compare == "float" and is_close(got, wanted))
        return "" if same else f"expected {_show(expected)}, printed {_show(printed)}"

    def _fault_of_value(self, value: Any, case: Case) -> str:
        if case.kind == "same":
            same = value is case.expected
        elif case.kind == "call":
            same = self._is_equal(_as_json(value), _as_json(case.expected))
            # APPS wraps the results of calls in lists.
            same = same or self._is_equal([_as_json(value)], _as_json(case.expected))
        else:
            same = self._is_equal(value, case.expected)
        return "" if same else f"expected {_show(case.expected)}, got {_show(value)}"

    def _is_equal(self, value: Any, expected: Any) -> bool:
        return bool(value == expected) or (self.compare == "float" and is_close(value, expected))


def is_close(value: Any, expected: Any) -> bool:
    """Whether two values are alike, their numbers (or texts of numbers) being nearly equal."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(is_close(*pair) for pair in pairs)
    if isinstance(value, dict) and isinstance(expected, dict):
        keys = value.keys() == expected.keys()
        return keys and all(is_close(value[key], expected[key]) for key in expected)
    if value == expected:
        return True
    if isinstance(value, Opaque) or isinstance(expected, bool | None):
        return False
    try:
        one, other = float(value), float(expected)
    except (TypeError, ValueError, OverflowError):
        return False
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _as_json(value: Any) -> Any:
    """Plain data as JSON has it: tuples are lists."""
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
