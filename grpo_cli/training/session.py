"""What the parts of a training share, how it is asked to stop, and checks of the processes. Imports no torch."""

import faulthandler
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import ExitCode, GrpoError, RunError, SetupError
from grpo_cli.processes import stop_with_parent
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.files import write_json, write_text
from grpo_cli.runs.folder import RunFolder, StatusFile

if TYPE_CHECKING:
    from accelerate import PartialState

    from grpo_cli.analysis.samples import ScoredCompletion
    from grpo_cli.runs.thumbnails import Thumbnails

_PROBE_POLL_S = 0.05
_BEAT_INTERVAL_S = 1.0
_ORPHAN_S = 600
"""Seconds that a worker may take for its step and a checkpoint after its supervisor has died."""


class Stopped(Exception):  # noqa: N818 - a request that was met, not an error
    """The run was asked to stop, by a person or by a rule of `training.stop_when`."""

    def __init__(self, reason: str = "", fix: str = "", rule: str | None = None) -> None:
        super().__init__(reason)
        self.fix, self.rule = fix, rule


class StopRequest:
    """A request to stop: a signal, the parent's death, or a `stop` file in the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.stop_request
        self._probing = folder.probing
        self._signalled = self._orphaned = False
        self._parent = os.getppid()

    def listen(self) -> None:
        """Take SIGINT, SIGTERM and the parent's death as a request instead of an end.

        Once the parent is gone nobody else can end a step that hangs: the next signal does, or `_ORPHAN_S`.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)
        stop_with_parent()

    def wait_for_probe(self) -> None:
        """Wait until `grpo train` has probed the recipe; raise `Stopped` if a stop is requested."""
        while self._probing.exists():
            if self.seen_here():
                raise Stopped("stopped while the recipe was probed")
            time.sleep(_PROBE_POLL_S)

    def seen_here(self) -> bool:
        """Return whether this process knows of a request."""
        return self._signalled or self._file.exists()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._parent:
            if self._orphaned:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self._orphaned = True
            signal.alarm(_ORPHAN_S)
        self._signalled = True


class Heartbeat:
    """A file that a worker touches after each piece of work, at most once a second."""

    def __init__(self, run: RunFolder, rank: int) -> None:
        self._file = run.launch / f"rank_{rank}.beat"
        self._last = 0.0

    def beat(self) -> None:
        """Record progress."""
        now = time.monotonic()
        if now - self._last >= _BEAT_INTERVAL_S:
            self._last = now
            self._file.touch()


@dataclass(frozen=True)
class Session:
    """One process of one training."""

    folder: RunFolder
    recipe: Recipe
    stop: StopRequest
    processes: "PartialState"
    cpu: bool
    heartbeat: Heartbeat

    @cached_property
    def thumbnails(self) -> "Thumbnails":
        """Keeps small copies of the images that this process samples for."""
        from grpo_cli.runs.thumbnails import Thumbnails

        return Thumbnails(self.folder.thumbnails / f"rank_{self.processes.process_index}.jsonl")

    @cached_property
    def resumption(self) -> dict[str, Any]:
        """The checkpoint that this attempt resumes from; empty if it starts from the beginning."""
        return self.folder.read_resumption()

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The provenance of the run, as it was when first asked for; `annotate_manifest` adds to the file."""
        return self.folder.read_manifest()

    def show(self, **changes: Any) -> None:
        """Change the status (main process)."""
        write_status(self.folder, self.processes.process_index, **changes)

    def report(self, phase: str, **changes: Any) -> None:
        """Write the phase to the status (main process); raise `Stopped` if a stop is requested."""
        self.show(phase=phase, **changes)
        if self.stop.seen_here():
            raise Stopped(f"stopped while {phase}; no step was cut short")

    def end_hung(self, error: RunError) -> None:
        """End this process at once, from any thread: the call that hangs cannot be interrupted."""
        try:
            write_failure(self.folder, self.processes.process_index, error)
            faulthandler.dump_traceback(all_threads=True)
        finally:
            os._exit(ExitCode.FAILED)

    def annotate_manifest(self, **entries: Any) -> None:
        """Add what only the worker knows to `manifest.json` (main process)."""
        if self.processes.is_main_process:
            self.folder.write_manifest({**self.folder.read_manifest(), **entries})

    def refuse_change(self, what: str, before: str | None, now: str | None) -> None:
        """Refuse to resume with other rows, adapter or teacher than the run began with, unless forced.

        Raises:
            RunError: The fingerprints differ.
        """
        resumption = self.resumption
        if resumption and not resumption.get("forced") and before not in (None, now):
            raise RunError(
                f"{what} is not what this run began with (fingerprint {str(now)[:12]}, it was {before[:12]})",
                "restore it, start a new run, or resume anyway with --force",
            )

    def describe_device(self) -> dict[str, Any]:
        """Return what this process trains on, for the manifest."""
        import torch

        if self.cpu:
            return {"device": "cpu", "threads": torch.get_num_threads()}
        properties = torch.cuda.get_device_properties(self.processes.device)
        return {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}

    def write_samples(
        self, name: str, scored: "Sequence[ScoredCompletion]", result: Any = None
    ) -> None:
        """Write scored completions to `eval/<name>.jsonl`, and what they come to to `eval/<name>.json`."""
        path = self.folder.evaluations / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in scored]
        write_text(path, "".join(lines))
        if result is not None:
            write_json(path.with_suffix(".json"), result)


def write_status(folder: RunFolder, rank: int, **changes: Any) -> None:
    """Change the status of the run, in process 0 alone."""
    if rank == 0:
        StatusFile(folder.status).update(**changes)


def write_failure(folder: RunFolder, rank: int, error: GrpoError, stack: str | None = None) -> None:
    """Write down why a worker fails; the status of the run shows the main process's reason."""
    lines = stack or "\n".join(error.details) or None
    why = {"reason": error.seen, "fix": error.fix, "traceback": lines}
    write_json(folder.failure(rank), {"time": time.time(), "rank": rank, **why})
    write_status(folder, rank, state="failed", **why)


def check_device(planned: str, actual: str) -> None:
    """Raise `SetupError` if torch does not work on the planned device, `cpu` or `cuda`."""
    import torch

    if planned == actual:
        return
    if actual == "cpu":
        has_kernels = torch.version.cuda or torch.version.hip
        build = "sees none" if has_kernels else "is a build for CPUs"
        raise SetupError(
            f"the run was planned for GPUs, but torch {torch.__version__} {build}",
            "install a build of torch "
            "for this machine's GPUs (`grpo doctor` checks both), or set `launch.use_cpu: true`",
        )
    raise SetupError(
        f"no GPU was found when the run was planned, but torch sees {torch.cuda.device_count()}",
        "see what `grpo doctor` says about the driver; to train on the CPU, set `launch.use_cpu: true`",
    )


def check_processes(session: Session) -> None:
    """Raise `SetupError` if accelerate silently started other processes, or machines disagree on the run."""
    from accelerate.utils import gather_object

    planned, actual = session.recipe.launch.num_processes, session.processes.num_processes
    if planned not in ("auto", actual):
        raise SetupError(
            f"{planned} processes were planned but {actual} work together",
            "start the run with `grpo train`, and check `launch` in the recipe",
        )
    if session.recipe.launch.num_machines == 1:
        return
    # By now machine 0 has written the recipe that the others look for.
    seen = session.folder.main.resolved.is_file()
    step = int(session.resumption.get("step", 0))
    reports = gather_object([(seen, step)])
    fix = "with --run-id, put --runs on a disk that all machines see; without, leave out --resume"
    if not all(seen for seen, _ in reports):
        raise SetupError("a machine does not see the run folder of machine 0", fix)
    if len({step for _, step in reports}) > 1:
        steps = ", ".join(str(step) for _, step in reports)
        raise SetupError(f"the processes would resume from different steps ({steps})", fix)


def check_strategy(session: Session, trainer: Any) -> None:
    """Raise `SetupError` if accelerate silently shards the model in another way than planned."""
    planned = str(session.folder.read_plan().get("strategy"))
    expected = {"fsdp": "FSDP", "zero": "DEEPSPEED"}.get(planned.rstrip("123"))
    actual = trainer.accelerator.distributed_type.value
    if expected is not None and actual != expected:
        raise SetupError(
            f"{planned} was planned, but accelerate set up {actual}",
            "fsdp2 needs GPUs; `launch.strategy: ddp` works everywhere",
        )
