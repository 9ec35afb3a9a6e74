"""Whether a run is still at work, from its folder and this machine's processes.

Owns what counts as a sign of life. A `status.json` that says `running` may be the last word of a process
that was killed, or of a machine that lost its power.
"""

import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_cli.runs.files import read_object
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.status import State, Status

ShownState = State | Literal["interrupted", "damaged"]
"""`interrupted`: it says that it runs, and nothing of it is left. `damaged`: its status cannot be read."""
_STALL_S = 3600.0
"""Silence after which a run elsewhere counts as ended, where its plan does not say (`stall_timeout_s`)."""


@dataclass(frozen=True)
class Life:
    """What is known of a run's processes."""

    state: ShownState
    silent_s: float
    """Since the newest sign of life."""
    here: bool | None
    """Whether it was started on this machine; None where that is not known, or plays no part."""


def live_workers(folder: RunFolder) -> list[int]:
    """The processes that work in a run folder at this moment, of those that have written theirs down."""
    # A worker's number may be another program's by now; only ours names the run folder.
    names = {str(folder.path).encode(), str(folder.path.resolve()).encode()}
    written = [_read_pid(path) for path in folder.worker_pids().values()]
    return [int(pid) for pid in written if pid.isdecimal() and _works_in(names, pid)]


def look_at_life(run: RunFolder, status: Status) -> Life:
    """The state of a run as a person should read it.

    A process number says nothing on another machine; there the age of the signs decides, and `running`
    stands for as long as its own supervisor would wait.

    Args:
        run: The run.
        status: What its `status.json` says.
    """
    silent_s = max(time.time() - _newest_sign(run, status), 0.0)
    if status.state != "running":
        return Life(status.state, silent_s, None)
    if live_workers(run):
        return Life(status.state, silent_s, True)
    here = _is_of_this_machine(run)
    told = run.read_plan().get("stall_timeout_s")
    longest = told if isinstance(told, int | float) and told > 0 else _STALL_S
    gone = here is True or silent_s > longest
    return Life("interrupted" if gone else "running", silent_s, here)


def was_started(run: RunFolder, status: Status) -> bool:
    """Whether anything was ever launched in the folder; a dry run leaves one too."""
    return status.state != "pending" or run.log.is_file()


def _read_pid(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _works_in(names: set[bytes], pid: str) -> bool:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in line for name in names)


def _newest_sign(run: RunFolder, status: Status) -> float:
    times = [status.updated_at]
    for file in (run.metrics, *run.launch.glob("rank_*.beat")):
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)


def _is_of_this_machine(run: RunFolder) -> bool | None:
    """By the manifest of the newest attempt; None where it names no machine, or processes cannot be seen."""
    if not Path("/proc/self/cmdline").exists():
        return None
    for manifest in (run.attempt(run.attempts) / run.manifest.name, run.manifest):
        with suppress(KeyError, TypeError):
            return bool(read_object(manifest)["hardware"]["host"] == platform.node())
    return None
