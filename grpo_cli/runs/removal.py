"""Remove runs, or checkpoints they no longer need: run folders only, none in use, nothing behind a link."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.errors import UsageError
from grpo_cli.runs.checkpoints import STAGING, find_best, whole_checkpoints
from grpo_cli.runs.files import lock_folder, measure_bytes
from grpo_cli.runs.folder import RunFolder, look_at_life
from grpo_cli.runs.selection import read_status


@dataclass(frozen=True)
class Removal:
    """What would be removed of one run."""

    run: RunFolder
    paths: tuple[Path, ...]
    """The run folder itself, or some of its checkpoints."""
    bytes: int
    kept: tuple[Path, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the removal as plain values."""
        paths = {name: [str(path) for path in getattr(self, name)] for name in ("paths", "kept")}
        return {"run": str(self.run.path), **paths, "bytes": self.bytes}


def plan_removal(run: RunFolder, *, checkpoints: bool = False) -> Removal:
    """Work out what would be removed: the run, or all its checkpoints but the newest complete one and the best."""
    _check_removable(run)
    if not checkpoints:
        return Removal(run, (run.path,), measure_bytes(run.path))
    if run.checkpoints.is_symlink():
        raise UsageError(
            f"{run.checkpoints} is a link to {run.checkpoints.readlink()}, and nothing behind a link is "
            "removed",
            "remove the checkpoints there by hand",
        )
    kept = _needed_checkpoints(run)
    made = (run.checkpoints / STAGING, *sorted(run.checkpoints.glob("checkpoint-*")))
    paths = tuple(path for path in made if path.is_dir() and path not in kept)
    return Removal(run, paths, sum(map(measure_bytes, paths)), kept=kept)


def _needed_checkpoints(run: RunFolder) -> tuple[Path, ...]:
    """Return the checkpoint that training would resume from, and the best if it is known."""
    known = whole_checkpoints(run)
    needed = {known[max(known)]} if known else set()
    with suppress(UsageError):
        needed.add(find_best(run, known)[1])
    return tuple(sorted(needed))


def remove(removals: Sequence[Removal]) -> int:
    """Remove what was planned, and return the bytes freed; nothing if something works in one of the runs."""
    with ExitStack() as locks:
        for each in removals:
            _check_removable(each.run)
            # Evaluations lock folders of their own.
            evaluated = [path.parent for path in each.run.evaluations.glob("*/.lock")]
            for folder in (each.run.launch, *evaluated):
                if folder.is_dir():
                    locks.enter_context(lock_folder(folder, "working"))
        for each in removals:
            for path in each.paths:
                _remove_tree(path)
    for each in removals:
        if not each.run.path.exists():
            # Fails if other runs have the same name.
            with suppress(OSError):
                each.run.path.parent.rmdir()
    return sum(each.bytes for each in removals)


def _check_removable(run: RunFolder) -> None:
    """Raise `UsageError` for a folder that is not a run, and for a run that something works in."""
    path, parent = run.path, run.path.parent
    # All runs may lie on another disk, but a link to one run, or to all of a name, is the user's.
    if path.resolve() != parent.parent.resolve() / parent.name / path.name:
        raise UsageError(
            f"{path} is a link, or lies behind one", f"name the folder itself, {path.resolve()}"
        )
    if not run.resolved.is_file():
        raise UsageError(f"{path} is not a run folder", "name a folder under runs/<name>/")
    if run.shares_checkpoints:
        raise UsageError(
            f"{path} is one machine's part of {run.main.path}", "remove that run as a whole"
        )
    for part in (run, *map(RunFolder, sorted(path.glob("machines/*")))):
        status = read_status(part)
        if status and look_at_life(part, status).state == "running":
            raise UsageError(
                f"{path} is running",
                f"wait for it, or stop it (Ctrl-C in its terminal, or touch {part.stop_request})",
            )


def _remove_tree(path: Path) -> None:
    """Remove a folder after renaming it, so that half of a run never stands under its name."""
    aside = path.with_name(f".{path.name}.removed")
    try:
        path.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise UsageError(
            f"{path} could not be removed ({error.strerror}); what is left is {aside}",
            "end what writes into it, or change its permissions, and remove that by hand",
        ) from None
