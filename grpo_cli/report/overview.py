"""One run at a glance: what it was made of, how it went, what lies on the disk, and what can be done next."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.batch import plan_batch
from grpo_cli.errors import UsageError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.report.listing import ListedRun, read_listed
from grpo_cli.report.summary import RunSummary, read_summary
from grpo_cli.runs.checkpoints import whole_checkpoints
from grpo_cli.runs.files import measure_bytes
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.liveness import Life, look_at_life
from grpo_cli.runs.trained import find_trained

_PARTS = ("checkpoints", "model", "completions", "eval", "logs", "tensorboard")
"""Folders whose sizes are told; the rest is told as one."""
REST = "the rest"
"""What the other files are called together."""


@dataclass(frozen=True)
class RunOverview:
    """What is told of one run."""

    summary: RunSummary
    listed: ListedRun
    life: Life
    recipe: Recipe
    manifest: dict[str, Any]
    checkpoints: dict[int, Path]
    """The whole ones, by step."""
    best: int | None
    """Step of the best checkpoint, where the run evaluated while it trained."""
    sizes: dict[str, int]
    """Part of the folder → bytes."""

    @property
    def folder(self) -> RunFolder:
        """The run's."""
        return self.summary.folder

    def as_json(self) -> dict[str, Any]:
        """The overview as plain values."""
        recipe = self.recipe
        return {
            **self.summary.as_json(),
            "state": self.life.state,
            "name": self.listed.name,
            "id": self.listed.id,
            "silent_s": round(self.life.silent_s, 1),
            "recipe": recipe.model_dump(mode="json"),
            "versions": self.manifest.get("versions"),
            "git": self.manifest.get("git"),
            "hardware": self.manifest.get("hardware"),
            "accelerator": self.manifest.get("accelerator"),
            "data": self.manifest.get("data"),
            "attempts": self.folder.attempts,
            "checkpoints": {str(step): str(path) for step, path in self.checkpoints.items()},
            "best_checkpoint": self.best,
            "bytes": self.sizes,
        }


def read_overview(folder: RunFolder) -> RunOverview:
    """Reads what is told of a run.

    Raises:
        UsageError: This is no run, or its recipe or status is damaged.
    """
    recipe = folder.read_recipe()
    summary = read_summary(folder)
    checkpoints = whole_checkpoints(folder)
    return RunOverview(
        summary,
        read_listed(folder),
        look_at_life(folder, summary.status),
        recipe,
        folder.read_manifest(),
        checkpoints,
        _find_best(folder, checkpoints),
        measure_parts(folder.path),
    )


def count_completions(recipe: Recipe, processes: int) -> int | None:
    """Completions that one optimizer step learns from; None where the numbers do not fit."""
    from grpo_cli.checks.arithmetic import batch_inputs

    plan = plan_batch(batch_inputs(recipe, processes, None))
    return None if plan.problems else plan.completions_per_optimizer_step


def measure_parts(folder: Path) -> dict[str, int]:
    """Bytes of each part of a folder; links are counted as links."""
    sizes = {name: measure_bytes(folder / name) for name in _PARTS if (folder / name).exists()}
    return {**sizes, REST: max(measure_bytes(folder) - sum(sizes.values()), 0)}


def _find_best(folder: RunFolder, checkpoints: dict[int, Path]) -> int | None:
    try:
        [(_, best)] = find_trained(folder, "best")
    except (UsageError, OSError):
        return None
    return next((step for step, path in checkpoints.items() if path == best), None)
