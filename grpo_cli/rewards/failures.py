"""Failures of rewards: the line of the user's code, why it failed, and what most often is the cause."""

import os
import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any, TypeVar

from grpo_cli.errors import GrpoError, RewardError

_IMPORT_FIXES: tuple[tuple[type[BaseException], str], ...] = (
    (ModuleNotFoundError, "install the package that has this module, or correct the import"),
    (
        FileNotFoundError,
        "write a path that starts at the file that opens it: `Path(__file__).parent / …`",
    ),
    (SystemExit, 'put what the script does under `if __name__ == "__main__":`'),
    (EOFError, 'put what reads standard input under `if __name__ == "__main__":`'),
    (BaseException, "correct what the last line of the traceback names"),
)
Failure = TypeVar("Failure", bound=GrpoError)
_HIDDEN = (
    str(Path(__file__).parents[1]),
    str(Path(os.__file__).parent / "asyncio"),
    "<frozen importlib",
)
"""Paths whose frames are left out of tracebacks."""
_LIBRARIES = (str(Path(os.__file__).parent), sysconfig.get_path("purelib"))


def explain_build(kind: type[Failure], subject: str, error: BaseException, path: str) -> Failure:
    """Return the error of a reward, tool or environment whose own code failed while it was imported."""
    line, summary = find_line(error), summarize(error).rstrip(".")
    where = f" ({line})" if line else ""
    seen = f"{subject} could not be loaded{where}: {summary}"
    return kind(seen, import_fix(error), path, format_trace(error))


def find_line(error: BaseException) -> str:
    """Return the file's name and the line of the user's code that failed; empty if it was elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith((*_HIDDEN, *_LIBRARIES))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def failure_fix(error: BaseException, completion: Any) -> str:
    """Return what most often mends a function that failed on a completion; empty if nothing does."""
    if isinstance(error, ModuleNotFoundError | FileNotFoundError):
        return import_fix(error)
    message = str(error)
    if not isinstance(error, AttributeError | TypeError):
        return ""
    if "'NoneType'" in message:
        return "test for None first: `re.search` finds nothing in most completions"
    if isinstance(completion, str) and ("string ind" in message or "'str' object" in message):
        return (
            "if it takes completions for messages: prompts are plain text here, so each is a string"
        )
    if not isinstance(completion, str) and re.search(r"\b(?:list|dict|string ind\w+)\b", message):
        return (
            "if it takes completions for texts: prompts are conversations here, so each is a list of messages; "
            'read its text: `completion[-1]["content"]`'
        )
    return ""


def import_fix(error: BaseException) -> str:
    """Return what most often mends a file that cannot be imported."""
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "import by the file's name alone, as its folder is on the path: `import helpers`"
    return next(fix for type_, fix in _IMPORT_FIXES if isinstance(error, type_))


def summarize(error: BaseException) -> str:
    """Return the type and the message of an error; the message alone of one of our own."""
    if isinstance(error, RewardError):
        return error.seen
    return traceback.format_exception_only(error)[-1].strip()


def format_trace(error: BaseException) -> list[str]:
    """Return the traceback without our frames; empty for errors of our own."""
    if isinstance(error, RewardError):
        return []
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        frames = [frame for frame in part.stack if _is_users(frame)]
        part.stack = traceback.StackSummary.from_list(frames)
        part = part.__cause__ or part.__context__
    return "".join(whole.format()).rstrip().splitlines()


def _is_users(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(_HIDDEN)
