"""Which run a person means: a path, `NAME/ID`, `NAME` (its newest run), or `latest`.

Owns finding run folders under a root. What is in them is for others to read.
"""

import os
from contextlib import suppress
from pathlib import Path

from grpo_cli.errors import UsageError, nearest
from grpo_cli.runs.files import read_object
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.liveness import was_started
from grpo_cli.runs.status import Status, StatusFile

LATEST = "latest"


def list_folders(root: Path) -> list[RunFolder]:
    """Every run folder `<name>/<timestamp>` under a root, damaged ones too; in the order of their paths.

    What has no sign of a run (evaluations without one, folders of other programs) is passed over.
    """
    try:
        names = sorted(path for path in root.iterdir() if path.is_dir())
    except OSError:
        return []
    found = []
    for name in names:
        try:
            children = sorted(path for path in name.iterdir() if is_run(path))
        except OSError:
            continue
        found += [RunFolder(path.absolute()) for path in children]
    return found


def is_run(path: Path) -> bool:
    """Whether a folder is a run's, damaged or half made as it may be."""
    run = RunFolder(path)
    return run.resolved.is_file() or (run.launch.is_dir() and (path / "logs").is_dir())


def find_run(root: Path, given: str = LATEST) -> RunFolder:
    """The run that is meant.

    Args:
        root: Usually `runs`.
        given: A path, or `NAME/ID`, `NAME` or `latest` under the root.

    Raises:
        UsageError: There is none, or it is not certain which.
    """
    if given == LATEST:
        return _newest(root, list_folders(root), f"no run is in {root.absolute()}")
    path = Path(given)
    # `~name` of nobody is a name like others.
    with suppress(RuntimeError):
        path = path.expanduser()
    for candidate in (path, root / path):
        # Without `..`, so that what is looked at is what is meant, also beside links.
        whole = Path(os.path.abspath(candidate))
        if is_run(whole):
            return RunFolder(whole)
    name = given.rstrip("/").removesuffix(f"/{LATEST}")
    under = [run for run in list_folders(root) if run.path.parent.name == name]
    if under:
        return _newest(root, under, "")
    raise UsageError(_say_unknown(root, given, path))


def is_own(run: RunFolder) -> bool:
    """Whether a folder is certainly a run's: it holds a recipe as this program writes it."""
    told = read_object(run.resolved)
    return isinstance(told.get("schema_version"), int) and isinstance(told.get("recipe"), dict)


def find_started(root: Path, name: str) -> RunFolder | None:
    """The run of a name that was started last; None where none was. A dry run leaves a folder too.

    Raises:
        UsageError: The status of one is damaged, so that it is not certain which.
    """
    told = [
        (run, StatusFile(run.status).read())
        for run in list_folders(root)
        if run.path.parent.name == name
    ]
    begun = [(run, status) for run, status in told if was_started(run, status)]
    return _last(begun) if begun else None


def read_status(run: RunFolder) -> Status | None:
    """The status of a run; None where it is damaged."""
    try:
        return StatusFile(run.status).read()
    except (UsageError, OSError):
        return None


def started_at(run: RunFolder) -> float:
    """When a run was started, in seconds since the epoch; when its folder was made, where that is unknown."""
    status = read_status(run) if run.status.is_file() else None
    return status.started_at if status else run.path.stat().st_mtime


def _newest(root: Path, runs: list[RunFolder], lacking: str) -> RunFolder:
    """The run that was started last, or made last where none was started."""
    told = [(run, status) for run in runs if run.status.is_file() and (status := read_status(run))]
    chosen = [(run, status) for run, status in told if was_started(run, status)] or told
    if not chosen:
        if runs:
            names = ", ".join(str(run.path) for run in runs[:3])
            raise UsageError(f"no run can be read ({names}). Fix: name one by its path")
        raise UsageError(
            f"{lacking}. Fix: grpo train RECIPE, or say where runs are with --runs DIR"
        )
    return _last(chosen)


def _last(told: list[tuple[RunFolder, Status]]) -> RunFolder:
    """The one that was started last: names need not tell the time."""
    return max(told, key=lambda pair: pair[1].started_at)[0]


def _say_unknown(root: Path, given: str, path: Path) -> str:
    if path.is_dir():
        return (
            f"{given} is not a run folder: it has no resolved.json. "
            "Fix: name a folder under runs/<name>/; `grpo runs list` shows them"
        )
    names = [run.path.parent.name for run in list_folders(root)]
    ids = [f"{run.path.parent.name}/{run.path.name}" for run in list_folders(root)]
    close = nearest(given, [*dict.fromkeys(names), *ids])
    fix = f"grpo runs list{'' if root == Path('runs') else f' --runs {root}'} shows what is there"
    hint = f"did you mean {close}? " if close else ""
    return f"no run `{given}` is in {root.absolute()}. Fix: {hint}{fix}"
