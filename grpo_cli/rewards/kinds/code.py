"""The reward `code`: programs that pass each row's tests, run in a sandbox."""

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from grpo_cli.errors import GrpoError, RewardError
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Integer, Number, OneOrMany
from grpo_cli.rewards.answers import find_answer
from grpo_cli.rewards.contract import (
    Batch,
    Columns,
    Gold,
    Meta,
    RewardContext,
    RewardParams,
    Score,
    Scorer,
    score_rows,
)
from grpo_cli.rewards.pool import count_workers

if TYPE_CHECKING:
    from grpo_cli.rewards.kinds.program_tests import ProgramTest, TestRunner

CodePlace = Literal["python", "block", "text"]

_IMPORT = re.compile(r"^(?:import|from)\s+(\w+)", re.MULTILINE)
LONGEST_PROGRAM = 1_000_000
"""Bytes of a program; longer ones are not run."""


class CodeParams(RewardParams):
    """Rewards Python programs that pass their row's tests.

    Formula: 1 if all tests pass, else 0; with `credit: share`, the share of tests that pass.
    Only text after `</think>` is read. The reward does not apply to a row without tests; tests that cannot be
    parsed are an error. A test is an input and an output (compared with the printed output or, if the row names a
    function, with its return value), an assertion, a function `check(candidate)` as HumanEval has it, or a file
    of test functions or classes. If a text ends with an assertion, each that is not in a block is a test, and the
    others go on if it fails; any other text is one test. Code runs in order and in one process, and what a call
    changes in the program stays. If the program ends or exceeds a limit, the assertions that are left fail.
    Range: {0, 1}, or [0, 1] with `credit: share`.

    Protection: the program runs in a new process with an empty folder and no environment variables. Time, memory,
    threads, output and files are limited on every system. On Linux, if the machine supports it, a program also
    has an in-memory root folder with only the interpreter, no network and no view of other processes
    (namespaces); a separate user id (if run as root); no files except the interpreter's (Landlock); and only the
    system calls for computing, threads and files (seccomp). Programs that need subprocesses, the network or locks
    (SQLite's files) fail. On a machine where a program could change the user's files, end their processes or reach
    the network (macOS, old kernels in containers), no program is run unless you set `unprotected: true`. Kernel
    bugs are not covered. Without namespaces, files and threads may briefly exceed their limits, deleted files that
    are still open do not count, and a program can find out whether a file exists, its size and its age.

    Reward hacking: a test runs in a process of its own. From the program it gets the names that it uses, does
    not define itself, and that are not Python's own or its library's (`range`, `math`, `Counter`). A function
    named like one of Python's is taken from the program if `function` names it or the test imports it (`from
    solution import sum`), and `np`, `pd`, `torch` and the like are packages, imported or not. A row whose tests
    use no name of the program is an error. What crosses is a copy: exact numbers, texts, bytes, None, lists,
    tuples, dicts and sets, named tuples (without functions), dates, fractions, paths, `deque`, `Counter`,
    `defaultdict` and the like. Iterators, generators and functions can be used, but not compared. A value that
    cannot be copied (a list in itself) gives 0, whatever the test catches. Expected values never enter the
    program's process. An object of the program's own class has methods, attributes and operators if the test
    names the class (`s = Stack()`). Any other such object has attributes, and methods that data do not have
    (`node.next.val`, `account.deposit(5)`); it is true and not None, and anything else gives 0, even if it
    derives from `int`. A class is the program's own word: between two of its objects, `==` is what the program
    says. It is not asked to compare with plain data: an object is unequal to it and has no order beside it. An
    object that the test made works with the test's values: `Stack()`, `Vector.from_list([1])`, `Vector(1) * 2`.
    One that a function or method returned does not say what it contains, and gives 0 if it answers with data
    after it was given some by an operator or by a method that data have too (`union`, `get`, `count`). This is
    so of a method that returns its own object, if the test keeps that: `t = Tree().add(5)`, then `5 in t`.

    A test is passed only if an assertion ran: `for a, b in zip(f(3), [1, 2]): assert a == b` gives 0 to an empty
    result, and so does a condition after a loop over nothing (`all(a == b for …)`, `assert same(f(3), [1, 2])`).
    NaN among the program's numbers fails a test that does not name it, so `if abs(f(2) - 4) > 0.1: raise …` does
    not pass with it. Assertions are `assert` and functions named so (`self.assertEqual`, `pytest.raises`). In a
    function or top-level code that has none but can fail (`raise`, `assert False`, `fail()`, `exit()`),
    conditions are: `if f(2) != 4: sys.exit(1)`. They count where they run, also in functions that the test or
    the program calls; each test function or method that has some needs one. A test that calls `exit` fails
    whatever the code. An assertion that fails fails its test, even if the test or the program catches the
    exception, and so does one whose own expression raises another exception. If `except Exception` or `except:`
    comes first, all calls of a `try` that asserts are meant. Such exceptions are right in `pytest.raises`, in
    `assertRaises`, and in a `try` that goes on to `assert False`, `fail()` or `raise`.

    Tests that can be forged: a test that asks the program to judge itself, or that passes with what no right
    program returns. It may take its cases from the program, call helpers that the program defines (HumanEval's
    `poly` and `encode_cyclic`), compare identity (`is`) with what it passed, compare a result with a list that
    it passed and the program changed, call special methods (`a.__eq__(b)`), subtract what it expects from an
    object (`abs(Money(5) - 4) < 0.1`, `(f(x) - 5).value == 0`), compare an empty result by broadcasting
    (`np.allclose(f(x), [1])`), in one of several loops, or by the number of its errors (`errors == 0`), ask
    whether a result has one value (`5 in f(x)` of all numbers), take any exception for an answer (`except
    Exception: continue`, or with assertions that are true of any), leave exceptions in threads, or run in a
    context manager of the program, which suppresses exceptions other than a failed assertion.

    What tests can pass: plain data, functions (with their parameters and `__doc__`), and objects of classes that
    they define. Lists and the like that crossed stay one object, as in Python: what the program changes is
    changed in the test, and the other way round, so compare with a copy: `f(x) == sorted(x)` is true of a
    function that empties `x`. Globals of the program that a test uses and that hold data are kept equal in both.
    Arrays of NumPy and tables of pandas (without dates) are copies. `random.seed` counts in both. Objects of
    other libraries have attributes, and methods that data do not have. A call from a test into the program takes
    about half a millisecond. A test cannot receive coroutines.
    Test functions and classes (`test_…`, `unittest.TestCase`) are run, with `setup_…` and `teardown_…`
    (`module`, `function`, `class`, `method`), `pytest.raises`, `approx`, `fixture` (`scope`, `autouse`) and
    `mark.parametrize`; imports from `solution`, `main` and the like are the program's names. A row is an error
    if its tests use anything else of pytest (`warns`, `mark.xfail`, its own fixtures such as `capsys`, `params`
    of a fixture), `assertWarns`, `assertLogs`, `catch_warnings(record=True)`, `inspect.signature` and the like,
    `exec`, `pickle.loads`, `async def`, `mock.patch` or `importlib.reload`, redirect input or output (`sys.stdin
    = …`, `redirect_stdout`), or derive a class from one of the program's that is not an exception.

    Source: the test formats of APPS (Hendrycks et al. 2021), MBPP (Austin et al. 2021) and
    HumanEval (Chen et al. 2021).
    """

    kind = "code"
    meta = Meta((0.0, 1.0), right_answer=1.0, waits=True)

    tests: str = "tests"
    """The column with each row's tests: a list of `{input, output}`, `{inputs: […], outputs: […]}`
    (with `fn_name` if a function is called), or assert statements as a string or a list of
    strings, of which those without an assertion prepare the ones after them; each of these may also be JSON
    text."""
    function: str | None = None
    """The column with the name of the function that tests call, such as HumanEval's `entry_point`."""
    extract: OneOrMany[CodePlace] = Field(default=("python", "block", "text"), min_length=1)
    """Where to look for the program, in this order: the last fenced block labeled `python`, the last fenced
    block, or the whole text. The first match counts."""
    credit: Literal["all", "share"] = "all"
    """Whether all tests must pass, or each counts; with `all`, testing stops at the first failure."""
    compare: Literal["tokens", "exact", "float"] = "tokens"
    """How outputs are compared: word by word, exactly (except for line breaks after the last line), or
    word by word with a tolerance for numbers (1e-6), which then also applies to return values; two integers
    are compared exactly."""
    seconds_per_test: Number = Field(default=5.0, gt=0, le=600)
    """Time limit of a test (wall-clock), from the program's first line or the end of the test before it."""
    memory_mib: Integer = Field(default=512, ge=64)
    """Address space of the program, in MiB; not limited on macOS."""
    output_kib: Integer = Field(default=64, ge=1, le=65536)
    """Maximum output to stdout, and to stderr, beyond the expected output, in KiB."""
    file_mib: Integer = Field(default=8, ge=1, le=4096)
    """Maximum size of files in the program's folder, in MiB."""
    packages: bool = False
    """Whether programs may import the installed packages, and so read their files. NumPy reserves more
    memory than it uses: set `memory_mib: 4096`."""
    unprotected: bool = False
    """Whether to run programs on a machine without sufficient protection."""
    solution: str | None = None
    """The column with correct programs; `grpo rewards test` runs them."""

    def columns(self) -> Columns:
        return Columns((self.tests, self.function) if self.function else (self.tests,))

    def problems(self, context: RewardContext | None = None) -> list[Issue]:
        return find_sandbox_faults(unprotected=self.unprotected)

    def gold(self, batch: Batch, row: int) -> Gold | Issue:
        """Return the row's solution, or why its tests cannot be read; a row may have none of both."""
        from grpo_cli.rewards.kinds.program_tests import looks_like_call

        try:
            tests = self._read_tests(batch, row)
        except Exception as error:  # what scoring the row would fail with
            fix = (
                "name the column that holds them (`tests: …`), or correct them: write lists and dicts "
                "with `json.dumps` (not `str` or `repr`) when you make the data"
            )
            known = error.as_issue() if isinstance(error, GrpoError) else Issue(str(error), fix)
            return Issue(known.seen, known.fix or fix, "tests")
        if foreign := self._find_foreign(tests):
            seen = f"the tests import {', '.join(foreign)}, and with `packages: false` they cannot"
            return Issue(
                seen, "set `packages: true` and `memory_mib: 4096`", "packages", level="warning"
            )
        issue = None
        if tests and all(looks_like_call(test) for test in tests):
            seen = (
                f"programs read {tests[0].stdin!r:.60} from stdin and have to print {tests[0].output!r:.60}: "
                "these look like the argument and the result of a function"
            )
            fix = (
                "if tests call a function, name the column with its name: `function: fn`, with "
                "`dataset.columns: {fn: {from: prompt, regex: 'function (\\w+)'}}` if the prompt has it"
            )
            issue = Issue(seen, fix, "function", level="warning")
        return Gold(self._read_solution(batch, row), issue=issue)

    def _read_solution(self, batch: Batch, row: int) -> str:
        if self.solution is None or self.solution not in batch.columns:
            return ""
        cell = batch.columns[self.solution][row]
        if isinstance(cell, str) and cell.startswith("["):
            with contextlib.suppress(ValueError):
                cell = json.loads(cell)
        if isinstance(cell, Sequence) and not isinstance(cell, str):
            cell = cell[0] if cell else None
        return f"```python\n{cell}\n```" if cell else ""

    def _find_foreign(self, tests: "list[ProgramTest]") -> list[str]:
        """Return the packages that tests import and do not find."""
        from grpo_cli.sandbox.child import MODULE

        codes = [step.code for test in tests if test.check for step in test.check.steps]
        imported = {name for code in codes for name in _IMPORT.findall(code)}
        return (
            [] if self.packages else sorted(imported - sys.stdlib_module_names - {"pytest", MODULE})
        )

    def build(self, context: RewardContext) -> Scorer:
        from concurrent.futures import ThreadPoolExecutor

        from grpo_cli.rewards.kinds.program_tests import TestRunner
        from grpo_cli.sandbox.runner import Limits

        limits = Limits(
            seconds=self.seconds_per_test,
            memory_mib=self.memory_mib,
            output_bytes=self.output_kib * 1024,
            file_mib=self.file_mib,
            packages=self.packages,
        )
        runner = TestRunner(limits, self.credit, self.compare)

        def score(batch: Batch) -> Sequence[Score | Exception]:
            with ThreadPoolExecutor(count_workers(), "grpo-code") as pool:
                return score_rows(partial(self._score, runner), pool.map)(batch)

        return score

    def _score(self, runner: "TestRunner", batch: Batch, row: int) -> Score:
        tests = self._read_tests(batch, row)
        if not tests:
            return Score(None, "there are no tests")
        found = find_answer(batch.texts[row], self.extract)
        if found is None:
            return Score(0.0, "no program found")
        # Half a character (a surrogate) becomes `?`.
        program = found.text.encode(errors="replace")
        if len(program) > LONGEST_PROGRAM:
            return Score(0.0, f"the program is longer than {LONGEST_PROGRAM} bytes")
        return runner.run(program, tests)

    def _read_tests(self, batch: Batch, row: int) -> "list[ProgramTest]":
        from grpo_cli.rewards.kinds.program_tests import read_tests

        function = batch.cell(self.function, row) if self.function else None
        return read_tests(batch.cell(self.tests, row), function or None)


def find_sandbox_faults(*, unprotected: bool) -> list[Issue]:
    """Return why programs cannot be run on this machine, or not safely enough."""
    if sys.platform not in ("linux", "darwin"):
        message = f"programs cannot be confined on this system ({sys.platform})"
        return [Issue(message, "train on Linux or macOS; on Windows, in WSL 2", "kind")]
    from grpo_cli.sandbox.runner import find_protections, is_protected

    try:
        if unprotected or is_protected():
            return []
    except RewardError as error:
        fix = "let this user start Python processes, or train elsewhere"
        return [Issue(str(error), fix, "kind")]
    message = (
        "programs that the model writes could change your files or end your processes: this machine runs "
        f"them with {', '.join(('limits', *find_protections()))} alone"
    )
    fix = (
        "train on Linux 5.13 or newer with Landlock and seccomp, or where namespaces are allowed; if "
        "nothing on this machine is worth protecting, set `unprotected: true`"
    )
    return [Issue(message, fix, "unprotected")]
