"""Reward for programs that work: `code`, run against each row's tests in a sandbox.

Owns the parameters, and finding the program in a completion. Tests are read in `cases.py`, run in
`trials.py`, and what a program may do is the sandbox's.
"""

import contextlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from grpo_cli.errors import RewardError
from grpo_cli.recipe.base import Integer, Number, OneOrMany
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.pool import count_workers
from grpo_cli.rewards.reading.extraction import after_thinking
from grpo_cli.rewards.reading.golds import read_cell

if TYPE_CHECKING:
    from grpo_cli.rewards.kinds.cases import Case
    from grpo_cli.rewards.kinds.program_tests import Trial

CodePlace = Literal["python", "block", "text"]

LONGEST_PROGRAM = 1_000_000
"""Bytes of a program; longer ones are not run."""
_OPEN = re.compile(r"\s*(`{3,}|~{3,})\s*([\w+#.-]*)")


class CodeParams(RewardParams):
    """Rewards programs in Python that pass their row's tests.

    Formula: 1 where all tests pass, else 0; with `credit: share`, the share of them that pass.
    What follows `</think>` is looked at. A row without tests is one to which the reward does not
    apply; tests that cannot be read are an error. A test is an input and an output (compared with
    what is printed; where the row names a function, with what it returns), or an assertion. Every
    test runs the program anew, in a process of its own, with an empty folder, no environment
    variables, and nothing else of this machine that the kernel lets us hide.
    Range: {0, 1}, or [0, 1] with `credit: share`.

    What protects: limits on time, memory, threads, output and files everywhere. On Linux, as far as
    the machine allows, also a root folder in memory with only the interpreter in it, no network, no
    view of other processes (namespaces), a user id of its own (for root), no files but the
    interpreter's (Landlock), and of the kernel only what computing, threads and files need: no new
    processes, no sockets, no signals to others, no locks, no change of rights, owners or times of
    files, nothing that processes share (seccomp). Containers often forbid namespaces; the last two
    remain. Programs that need subprocesses, the network or locks (SQLite's files) fail. Where a
    program could change the user's files, end their processes or reach the network (macOS, old
    kernels in containers), none is run unless you set `unprotected: true`.

    What does not: nothing guards against faults of the kernel, or measures time that does not
    depend on a busy machine. Without namespaces, files and threads may exceed their limits for a
    moment, and a program can learn that a file exists, and how large and old it is.

    What a program can fake: expected outputs and results never enter its process, nor does the
    right side of `assert f(x) == literal`, so there it must know the answer. All other assertions
    (`assert sorted(f(x)) == [1]`, `abs(f(x) - 1) < 0.1`, loops in HumanEval's `check`) run in a
    process of their own, which calls the program's functions and gets plain data back: a program
    that replaces `abs` or `math`, or returns objects that equal everything, changes nothing there.
    What it does decide is what its functions return, and how objects of its own classes compare
    with each other; names that a test uses without importing them (`Counter`, `np`) are the
    program's. An object of its own class that meets a number of the test's cannot answer with a
    number: it could call every difference 0. A test can hand over plain data, functions, and objects
    of classes that it defines; coroutines cannot be handed back (`asyncio.run(f(x))` fails).

    Source: the forms of tests of APPS (Hendrycks et al. 2021), MBPP (Austin et al. 2021) and
    HumanEval (Chen et al. 2021).
    """

    kind: ClassVar[str] = "code"
    right_answer: ClassVar[float | None] = 1.0
    gold_needed: ClassVar[bool] = False

    tests: str = "tests"
    """The column with each row's tests: a list of `{input, output}`, `{inputs: […], outputs: […]}`
    (with `fn_name` where a function is called), or assert statements as a text or a list of
    texts; all of these as JSON text too."""
    function: str | None = None
    """The column with the name of the function that tests call, such as HumanEval's `entry_point`."""
    extract: OneOrMany[CodePlace] = Field(default=("python", "block", "text"), min_length=1)
    """Where the program stands: the last fenced block labelled `python`, the last fenced block, or
    all of the text. The first place that is there counts."""
    credit: Literal["all", "share"] = "all"
    """Whether all tests must pass, or each counts; with `all`, the first that fails is the last run."""
    compare: Literal["tokens", "exact", "float"] = "tokens"
    """How outputs are compared: word by word, to the letter (but for line ends after the last line),
    or word by word with numbers nearly equal (1e-6), which then holds for results too."""
    seconds_per_test: Number = Field(default=5.0, gt=0, le=600)
    """Longest a test may take, by the clock, from the program's first line to its end."""
    memory_mib: Integer = Field(default=512, ge=64)
    """Address space of the program, in MiB; not limited on macOS."""
    output_kib: Integer = Field(default=64, ge=1, le=65536)
    """Most a program may print to stdout, and to stderr, beyond what is expected, in KiB."""
    file_mib: Integer = Field(default=8, ge=1, le=4096)
    """Most it may write to files in its folder, in MiB."""
    packages: bool = False
    """Whether programs may import the packages installed here, and so read their files. Numpy asks
    for more memory than it uses: give `memory_mib: 4096`."""
    unprotected: bool = False
    """Whether to run programs on a machine that cannot protect itself from them."""
    solution: str | None = None
    """The column with programs known to be right; `grpo rewards test` runs them."""

    def required_columns(self) -> tuple[str, ...]:
        """The tests' column, and the functions' where there is one."""
        return (self.tests, self.function) if self.function else (self.tests,)

    def problems(self) -> list[tuple[str, str, str]]:
        """Reports systems on which a program cannot be confined at all, or not enough."""
        if sys.platform not in ("linux", "darwin"):
            message = f"programs cannot be confined on this system ({sys.platform})"
            return [("kind", message, "train on Linux or macOS; on Windows, in WSL 2")]
        from grpo_cli.rewards.sandbox.runner import describe_sandbox, is_protected

        try:
            if self.unprotected or is_protected():
                return []
        except RewardError as error:
            return [
                ("kind", str(error), "let this user start Python processes, or train elsewhere")
            ]
        message = (
            "programs that the model writes could change your files or end your processes: this machine runs "
            f"them {describe_sandbox()}"
        )
        fix = (
            "train on Linux 5.13 or newer with Landlock and seccomp, or where namespaces are allowed; if "
            "nothing on this machine is worth protecting, set `unprotected: true`"
        )
        return [("unprotected", message, fix)]

    def gold(self, batch: Batch, row: int) -> str | None:
        """The row's solution as a fenced block; the first one of a list."""
        if self.solution is None or self.solution not in batch.columns:
            return None
        cell = batch.columns[self.solution][row]
        if isinstance(cell, str) and cell.startswith("["):
            with contextlib.suppress(ValueError):
                cell = json.loads(cell)
        if isinstance(cell, Sequence) and not isinstance(cell, str):
            cell = cell[0] if cell else None
        return f"```python\n{cell}\n```" if cell else None

    def gold_source(self) -> tuple[str, str]:
        """The tests' column: programs are judged by it."""
        return ("tests", self.tests)

    def gold_fault(self, batch: Batch, row: int) -> tuple[str, str] | None:
        """What keeps the row's tests from being read; a row may have none."""
        try:
            self._read_cases(batch, row)
        except Exception as error:  # what scoring the row would fail with
            return str(
                error
            ), "correct these tests, or name the column that holds them (`tests: …`)"
        return None

    def waits(self, *, limited: bool) -> bool:
        """For the programs."""
        return True

    def build(self, context: RewardContext) -> Scorer:
        """Finds out what protects programs on this machine (half a second, once)."""
        for _, message, fix in self.problems():
            raise RewardError(f"{message}. Fix: {fix}")
        from concurrent.futures import ThreadPoolExecutor

        from grpo_cli.rewards.kinds.program_tests import Trial
        from grpo_cli.rewards.sandbox.runner import Limits

        limits = Limits(
            seconds=self.seconds_per_test,
            memory_mib=self.memory_mib,
            output_bytes=self.output_kib * 1024,
            file_mib=self.file_mib,
            packages=self.packages,
        )
        trial = Trial(limits, self.credit, self.compare)

        def score(batch: Batch) -> Sequence[Score | Exception]:
            with ThreadPoolExecutor(count_workers(), "grpo-code") as pool:
                rows = range(len(batch.completions))
                return list(pool.map(lambda row: self._score(trial, batch, row), rows))

        return score

    def _score(self, trial: "Trial", batch: Batch, row: int) -> Score | Exception:
        try:
            return self._score_row(trial, batch, row)
        except Exception as error:
            return error

    def _score_row(self, trial: "Trial", batch: Batch, row: int) -> Score:
        cases = self._read_cases(batch, row)
        if not cases:
            return Score(None, "there are no tests")
        text = find_program(batch.texts[row], self.extract)
        if text is None:
            return Score(0.0, "no program found")
        try:
            program = text.encode()
        except UnicodeEncodeError:
            return Score(0.0, "the program holds half a character (a surrogate)")
        if len(program) > LONGEST_PROGRAM:
            return Score(0.0, f"the program is longer than {LONGEST_PROGRAM} bytes")
        return trial.run(program, cases)

    def _read_cases(self, batch: Batch, row: int) -> "list[Case]":
        from grpo_cli.rewards.kinds.cases import read_cases

        function = read_cell(batch, self.function, row) if self.function else None
        return read_cases(read_cell(batch, self.tests, row), function or None)


def find_program(completion: str, places: Sequence[CodePlace]) -> str | None:
    """The program in a completion: the last one in the first place that has any."""
    text = after_thinking(completion)
    for place in places:
        found = _FINDERS[place](text)
        if found and found.strip():
            return found
    return None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """The label and content of each fenced block that is closed."""
    fence = label = ""
    content: list[str] = []
    # Not `splitlines`, which also splits at characters that stand in Python's texts.
    for line in text.split("\n"):
        if not fence:
            if opened := _OPEN.match(line):
                fence, label, content = opened[1], opened[2].lower(), []
        elif line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            yield label, textwrap.dedent("\n".join(content))
            fence = ""
        else:
            content.append(line)


def _last_python(text: str) -> str | None:
    labels = {"python", "python3", "py", "py3"}
    return next(iter([content for label, content in _blocks(text) if label in labels][-1:]), None)


def _last_block(text: str) -> str | None:
    return next(iter([content for _, content in _blocks(text)][-1:]), None)


_FINDERS: Mapping[CodePlace, Callable[[str], str | None]] = {
    "python": _last_python,
    "block": _last_block,
    "text": str,
}
