"""Removing a run, or the checkpoints that it needs no more.

Owns what may be removed: run folders alone, none that something works in, nothing behind a link.
"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.errors import UsageError
from grpo_cli.runs.checkpoints import STAGING, whole_checkpoints
from grpo_cli.runs.files import measure_bytes
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.liveness import look_at_life
from grpo_cli.runs.lock import lock_folder
from grpo_cli.runs.selection import is_own, read_status
from grpo_cli.runs.trained import find_trained

_TRIES = 3
_OWN = {"logs", "machines"}
"""Folders of a run in which what looks like a run is none of its own."""


@dataclass(frozen=True)
class Removal:
    """What would be removed of one run."""

    run: RunFolder
    paths: tuple[Path, ...]
    """The run folder itself, or some of its checkpoints."""
    bytes: int
    kept: tuple[Path, ...] = ()
    """Checkpoints that stay."""
    linked: tuple[Path, ...] = ()
    """Links in the folder: they go, and what they point at stays."""

    def as_json(self) -> dict[str, Any]:
        """The removal as plain values."""
        told = {name: [str(path) for path in getattr(self, name)] for name in ("paths", "kept")}
        return {"run": str(self.run.path), **told, "bytes": self.bytes}


def plan_removal(run: RunFolder, *, checkpoints: bool = False) -> Removal:
    """Works out what would be removed; touches nothing.

    Args:
        run: The run.
        checkpoints: Its checkpoints alone, all but the newest whole one and the best.

    Raises:
        UsageError: It is no run of its own, or is at work, or its checkpoints lie elsewhere.
    """
    _refuse(run)
    if not checkpoints:
        links = tuple(path for path in sorted(run.path.iterdir()) if path.is_symlink())
        return Removal(run, (run.path,), measure_bytes(run.path), linked=links)
    if run.checkpoints.is_symlink():
        raise UsageError(
            f"{run.checkpoints} is a link to {run.checkpoints.readlink()}, and nothing behind a link is "
            "removed. Fix: remove there what is needed no more"
        )
    kept = _needed(run)
    made = (run.checkpoints / STAGING, *sorted(run.checkpoints.glob("checkpoint-*")))
    paths = tuple(
        path for path in made if path.is_dir() and not path.is_symlink() and path not in kept
    )
    return Removal(run, paths, sum(map(measure_bytes, paths)), kept=kept)


def remove(removals: Sequence[Removal]) -> int:
    """Removes what was planned; returns the bytes that this freed.

    Raises:
        UsageError: Something has begun to work in one of the runs, and none is touched; or a file cannot be
            removed, and what was before it is gone.
    """
    with ExitStack() as locks:
        for each in removals:
            _refuse(each.run)
            for lock in (each.run.launch, *_measured(each.run)):
                if lock.is_dir() and not lock.is_symlink():
                    locks.enter_context(lock_folder(lock, "working"))
        for each in removals:
            for path in each.paths:
                _take_away(path)
    for each in removals:
        if not each.run.path.exists():
            _leave_no_empty(each.run.path.parent)
    return sum(each.bytes for each in removals)


def _refuse(run: RunFolder) -> None:
    """Refuses what is no run folder, and a run that something works in.

    Raises:
        UsageError: It is one of these.
    """
    path, parent = run.path, run.path.parent
    # Runs may lie on another disk; a link to one of them, or to all of a name, is somebody's own doing.
    if path.resolve() != parent.parent.resolve() / parent.name / path.name:
        raise UsageError(
            f"{path} is a link, or lies behind one. Fix: name the folder itself, {path.resolve()}"
        )
    if not is_own(run):
        raise UsageError(
            f"{path} is no run folder, or is damaged: its resolved.json is not a recipe of grpo. "
            "Fix: name a folder under runs/<name>/, or remove it by hand"
        )
    if run.shares_checkpoints:
        raise UsageError(
            f"{run.path} is one machine's part of {run.main.path}. Fix: remove that run as a whole"
        )
    if any(_is_other(run, path.parent) for path in run.path.rglob(run.resolved.name)):
        raise UsageError(f"{run.path} holds other runs. Fix: name them one by one")
    if run.path.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(f"{run.path} is where this command works. Fix: cd elsewhere first")
    for part in (run, *map(RunFolder, sorted(run.path.glob("machines/*")))):
        status = read_status(part)
        if status and look_at_life(part, status).state == "running":
            raise UsageError(
                f"{run.path} is running. Fix: wait for it, or stop it (Ctrl-C in its terminal, or "
                f"touch {part.stop_request})"
            )


def _is_other(run: RunFolder, path: Path) -> bool:
    """Whether a folder inside a run is a run of its own."""
    inside = path.relative_to(run.path).parts
    return bool(inside) and inside[0] not in _OWN and is_own(RunFolder(path))


def _take_away(path: Path) -> None:
    """Removes a folder, under another name: half of a run never stands under its own.

    Raises:
        UsageError: Not all of it could be removed.
    """
    aside = path.with_name(f".{path.name}.removed")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        # Somebody may be writing into it: what came meanwhile goes the next time.
        for _ in range(_TRIES):
            shutil.rmtree(aside, ignore_errors=True)
        if aside.exists():
            shutil.rmtree(aside)
    except FileNotFoundError:
        # It went by itself.
        return
    except OSError as error:
        rest = aside if aside.exists() else path
        raise UsageError(
            f"{path} could not be removed ({error.strerror}); what is left is {rest}. Fix: end what "
            "writes into it, or change its permissions, and remove that by hand"
        ) from None


def _needed(run: RunFolder) -> tuple[Path, ...]:
    """The checkpoint that a training would go on from, and the best."""
    known = whole_checkpoints(run)
    needed = {known[max(known)]} if known else set()
    # One that never evaluated does not say which is the best.
    with suppress(UsageError, OSError):
        needed |= {path for _, path in find_trained(run, "best")}
    return tuple(sorted(needed))


def _measured(run: RunFolder) -> list[Path]:
    """The folders of evaluations, which lock themselves."""
    return [path.parent for path in run.evaluations.glob("*/.lock")]


def _leave_no_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        # Other runs are in it.
        return
