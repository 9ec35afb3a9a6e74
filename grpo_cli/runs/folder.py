"""The run folder: the names of its files, making one, its recipe and status, and whether its run is alive."""

import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from grpo_cli.errors import RunError, UsageError
from grpo_cli.runs.files import (
    SCHEMA_VERSION,
    damaged,
    lock_folder,
    read_file,
    write_json,
    write_text,
)
from grpo_cli.runs.records import Manifest, Plan, Resolved, Resumption

if TYPE_CHECKING:
    from grpo_cli.recipe.recipe import Recipe

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_MACHINE_0_CHECKPOINTS = Path("..", "..", "checkpoints")
"""Where the checkpoints of another machine's folder point."""
State = Literal["pending", "running", "completed", "stopped", "failed"]
ShownState = State | Literal["interrupted", "damaged"]
"""`interrupted`: marked as running, but no process exists. `damaged`: the status cannot be read."""
FINAL: frozenset[State] = frozenset({"completed", "stopped", "failed"})
_MAX_LOOK_S = 5.0
"""A longer gap between two looks means that this process was suspended."""
_STALL_S = 3600.0
"""Silence after which a run on another machine counts as ended, if its plan has no `stall_timeout_s`."""


@dataclass(unsafe_hash=True)
class RunFolder:
    """The paths inside `runs/<name>/<timestamp>/`, or a name of the user's own instead of the time."""

    path: Path

    def __post_init__(self) -> None:
        """Take `..` out of the path, which messages show, and name what is inside."""
        self.path = path = Path(os.path.normpath(self.path))
        self.recipe = path / "recipe.yaml"
        """The recipe as written, but with absolute paths and with what it extends."""
        self.resolved = path / "resolved.json"
        """The recipe after `extends`, overrides and defaults; the worker's only input."""
        self.manifest = path / "manifest.json"
        """Versions, git, hardware, data fingerprint, seed."""
        self.status = path / "status.json"
        self.metrics = path / "metrics.jsonl"
        """One JSON record a line, append-only."""
        self.completions = path / "completions"
        """Sampled groups with their scores, one file a process."""
        self.thumbnails = path / "thumbnails"
        """Small copies of the images in prompts, one file a process; absent if there are none."""
        self.launch = path / "launch"
        """What was launched, and the process ids of the workers."""
        self.plan = path / "launch/plan.json"
        """The command, the processes and the environment of the newest attempt."""
        self.accelerate = path / "launch/accelerate.yaml"
        """accelerate's config, if several processes are launched."""
        self.probing = path / "launch/probing"
        """Exists while the quick probe runs; workers wait before their first step."""
        self.sent_weights = path / "launch/weights"
        """What vLLM reads from a disk while a training goes on."""
        self.stop_request = path / "launch/stop"
        """Its existence asks the workers to finish their step, save and stop."""
        self.resumption = path / "launch/resume.json"
        """The checkpoint that the newest attempt resumed from; absent if there was none."""
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        """The final weights or adapter."""
        self.warmup = path / "warmup"
        """What the warm-up learned from (`examples.jsonl`), and what came of it (`model/`)."""
        self.evaluations = path / "eval"
        """Measurements before training, after the warm-up if there is one, and after training."""
        self.report = path / "report.html"
        self.trackers = path / "trackers.json"
        """The runs in the trackers; absent if there are none."""

    @property
    def log(self) -> Path:
        """Output of the workers in the newest attempt."""
        return self.attempt(self.attempts) / "worker.log"

    @property
    def server_log(self) -> Path:
        """Output of the vLLM server in the newest attempt."""
        return self.attempt(self.attempts) / "server.log"

    def attempt(self, number: int) -> Path:
        """Return the logs of one attempt, from 1."""
        return self.path / "logs" / f"attempt_{number}"

    @property
    def attempts(self) -> int:
        """How often the run was started."""
        return max(_by_number((self.path / "logs").glob("attempt_*")), default=0)

    def machine(self, rank: int) -> "RunFolder":
        """Return one machine's part of a run on several: everything but the checkpoints is its own."""
        return RunFolder(self.path / "machines" / str(rank)) if rank else self

    @property
    def shares_checkpoints(self) -> bool:
        """True if this is another machine's part, whose checkpoints only machine 0 may change."""
        # Users link `checkpoints` to a larger disk too; only this exact link counts.
        link = self.checkpoints
        return link.is_symlink() and link.readlink() == _MACHINE_0_CHECKPOINTS

    @property
    def main(self) -> "RunFolder":
        """Machine 0's part; this folder itself unless it is another machine's."""
        return RunFolder(self.path.parent.parent) if self.shares_checkpoints else self

    def worker_pid(self, rank: int) -> Path:
        """Return the file that holds one worker's process id, as text."""
        return self.launch / f"rank_{rank}.pid"

    def worker_pids(self) -> dict[int, Path]:
        """Return the process id files written so far, by rank."""
        return _by_number(self.launch.glob("rank_*.pid"))

    def failure(self, rank: int) -> Path:
        """Return the file in which a worker of the newest attempt records why it failed."""
        return self.attempt(self.attempts) / f"failure_{rank}.json"

    def failures(self) -> dict[int, Path]:
        """Return the failures recorded in the newest attempt, by rank."""
        return _by_number(self.attempt(self.attempts).glob("failure_*.json"))

    def lock(self) -> AbstractContextManager[None]:
        """Keep other commands from training into this folder."""
        return lock_folder(self.launch, "training")

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write the launch plan, and accelerate's part of it as its config file."""
        self.launch.mkdir(exist_ok=True)
        write_json(self.plan, dict(plan))
        if plan["accelerate"] is not None:
            # JSON would do, but people read this file.
            write_text(self.accelerate, yaml.safe_dump(plan["accelerate"], sort_keys=False))

    def read_plan(self) -> dict[str, Any]:
        """Return the launch plan; empty if it is missing."""
        return read_file(self.plan, Plan) or {}

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write the provenance of the run."""
        write_json(self.manifest, dict(manifest))

    def read_manifest(self) -> dict[str, Any]:
        """Return the provenance of the run; what is missing is empty."""
        return read_file(self.manifest, Manifest, missing={}) or {}

    def read_attempts(self) -> list[dict[str, Any]]:
        """Return the command, versions and machine of each attempt; those of the first are the run's."""
        later = (self.attempt(number) for number in range(2, self.attempts + 1))
        read = (read_file(attempt / self.manifest.name, Manifest) for attempt in later)
        return [self.read_manifest(), *filter(None, read)]

    def asks_in_text(self) -> bool:
        """Return whether the prompts of the run were plain text, even if there is a chat template."""
        data = self.read_manifest()["data"]
        return bool(data.get("plain_text", self.read_recipe().dataset.is_text))

    def read_resumption(self) -> dict[str, Any]:
        """Return what the newest attempt resumed from; empty if it started from the beginning."""
        return read_file(self.resumption, Resumption) or {}

    def write_recipe(self, recipe: "Recipe") -> None:
        """Write the resolved recipe."""
        resolved = {"schema_version": SCHEMA_VERSION, "recipe": recipe.model_dump(mode="json")}
        write_json(self.resolved, resolved)

    def read_recipe(self) -> "Recipe":
        """Return the resolved recipe; raises `UsageError` if there is none that can be read."""
        # Listing runs needs no recipe, and should not import the schema.
        from grpo_cli.recipe.recipe import read_resolved

        fix = "use the grpo that wrote it, or train again with recipe.yaml"
        resolved = read_file(self.resolved, Resolved, fix=fix)
        if resolved is None:
            raise UsageError(
                f"{self.path} is not a run folder: it has no resolved.json",
                "name a folder under runs/<name>/",
            )
        version, recipe = resolved["schema_version"], resolved["recipe"]
        if version > SCHEMA_VERSION:
            raise UsageError(
                f"{self.path} is of version {version}, and this grpo knows up to {SCHEMA_VERSION}",
                "use the grpo that wrote it, or a newer one",
            )
        try:
            return read_resolved(recipe)
        except ValueError as error:
            raise damaged(self.resolved, error, fix) from None


def _by_number(paths: Iterable[Path]) -> dict[int, Path]:
    numbered = [(path.stem.rpartition("_")[2], path) for path in paths]
    return {int(number): path for number, path in numbered if number.isdecimal()}


def create_run(root: Path, recipe: "Recipe", recipe_text: str) -> RunFolder:
    """Make a new run folder with the resolved recipe and its YAML, which reads the same in any folder."""
    folder = RunFolder(claim_folder(root / recipe.name))
    with removed_on_failure(folder):
        _fill(folder, recipe, recipe_text)
    return folder


def locate_run(root: Path, recipe: "Recipe", run_id: str) -> RunFolder:
    """Return this machine's part of the run `--run-id` names, which need not exist, or raise `UsageError`."""
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"{run_id!r} cannot name a run",
            "give --run-id letters, digits, `-`, `_` and `.`, a letter or digit first",
        )
    run = RunFolder((root / recipe.name / run_id).absolute())
    return run.machine(recipe.launch.machine_rank)


def create_named_run(folder: RunFolder, recipe: "Recipe", recipe_text: str) -> None:
    """Make the folder that `locate_run` returned, or complete one that was never finished.

    Other machines may be making their parts in it at the same time.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        if recipe.launch.machine_rank and not folder.shares_checkpoints:
            folder.checkpoints.symlink_to(_MACHINE_0_CHECKPOINTS)
        # Machine 0 may be slower, and the link must lead somewhere.
        folder.main.checkpoints.mkdir(exist_ok=True)
        _fill(folder, recipe, recipe_text)
    except OSError as error:
        raise unwritable(folder.path, error) from None


def _fill(folder: RunFolder, recipe: "Recipe", recipe_text: str) -> None:
    for child in (folder.completions, folder.launch, folder.attempt(1)):
        child.mkdir(parents=True, exist_ok=True)
    if not folder.shares_checkpoints:
        folder.checkpoints.mkdir(exist_ok=True)
    write_text(folder.recipe, recipe_text)
    # Last: a folder with a resolved recipe is a run.
    folder.write_recipe(recipe)


@contextmanager
def removed_on_failure(folder: RunFolder) -> Iterator[None]:
    """Remove a half-made run folder if the disk is full, for example; raises `UsageError` instead of `OSError`."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise unwritable(folder.path.parent, error) from None


def claim_folder(parent: Path, flag: str = "--runs DIR") -> Path:
    """Make and return a new folder named after the time; `flag` names another place, for the message."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            path = (parent / (stamp if number == 1 else f"{stamp}-{number}")).absolute()
            try:
                path.mkdir()
            except FileExistsError:
                continue
            break
    except OSError as error:
        raise unwritable(parent, error, flag) from None
    return path


def unwritable(path: Path, error: OSError, flag: str = "--runs DIR") -> UsageError:
    """Return the error for a folder that cannot be written; `flag` names another place."""
    return UsageError(
        f"{path} cannot be written ({error.strerror})", f"give another place with {flag}"
    )


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
    fix: str = ""
    """What mends the reason; empty if nothing in particular does. Earlier versions wrote it into the reason."""
    stopped_by: str | None = None
    """The rule of `training.stop_when` that stopped it, if one did."""
    traceback: str | None = None
    """Lines to read with the reason: a traceback, or the end of a log."""
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
    def error(self) -> RunError:
        """Why the run ended, and the fix."""
        return RunError(self.reason or "no reason was recorded", self.fix)

    @property
    def reason_line(self) -> str:
        """The first line of the reason, and the fix in the same line."""
        lines = map(str.split, (self.reason or "").splitlines())
        first = next((" ".join(words) for words in lines if words), "")
        return " ".join(RunError(first, self.fix).headline.split())

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
