"""The one handler of exceptions: from what was raised to text on stderr and an exit code."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from typer.exceptions import TyperException

from grpo_cli.cli.output import print_problems, stderr
from grpo_cli.errors import ExitCode, GrpoError, ProblemsError


class Terminated(KeyboardInterrupt):
    """A SIGTERM: passes wherever Ctrl-C passes, by way of every `finally`."""


def run_guarded(command: Callable[[], int | None]) -> int:
    """Runs a command; what is not an error of ours keeps its traceback. `GRPO_DEBUG=1` shows all."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return int(command() or ExitCode.OK)
    except GrpoError as error:
        if os.environ.get("GRPO_DEBUG") == "1":
            raise
        if isinstance(error.__cause__, KeyboardInterrupt):
            # It reached a reward, which could not know that it was meant for all.
            return _say_interrupted(error.__cause__)
        if isinstance(error, ProblemsError):
            print_problems(error.problems)
            _count(len(error.problems))
        else:
            stderr().print(f"error: {error}", style="red", markup=False)
        return error.exit_code
    except TyperException as error:
        return _explain_usage(error)
    except KeyboardInterrupt as interrupt:
        return _say_interrupted(interrupt)
    except BrokenPipeError:
        # The reader of our output has gone (`grpo … | head`): nothing is wrong.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return ExitCode.OK


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """The first signal lets every `finally` clean up; the next one ends at once."""
    signal.signal(number, signal.SIG_DFL)
    raise Terminated


def _say_interrupted(interrupt: BaseException) -> int:
    """What a shell expects of a process that a signal ended."""
    terminated = isinstance(interrupt, Terminated)
    stderr().print("terminated" if terminated else "interrupted")
    return ExitCode.TERMINATED if terminated else ExitCode.INTERRUPTED


def _explain_usage(error: TyperException) -> int:
    """A command line that Typer cannot read: its own words, and where help is."""
    said = getattr(error, "format_message", lambda: str(error))()
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "grpo"
    if said:
        stderr().print(f"error: {said} Fix: see {command} --help", style="red", markup=False)
    return ExitCode.USAGE


def _count(problems: int) -> None:
    if problems > 1:
        stderr().print(f"{problems} problems; nothing was started")
