"""Code of the user's in a child process, so that a command notices if it ends the process."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from grpo_cli.errors import (
    GrpoError,
    ProblemsError,
    RecipeError,
    RewardError,
    RunError,
    SetupError,
    UsageError,
)
from grpo_cli.processes import stop_with_parent

Result = TypeVar("Result")
Progress = Callable[[str], None]
_KINDS: tuple[type[GrpoError], ...] = (UsageError, SetupError, RewardError, RunError, GrpoError)


def run_in_child(function: Callable[[Progress], Result], on_progress: Progress) -> Result:
    """Run a function in a fork of this process, which has few threads yet, and return its result.

    Args:
        function: Called with what reports progress; returns what can be pickled.
        on_progress: Called here with what is being done.

    Raises:
        RunError: The process ended without a result.
        GrpoError: What the function raised.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, function))
    process.start()
    there.close()
    doing = "starting"
    try:
        while True:
            kind, value = here.recv()
            if kind == "result":
                return value
            if kind == "error":
                number, problems, text, path = value
                raise RecipeError(problems) if problems else _KINDS[number](text, path)
            on_progress(doing := value)
    except EOFError:
        process.join()
        raise RunError(_describe_end(process.exitcode or 0, doing)) from None
    finally:
        # Threads of the user's may outlive the result.
        process.kill()
        process.join()
        here.close()


def _describe_end(code: int, doing: str) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    fix = "find what ends it, such as `os._exit()` or a native library, and raise an error there"
    return f"the process that tries the recipe {how} before it had a result (last: {doing}). Fix: {fix}"


def _answer(pipe: Any, function: Callable[[Progress], Any]) -> None:
    """Send the result of a function, or its error, and what it is doing before."""
    stop_with_parent()
    # Those of the parent may be a display, whose thread is not here.
    sys.stdout = sys.stderr = sys.__stderr__
    try:
        pipe.send(("result", function(lambda doing: pipe.send(("doing", doing)))))
    except GrpoError as error:
        number = next(place for place, kind in enumerate(_KINDS) if isinstance(error, kind))
        problems = error.problems if isinstance(error, ProblemsError) else None
        pipe.send(("error", (number, problems, str(error), error.path)))
    except KeyboardInterrupt:
        os._exit(130)
