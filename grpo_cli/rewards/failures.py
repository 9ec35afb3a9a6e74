"""Failures of rewards: the line of the user's code, why it failed, and what most often is the cause."""

import ast
import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Batch

_IMPORT_FIXES: tuple[tuple[type[BaseException], str], ...] = (
    (ModuleNotFoundError, "install the package that has this module, or correct the import"),
    (FileNotFoundError, "write a path that starts at the module: `Path(__file__).parent / …`"),
    (SystemExit, 'put what the script does under `if __name__ == "__main__":`'),
    (EOFError, 'put what reads standard input under `if __name__ == "__main__":`'),
    (BaseException, "correct what the last line of the traceback names"),
)
_HIDDEN = (
    str(Path(__file__).parents[1]),
    str(Path(os.__file__).parent / "asyncio"),
    "<frozen importlib",
)
"""Paths whose frames are left out of tracebacks."""
_LIBRARIES = (str(Path(os.__file__).parent), sysconfig.get_path("purelib"))

_NAMES_TYPE = re.compile(r"\b(?:list|dict|string ind(?:ices|ex))\b")
"""In what Python says to a list of messages, or a message, that is used as a text; or to a text used as one."""


def describe_build_failure(subject: str, error: BaseException) -> str:
    """Return the message of a reward, tool or environment whose own code failed while it was imported."""
    line, summary = find_line(error), summarize(error).rstrip(".")
    where = f" ({line})" if line else ""
    head = f"{subject} could not be loaded{where}: {summary}. Fix: {import_fix(error)}"
    return "\n".join([head, *format_trace(error)])


def find_line(error: BaseException) -> str:
    """Return the file's name and the line of the user's code that failed; empty if it was elsewhere."""
    frame = _own_frame(error)
    return f"{Path(frame.filename).name}:{frame.lineno}" if frame else ""


def _own_frame(error: BaseException) -> traceback.FrameSummary | None:
    tb = _own_traceback(error)
    return traceback.extract_tb(tb, limit=1)[0] if tb else None


def _own_traceback(error: BaseException) -> TracebackType | None:
    """Return where the user's code failed, or called what failed; None if it was elsewhere."""
    last, tb = None, error.__traceback__
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        last = last if file.startswith((*_HIDDEN, *_LIBRARIES)) else tb
        tb = tb.tb_next
    return last


def find_beside(error: FileNotFoundError) -> str:
    """Return the name of a missing file that is in the folder of the user's code; empty if it is not there."""
    frame, name = _own_frame(error), error.filename
    if frame is None or not isinstance(name, str):
        return ""
    return name if (Path(frame.filename).parent / name).exists() else ""


def reads_completion(error: BaseException, batch: Batch) -> bool:
    """Return whether the value that an `AttributeError` or a `TypeError` is about is a completion, or in one.

    That is the object without the attribute, or else what the failing expression works on and its message names.
    """
    obj, tb = getattr(error, "obj", None), _own_traceback(error)
    if isinstance(obj, list | dict | str):
        return _is_of_completions(obj, batch)
    if tb is None or not _NAMES_TYPE.search(str(error)):
        return False
    return any(_is_of_completions(value, batch) for value in _values_at(tb))


def _values_at(tb: TracebackType) -> Iterator[Any]:
    """Yield the values of the variables that the failing expression of a frame works on directly."""
    [frame], names = traceback.extract_tb(tb, limit=1), tb.tb_frame.f_locals
    with contextlib.suppress(OSError, SyntaxError, ValueError, TypeError):
        lines = (
            Path(frame.filename)
            .read_bytes()
            .splitlines()[(frame.lineno or 0) - 1 : frame.end_lineno]
        )
        lines[-1] = lines[-1][: frame.end_colno]
        lines[0] = lines[0][frame.colno :]
        code = ast.parse(b"(" + b"\n".join(lines) + b")", mode="eval").body
        for part in ast.iter_child_nodes(code):
            root = part
            while isinstance(root, ast.Subscript | ast.Starred):
                root = root.value
            if isinstance(root, ast.Name) and root.id in names:
                value = names[root.id]
                yield from [value] * isinstance(value, list | dict | str)


def _is_of_completions(value: Any, batch: Batch) -> bool:
    """Return whether a value is a completion, all of them, a message of one or a character."""
    completions = batch.completions
    parts = [part for completion in completions for part in completion]
    is_known = value in completions or value == completions or value in parts
    return is_known and not any(value in column for column in batch.columns.values())


def import_fix(error: BaseException) -> str:
    """Return what most often mends a file that cannot be imported."""
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "import by the file's name alone, as its folder is on the path: `import helpers`"
    return next(fix for type_, fix in _IMPORT_FIXES if isinstance(error, type_))


def summarize(error: BaseException) -> str:
    """Return the type and the message of an error; the message alone of one of our own."""
    if isinstance(error, RewardError):
        return str(error)
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
