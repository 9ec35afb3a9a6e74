"""The runs under a folder, a line each."""

import time
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

from grpo_cli.analysis.metrics import say_failures
from grpo_cli.errors import UsageError, nearest
from grpo_cli.report.summary import find_trend
from grpo_cli.runs.folder import RunFolder, State
from grpo_cli.runs.metrics import read_reward_ends
from grpo_cli.runs.run import Run
from grpo_cli.runs.selection import list_folders

_UNKNOWN = dict.fromkeys(
    """step total_steps reward_first reward_last reward_within_noise scoring_failed held_out held_out_prompts
    before after seconds started_at reason fix""".split()
)
"""Of a run in a list whose files cannot be read."""
STATES: tuple[str, ...] = (*get_args(State), "interrupted", "damaged")
SORTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "started": lambda run: -(run["started_at"] or 0),
    "name": lambda run: (run["name"], run["id"]),
    "state": lambda run: STATES.index(run["state"]),
    "steps": lambda run: -(run["step"] or 0),
    "reward": lambda run: _falling(run["reward_last"]),
    "accuracy": lambda run: _falling(run["after"]),
    "duration": lambda run: _falling(run["seconds"]),
}
"""Orders of a list: the newest, best or longest comes first, and unknown values last."""


def list_runs(
    root: Path,
    *,
    name: str | None = None,
    states: Iterable[str] = (),
    sort: str = "started",
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """List the runs under a root, as `grpo runs list --json` prints them; what is not known is None.

    `name` is a pattern of the name or of `NAME/ID`; `sort` is one of `SORTS`: of equals, the newest comes first.
    """
    chosen = tuple(states)
    _check(sort, SORTS, "--sort")
    for state in chosen:
        _check(state, STATES, "--state")
    if not root.is_dir():
        raise UsageError(f"there is no folder {root}", "say where runs are with --runs DIR")
    runs = [Run(folder) for folder in list_folders(root) if _is_called(folder, name)]
    runs.sort(key=_started_at, reverse=True)
    if sort == "started" and not chosen:
        # The other files of older runs need not be read.
        runs = runs[:limit]
    listed = map(_list, runs)
    kept = [run for run in listed if not chosen or run["state"] in chosen]
    kept.sort(key=SORTS[sort])
    return kept[:limit]


def _started_at(run: Run) -> float:
    try:
        return run.status.started_at
    except (UsageError, OSError):
        return run.folder.path.stat().st_mtime


def _list(run: Run) -> dict[str, Any]:
    folder, (name, run_id) = run.folder, run.folder.path.parts[-2:]
    row = {"run": str(folder.path), "name": name, "id": run_id, "state": "damaged", **_UNKNOWN}
    try:
        if not folder.resolved.is_file():
            raise UsageError("it has no resolved.json")
        return row | _read_row(run)
    except (UsageError, OSError) as error:
        return {**row, "started_at": _started_at(run), "reason": str(error)}


def _read_row(run: Run) -> dict[str, Any]:
    status = run.status
    until = time.time() if run.life.state == "running" else status.updated_at
    measured = run.after or run.before
    # The first accuracy, else the total.
    names = (f"accuracy/{name}" for name in measured.get("accuracy", {}))
    metric = next(names, "reward" if measured else None)
    first, last, failed = read_reward_ends(run.folder.metrics)
    reward = find_trend(first, last)
    return {
        "state": run.life.state,
        "step": status.step,
        "total_steps": status.total_steps,
        "reward_first": reward.first if reward else None,
        "reward_last": reward.last if reward else None,
        "reward_within_noise": reward.is_noise if reward else None,
        "scoring_failed": failed or any(map(say_failures, (run.before, run.after))),
        "held_out": metric,
        # Fingerprint of the prompts.
        "held_out_prompts": measured.get("held_out"),
        "before": _read_metric(run.before, metric),
        "after": _read_metric(run.after, metric),
        "seconds": max(until - status.started_at, 0.0),
        "started_at": status.started_at,
        "reason": status.reason,
        "fix": status.fix,
    }


def _check(value: str, known: Iterable[str], flag: str) -> None:
    if value not in known:
        close = nearest(value, known)
        hint = f"{flag} {close}" if close else f"one of {', '.join(known)}"
        raise UsageError(f"{flag} {value}: there is none", hint)


def _is_called(folder: RunFolder, pattern: str | None) -> bool:
    name = folder.path.parent.name
    names = (name, f"{name}/{folder.path.name}")
    return pattern is None or any(fnmatchcase(each, pattern) for each in names)


def _read_metric(measured: Mapping[str, Any], metric: str | None) -> float | None:
    kind, _, name = (metric or "").partition("/")
    return measured.get(kind, {}).get(name) if name else measured.get(kind)


def _falling(value: float | None) -> tuple[bool, float]:
    return (value is None, -(value or 0.0))
