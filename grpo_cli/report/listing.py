"""Many runs in a line each, for a list: state, steps, reward and held-out accuracy, when, how long.

Reads the ends of the metrics alone, so that a thousand runs are listed in about a second.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from grpo_cli.errors import UsageError, nearest
from grpo_cli.report.reward_change import RewardChange, compare_ends, count_averaged
from grpo_cli.runs.files import read_object
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.liveness import ShownState, look_at_life
from grpo_cli.runs.metrics import read_ends
from grpo_cli.runs.selection import list_folders
from grpo_cli.runs.series import read_step
from grpo_cli.runs.status import State, StatusFile

_BLOCK = 2**16
"""Bytes read at each end of the metrics: about a hundred records."""
STATES: tuple[str, ...] = (*get_args(State), "interrupted", "damaged")


@dataclass(frozen=True)
class ListedRun:
    """One run in a list; None where it is not known."""

    folder: RunFolder
    name: str
    id: str
    state: ShownState
    step: int | None = None
    total_steps: int | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    reward_within_noise: bool | None = None
    """Whether the records at both ends differ so much that it may be no change."""
    held_out: str | None = None
    """What was measured: `accuracy/NAME`, else `reward`."""
    held_out_prompts: str | None = None
    """Fingerprint of the prompts that it was measured on."""
    before: float | None = None
    after: float | None = None
    seconds: float | None = None
    started_at: float | None = None
    """Seconds since the epoch."""
    reason: str | None = None
    """Why it stopped or failed, or in what it is damaged."""

    def as_json(self) -> dict[str, Any]:
        """The run as plain values."""
        return {
            "run": str(self.folder.path),
            **{k: v for k, v in vars(self).items() if k != "folder"},
        }


SORTS: dict[str, Callable[[ListedRun], Any]] = {
    "started": lambda run: -(run.started_at or 0),
    "name": lambda run: (run.name, run.id),
    "state": lambda run: STATES.index(run.state),
    "steps": lambda run: -(run.step or 0),
    "reward": lambda run: _falling(run.reward_last),
    "accuracy": lambda run: _falling(run.after),
    "duration": lambda run: _falling(run.seconds),
}
"""What a list can be sorted by; the newest, best or longest comes first, and what is not known last."""


def list_runs(
    root: Path,
    *,
    name: str | None = None,
    states: Iterable[str] = (),
    sort: str = "started",
    limit: int | None = None,
) -> list[ListedRun]:
    """Lists the runs under a root, the newest first.

    Args:
        root: Usually `runs`.
        name: Only runs whose name or `NAME/ID` is this; `*` and `?` stand for any letters.
        states: Only runs in one of these states; all where there is none.
        sort: One of `SORTS`.
        limit: At most so many.

    Raises:
        UsageError: There is no such root, state or order.
    """
    wanted = tuple(states)
    _check(sort, SORTS, "--sort")
    for state in wanted:
        _check(state, STATES, "--state")
    if not root.is_dir():
        raise UsageError(f"there is no folder {root}. Fix: say where runs are with --runs DIR")
    found = [read_listed(folder) for folder in list_folders(root) if _is_called(folder, name)]
    kept = [run for run in found if not wanted or run.state in wanted]
    # The newest of equals first.
    kept.sort(key=SORTS["started"])
    kept.sort(key=SORTS[sort])
    return kept[:limit]


def read_listed(folder: RunFolder) -> ListedRun:
    """One run's line; what is damaged is told in it."""
    name, own = folder.path.parent.name, folder.path.name
    try:
        if not folder.resolved.is_file():
            raise UsageError("it has no resolved.json")
        status = StatusFile(folder.status).read()
    except (UsageError, OSError) as error:
        made = folder.path.stat().st_mtime
        return ListedRun(folder, name, own, "damaged", started_at=made, reason=str(error))
    life = look_at_life(folder, status)
    until = time.time() if life.state == "running" else status.updated_at
    before, after = (
        read_object(folder.evaluations / f"{when}.json") for when in ("before", "after")
    )
    metric = _choose_metric(after or before)
    change = _read_change(folder.metrics)
    return ListedRun(
        folder,
        name,
        own,
        life.state,
        status.step,
        status.total_steps,
        change.first if change else None,
        change.last if change else None,
        change.is_noise if change else None,
        metric,
        (after or before).get("held_out"),
        _read_metric(before, metric),
        _read_metric(after, metric),
        max(until - status.started_at, 0.0),
        status.started_at,
        status.reason,
    )


def _check(given: str, known: Iterable[str], flag: str) -> None:
    if given not in known:
        close = nearest(given, known)
        hint = f"{flag} {close}" if close else f"one of {', '.join(known)}"
        raise UsageError(f"{flag} {given}: there is none. Fix: {hint}")


def _is_called(folder: RunFolder, name: str | None) -> bool:
    own = folder.path.parent.name
    return name is None or any(
        fnmatchcase(each, name) for each in (own, f"{own}/{folder.path.name}")
    )


def _choose_metric(measured: dict[str, Any]) -> str | None:
    """The first accuracy, else the total."""
    accuracy = measured.get("accuracy")
    names = [f"accuracy/{name}" for name in accuracy] if isinstance(accuracy, dict) else []
    return next(iter(names), "reward" if measured else None)


def _read_metric(measured: dict[str, Any], metric: str | None) -> float | None:
    kind, _, name = (metric or "").partition("/")
    value = measured.get(kind)
    if name:
        value = value.get(name) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _read_change(metrics: Path) -> RewardChange | None:
    """The reward at the beginning and at the end, as in the summary."""
    ends = read_ends(metrics, _BLOCK)
    width = count_averaged(ends.count("train"))
    first, last = (
        list(islice(_list_rewards(part), width)) for part in (ends.from_first(), ends.from_last())
    )
    return compare_ends(first, last)


def _list_rewards(records: Iterable[dict[str, Any]]) -> Iterator[float]:
    for record in records:
        step = read_step(record)
        if step is not None and step.reward is not None:
            yield step.reward


def _falling(value: float | None) -> tuple[bool, float]:
    return (value is None, -(value or 0.0))
