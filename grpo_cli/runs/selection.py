"""Find the run that a person means: a path, `NAME/ID`, `NAME` (its newest run), or `latest`."""

import os
from pathlib import Path

from grpo_cli.errors import UsageError, nearest
from grpo_cli.runs.folder import RunFolder, Status, StatusFile, was_started

LATEST = "latest"


def list_folders(root: Path) -> list[RunFolder]:
    """Return every run folder `<name>/<timestamp>` under a root, damaged ones too, sorted by path."""
    return [RunFolder(path.absolute()) for path in sorted(root.glob("*/*")) if is_run(path)]


def is_run(path: Path) -> bool:
    """Return whether a folder is a run's, even if it is damaged or half made."""
    run = RunFolder(path)
    return run.resolved.is_file() or (run.launch.is_dir() and (path / "logs").is_dir())


def find_run(root: Path, name: str = LATEST) -> RunFolder:
    """Return the run that is meant by a path, or by `NAME/ID`, `NAME` or `latest` under the root."""
    if name == LATEST:
        return _newest(root, list_folders(root))
    path = Path(os.path.expanduser(name))
    for candidate in (path, root / path):
        # `abspath` resolves `..` without following links.
        absolute = Path(os.path.abspath(candidate))
        if is_run(absolute):
            return RunFolder(absolute)
    wanted = name.rstrip("/").removesuffix(f"/{LATEST}")
    if named := _list_named(root, wanted):
        return _newest(root, named)
    raise _explain_unknown(root, name, path)


def _list_named(root: Path, name: str) -> list[RunFolder]:
    return [run for run in list_folders(root) if run.path.parent.name == name]


def find_started(root: Path, name: str) -> RunFolder | None:
    """Return the run of a name that was started last; None if none was. A dry run leaves a folder too."""
    statuses = {run: StatusFile(run.status).read() for run in _list_named(root, name)}
    return _started_last({run: s for run, s in statuses.items() if was_started(run, s)})


def read_status(run: RunFolder) -> Status | None:
    """Return the status of a run; None if it is damaged."""
    try:
        return StatusFile(run.status).read()
    except UsageError:
        return None


def _newest(root: Path, runs: list[RunFolder]) -> RunFolder:
    """Return the run that was started last, or made last if none was started."""
    statuses = {run: own for run in runs if run.status.is_file() and (own := read_status(run))}
    started = {run: status for run, status in statuses.items() if was_started(run, status)}
    if (newest := _started_last(started or statuses)) is not None:
        return newest
    if runs:
        names = ", ".join(str(run.path) for run in runs[:3])
        raise UsageError(f"no run can be read ({names})", "name one by its path")
    raise UsageError(
        f"no run is in {root.absolute()}",
        "grpo train RECIPE, or say where runs are with --runs DIR",
    )


def _started_last(statuses: dict[RunFolder, Status]) -> RunFolder | None:
    # The folder's name need not be a time.
    return max(statuses, key=lambda run: statuses[run].started_at, default=None)


def _explain_unknown(root: Path, name: str, path: Path) -> UsageError:
    if path.is_dir():
        return UsageError(
            f"{name} is not a run folder: it has no resolved.json, nor a log of a training",
            "name a folder under runs/<name>/ (`grpo runs list` shows them), or a log",
        )
    runs = [run.path for run in list_folders(root)]
    names = dict.fromkeys(run.parent.name for run in runs)
    close = nearest(name, [*names, *(f"{run.parent.name}/{run.name}" for run in runs)])
    hint = f"did you mean {close}? " if close else ""
    option = "" if root == Path("runs") else f" --runs {root}"
    fix = f"{hint}grpo runs list{option} shows what is there"
    # The names of runs may have dots too.
    where = " and no such file exists" if path.suffix and not close else ""
    return UsageError(f"no run `{name}` is in {root.absolute()}{where}", fix)
