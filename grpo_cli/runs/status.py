"""What a run is doing: `status.json`, the heartbeats of its workers, and whether it is still alive."""

import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo_cli.errors import UsageError
from grpo_cli.runs.files import SCHEMA_VERSION, read_file, write_json
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.records import Manifest

State = Literal["pending", "running", "completed", "stopped", "failed"]
ShownState = State | Literal["interrupted", "damaged"]
"""`interrupted`: marked as running, but no process exists. `damaged`: the status cannot be read."""
FINAL: frozenset[State] = frozenset({"completed", "stopped", "failed"})
_MAX_LOOK_S = 5.0
"""A longer gap between two looks means that this process was suspended."""
_STALL_S = 3600.0
"""Silence after which a run on another machine counts as ended, if its plan has no `stall_timeout_s`."""


class Status(BaseModel):
    """Where a run stands."""

    model_config = ConfigDict(strict=True, frozen=True)

    state: State = "pending"
    phase: str = "starting"
    """What is going on now, in words: loading the model, measuring before training, training, …"""
    done: int | None = None
    planned: int | None = None
    """Units of work in the phase: those done, and all; None if that is not known."""
    detail: str = ""
    """What these units are, and what else is known of the phase."""
    step: int = 0
    total_steps: int | None = None
    reason: str | None = None
    stopped_by: str | None = None
    """The rule of `training.stop_when` that stopped it, if one did."""
    traceback: str | None = None
    started_at: float = Field(default_factory=time.time)
    """Seconds since the epoch."""
    updated_at: float = Field(default_factory=time.time)
    schema_version: int = SCHEMA_VERSION

    @property
    def progress(self) -> str:
        """Optimizer steps done, of those planned if that is known, such as `12/40`."""
        return f"{self.step}/{self.total_steps}" if self.total_steps else str(self.step)

    @property
    def phase_progress(self) -> str:
        """How far the phase is, such as `12/100 prompts`; empty if that is not known."""
        share = f"{self.done}/{self.planned} " if self.planned else ""
        return f"{share}{self.detail}"

    @property
    def reason_line(self) -> str:
        """The first line of the reason; a traceback is too much for a sentence."""
        lines = map(str.split, (self.reason or "").splitlines())
        return next((" ".join(words) for words in lines if words), "")

    @property
    def seconds(self) -> float:
        """From the start to the last update; 0 if the clock was set back in between."""
        return max(self.updated_at - self.started_at, 0.0)


class StatusFile:
    """Reads and replaces `status.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Status:
        """Return the status, a fresh one if there is no file yet; raises `UsageError` if it is damaged."""
        status: Status = read_file(self.path, Status, missing={})
        return status

    def update(self, **changes: Any) -> Status:
        """Change some fields and write the file; a new phase starts without its progress."""
        status = self.read()
        if "phase" in changes:
            changes = {"detail": "", "done": None, "planned": None, **changes}
        status = status.model_copy(update={**changes, "updated_at": time.time()})
        write_json(self.path, status.model_dump())
        return status


class BeatWatch:
    """Measures how long no worker has made progress, in time during which this process was awake.

    Neither a step of the clock counts, nor time for which the machine or this process was suspended. Workers that
    have not begun to train beat not yet and are not judged: a download may take its time.
    """

    def __init__(self, run: RunFolder) -> None:
        """Forget the heartbeats of an earlier attempt."""
        self._run = run
        self._seen = self._read()
        for name in self._seen:
            (run.launch / name).unlink(missing_ok=True)
        self._still_s = 0.0
        self._looked = time.monotonic()

    def look(self) -> float:
        """Return the seconds since the last heartbeat; 0 before the first. Call it every second or so."""
        now = time.monotonic()
        beats = self._read()
        if beats != self._seen or not beats:
            self._seen, self._still_s = beats, 0.0
        else:
            self._still_s += min(now - self._looked, _MAX_LOOK_S)
        self._looked = now
        return self._still_s

    def _read(self) -> dict[str, float]:
        return {file.name: _modified_at(file) for file in self._run.launch.glob("rank_*.beat")}


@dataclass(frozen=True)
class Life:
    """What is known of a run's processes."""

    state: ShownState
    silent_s: float
    """Since the newest sign of life."""
    here: bool | None
    """Whether it was started on this machine; None if that is unknown or does not matter."""


def live_workers(folder: RunFolder) -> list[int]:
    """Return the process ids of the workers that run at this moment."""
    # The number may be another program's by now; only ours has the run folder in its command line.
    names = (str(folder.path).encode(), str(folder.path.resolve()).encode())
    pids = []
    for path in folder.worker_pids().values():
        with suppress(OSError, ValueError):
            pid = int(path.read_text(errors="replace"))
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            pids += [pid] if any(name in line for name in names) else []
    return pids


def look_at_life(run: RunFolder, status: Status) -> Life:
    """Return the state of a run as a person should read it.

    `status.json` still says `running` after the processes were killed or the machine lost power. On this machine
    their process ids decide; on another the age of the last sign of life, against the run's own stall timeout.
    """
    signs = (run.metrics, *run.launch.glob("rank_*.beat"))
    newest = max(status.updated_at, *map(_modified_at, signs))
    silent_s = max(time.time() - newest, 0.0)
    if status.state != "running":
        return Life(status.state, silent_s, None)
    if live_workers(run):
        return Life(status.state, silent_s, True)
    here = _is_of_this_machine(run)
    ended = here is True or silent_s > (run.read_plan().get("stall_timeout_s") or _STALL_S)
    return Life("interrupted" if ended else "running", silent_s, here)


def was_started(run: RunFolder, status: Status) -> bool:
    """Return whether anything was ever launched in the folder; a dry run leaves one too."""
    return status.state != "pending" or run.log.is_file()


def _modified_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _is_of_this_machine(run: RunFolder) -> bool | None:
    """Compare with the manifest of the newest attempt; None if it names no host, or /proc is missing."""
    if not Path("/proc/self/cmdline").exists():
        return None
    for manifest in (run.attempt(run.attempts) / run.manifest.name, run.manifest):
        with suppress(KeyError, UsageError):
            return bool(
                read_file(manifest, Manifest, missing={})["hardware"]["host"] == platform.node()
            )
    return None
