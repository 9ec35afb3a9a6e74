"""The tool `python_code`: programs of the model's, run in the sandbox of the reward `code`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from grpo_cli.environments.contract import EpisodeError, ToolParams, ToolSource
from grpo_cli.environments.kinds.function import make_tool
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Integer, Number
from grpo_cli.rewards.kinds.code import LONGEST_PROGRAM, find_sandbox_faults

if TYPE_CHECKING:
    from grpo_cli.sandbox.runner import Limits


class PythonCodeToolParams(ToolParams):
    """Runs Python programs that the model writes, and tells it what they print.

    The tool `python_code(code)` returns the program's output or, if the program fails, the last line of the
    error; a program that fails is not a failure of the tool. Each call runs in a new process with an empty folder:
    nothing is kept from one call to the next.

    Protection: that of the reward `code`; `grpo rewards show code` describes it and its limits. On a machine where
    a program could change your files, end your processes or reach the network, no program is run unless you set
    `unprotected: true`.
    """

    kind: ClassVar[str] = "python_code"

    timeout_s: Number = Field(default=5.0, gt=0, le=600)
    """Time limit of a program (wall-clock), in seconds; set `episode.tool_timeout_s` higher."""
    memory_mib: Integer = Field(default=256, ge=64)
    """Address space of a program, in MiB; not limited on macOS."""
    output_kib: Integer = Field(default=64, ge=1, le=65536)
    """Maximum output to stdout, and to stderr, in KiB; the model sees `episode.max_result_tokens` of it."""
    packages: bool = False
    """Whether programs may import the installed packages, and so read their files. NumPy reserves more memory
    than it uses: set `memory_mib: 4096`."""
    unprotected: bool = False
    """Whether to run programs on a machine without sufficient protection."""

    def problems(self) -> list[Issue]:
        """Report machines on which a program cannot be confined at all, or not enough."""
        return find_sandbox_faults(unprotected=self.unprotected)

    def tool_names(self) -> list[str]:
        """Return its one tool."""
        return ["python_code"]

    def open(self) -> ToolSource:
        """Find out what protects programs on this machine (half a second, once)."""
        if faults := self.problems():
            raise EpisodeError(faults[0].seen, faults[0].fix, faults[0].path)
        from grpo_cli.sandbox.runner import Limits

        limits = Limits(
            seconds=self.timeout_s,
            memory_mib=self.memory_mib,
            output_bytes=self.output_kib * 1024,
            packages=self.packages,
        )
        return ToolSource([make_tool(_make_function(limits))])


def _make_function(limits: "Limits") -> Callable[[str], str]:
    from grpo_cli.sandbox.runner import run_program

    def python_code(code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program. Only what it prints is returned.
        """
        if not isinstance(code, str):
            raise TypeError(f"code should be a string, not {code!r:.100}")
        # Half a character (a surrogate) becomes `?`.
        program = code.encode(errors="replace")
        if len(program) > LONGEST_PROGRAM:
            raise ValueError(f"the program is longer than {LONGEST_PROGRAM} bytes")
        result = run_program(program, limits)
        if result.reason:
            return f"Error: {result.reason}"
        return result.stdout.decode(errors="replace").rstrip() or "The program printed nothing."

    return python_code
