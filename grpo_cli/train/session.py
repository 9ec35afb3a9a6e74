"""What every part of a training shares: the run, the recipe, who we are, and how to be heard."""

from dataclasses import dataclass
from typing import Any

from accelerate import PartialState

from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.heartbeat import Heartbeat
from grpo_cli.runs.status import StatusFile
from grpo_cli.train.stopping import Stopped, StopRequest


@dataclass(frozen=True)
class Session:
    """One process of one training."""

    folder: RunFolder
    recipe: Recipe
    stop: StopRequest
    processes: PartialState
    cpu: bool
    heartbeat: Heartbeat

    def report(self, phase: str, **changes: Any) -> None:
        """Says what is going on now (main process), and heeds a request to stop.

        Raises:
            Stopped: Somebody asked.
        """
        if self.processes.is_main_process:
            StatusFile(self.folder.status).update(phase=phase, **changes)
        if self.stop.seen_here():
            raise Stopped(f"stopped while {phase}; no step was cut short")

    def finish(self, step: int, reason: str | None) -> None:
        """Marks the run as completed (main process); `reason` says why before its last step."""
        if self.processes.is_main_process:
            StatusFile(self.folder.status).update(
                state="completed", phase="done", step=step, reason=reason
            )

    def annotate_manifest(self, **entries: Any) -> None:
        """Adds what only the worker sees to `manifest.json` (main process)."""
        if not self.processes.is_main_process:
            return
        write_json(self.folder.manifest, {**self.folder.read_manifest(), **entries})
