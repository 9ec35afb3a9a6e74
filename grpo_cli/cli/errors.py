"""The one handler of exceptions: from what was raised to text on stderr and an exit code."""

import os
import sys
from collections.abc import Callable

from grpo_cli.cli.output import print_problems, stderr
from grpo_cli.errors import ExitCode, GrpoError, ProblemsError


def run_guarded(command: Callable[[], int | None]) -> int:
    """Runs a command; what is not an error of ours keeps its traceback. `GRPO_DEBUG=1` shows all."""
    try:
        return int(command() or ExitCode.OK)
    except GrpoError as error:
        if os.environ.get("GRPO_DEBUG") == "1":
            raise
        if isinstance(error, ProblemsError):
            print_problems(error.problems)
            _count(len(error.problems))
        else:
            stderr().print(f"error: {error}", style="red", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        stderr().print("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`grpo … | head`): nothing is wrong.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return ExitCode.OK


def _count(problems: int) -> None:
    if problems > 1:
        stderr().print(f"{problems} problems; nothing was started")
