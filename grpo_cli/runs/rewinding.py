"""Takes a run folder back to a checkpoint, so that what comes next follows on what is there.

Nothing is thrown away: what a broken attempt did after the checkpoint moves to `undone/` in its logs.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_cli.runs.checkpoints import clear_unfinished, whole_checkpoints
from grpo_cli.runs.folder import RunFolder


def rewind(run: RunFolder, step: int) -> None:
    """Undoes what came after a step.

    Args:
        run: A run that nothing works on.
        step: Optimizer steps that stay.

    Raises:
        OSError: The disk is full, say; what has not been moved is where it was.
    """
    undone = run.attempt(run.attempts) / "undone"
    for log in (run.metrics, *sorted(run.completions.glob("*.jsonl"))):
        _cut(log, step, undone / log.relative_to(run.path))
    later = [] if run.shares_checkpoints else _take_back(run, step)
    after = sorted(run.evaluations.glob("after.*")) if run.evaluations.is_dir() else []
    _set_aside(run, (*later, *after, run.model))


def start_over(run: RunFolder) -> None:
    """Undoes all of a run that saved nothing.

    Args:
        run: A run without a checkpoint that nothing works on.

    Raises:
        OSError: The disk is full, say; what has not been moved is where it was.
    """
    if not run.shares_checkpoints:
        clear_unfinished(run)
    written = (run.metrics, run.evaluations, run.model, *sorted(run.completions.glob("*.jsonl")))
    _set_aside(run, written)
    run.resumption.unlink(missing_ok=True)


def _take_back(run: RunFolder, step: int) -> list[Path]:
    """The checkpoints after a step; removes what a killed process was writing."""
    clear_unfinished(run)
    return [path for number, path in whole_checkpoints(run).items() if number > step]


def _set_aside(run: RunFolder, paths: Iterable[Path]) -> None:
    """Moves what is there of some paths to the last attempt, and forgets its workers."""
    undone = run.attempt(run.attempts) / "undone"
    for path in paths:
        if path.exists():
            _move(path, undone / path.relative_to(run.path))
    for path in (run.stop_request, *run.worker_pids().values()):
        path.unlink(missing_ok=True)


def _cut(log: Path, step: int, undone: Path) -> None:
    """Moves the records after a step to another file; they are the log's end."""
    if not log.is_file():
        return
    with log.open("rb") as lines:
        kept = 0
        for line in lines:
            if _is_after(line, step):
                break
            kept += len(line)
        else:
            return
        undone.parent.mkdir(parents=True, exist_ok=True)
        lines.seek(kept)
        with undone.open("wb") as rest:
            shutil.copyfileobj(lines, rest)
            rest.flush()
            os.fsync(rest.fileno())
    os.truncate(log, kept)


def _is_after(line: bytes, step: int) -> bool:
    """Whether a record, or the torn end of one, is of a later step."""
    try:
        record: Mapping[str, Any] = json.loads(line)
    except ValueError:
        return True
    return record.get("step", 0) > step or record.get("when") == "after"


def _move(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, target)
