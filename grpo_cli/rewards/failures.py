"""The texts of rewards' failures: which reward, which row, what it saw, and where it broke.

Owns wording and tracebacks only; `scoring.py` decides what is a failure.
"""

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Batch

SHOWN = 300
"""Characters shown of a prompt or completion."""

_CORRECT = "correct what the last line of the traceback names"
_IMPORT_FIXES: tuple[tuple[type[BaseException], str], ...] = (
    (ModuleNotFoundError, "install the package that has this module, or correct the import"),
    (FileNotFoundError, "write a path that starts at the module: `Path(__file__).parent / …`"),
    (SystemExit, 'put what the script does under `if __name__ == "__main__":`'),
)
_OURS = str(Path(__file__).parent)
_LOOP = str(Path(os.__file__).parent / "asyncio")


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...


def of_row(reward: _Named, batch: Batch, row: int, error: BaseException) -> str:
    """A reward failed on one row."""
    head = (
        f"reward {reward.name!r} ({reward.kind}) failed on {batch.row_name(row)}: {_summary(error)}"
    )
    return "\n".join([head, *_seen(batch, row), *_trace(error)])


def of_batch(reward: _Named, batch: Batch, row: int | None, error: BaseException) -> str:
    """A reward that takes whole batches failed; `row` is the one that fails by itself, if any."""
    if row is not None:
        return of_row(reward, batch, row, error)
    size = len(batch.completions)
    head = f"reward {reward.name!r} ({reward.kind}) failed on a batch of {size}: {_summary(error)}"
    if not size:
        return "\n".join([head, *_trace(error)])
    note = f"  No row was found that fails by itself; the first is {batch.row_name(0)}:"
    return "\n".join([head, note, *_seen(batch, 0), *_trace(error)])


def of_value(reward: _Named, batch: Batch, row: int, value: object, fault: str) -> str:
    """A reward returned something that is not a usable number."""
    shown = shorten(repr(value), 80)
    head = (
        f"reward {reward.name!r} ({reward.kind}) returned {shown} for {batch.row_name(row)}, "
        f"which {fault}. Fix: return a finite number, or None where the reward does not apply"
    )
    return "\n".join([head, *_seen(batch, row)])


def of_build(name: str, kind: str, error: BaseException) -> str:
    """A reward's own code failed while it was imported."""
    fix = next((fix for type_, fix in _IMPORT_FIXES if isinstance(error, type_)), _CORRECT)
    if isinstance(error, ImportError) and "relative import" in str(error):
        fix = "import by the file's name alone, as the reward's folder is on the path: `import helpers`"
    head = (
        f"reward {name!r} ({kind}) could not be loaded: {_summary(error).rstrip('.')}. Fix: {fix}"
    )
    return "\n".join([head, *_trace(error)])


def shorten(text: str, limit: int = SHOWN) -> str:
    """The text, with its middle left out where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit - limit * 2 // 3
    return f"{text[:head]} … {text[len(text) - tail :]}"


def _seen(batch: Batch, row: int) -> list[str]:
    pairs = [("prompt", batch.prompts), ("completion", batch.completions)]
    return [f"  {label}: {_show(values, row)}" for label, values in pairs]


def _show(values: object, row: int) -> str:
    """A prompt or completion on one line; whatever it is, showing it must not fail."""
    try:
        value = values[row]  # type: ignore[index]
        # As the function got it: messages taken for text are the commonest mistake.
        return shorten(repr(value))
    except Exception:
        return "(cannot be shown)"


def _summary(error: BaseException) -> str:
    if isinstance(error, RewardError):
        return str(error)
    return traceback.format_exception_only(error)[-1].strip()


def _trace(error: BaseException) -> list[str]:
    """The traceback without our frames; nothing for errors that are ours from end to end."""
    if isinstance(error, RewardError):
        return []
    whole = traceback.TracebackException.from_exception(error)
    if isinstance(error, SyntaxError) or any(_is_theirs(frame) for frame in whole.stack):
        for part in _chain(whole):
            part.stack = traceback.StackSummary.from_list(
                [frame for frame in part.stack if _is_theirs(frame)]
            )
    return "".join(whole.format()).rstrip().splitlines()


def _chain(part: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    """An exception and what caused it."""
    while part is not None:
        yield part
        part = part.__cause__ or part.__context__


def _is_theirs(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    return not name.startswith((_OURS, _LOOP, "<frozen importlib"))
