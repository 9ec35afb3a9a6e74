"""Going on with a run: which one, from which checkpoint, and whether it would be the same training.

Owns which settings may change in between. Starts nothing.
"""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.checks.settings import read_setting
from grpo_cli.errors import UsageError
from grpo_cli.launch.plan import LaunchPlan
from grpo_cli.recipe.comparison import Difference, list_differences
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.checkpoints import check_resumable, whole_checkpoints
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import RunFolder, unwritable
from grpo_cli.runs.liveness import live_workers
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.rewinding import rewind, start_over
from grpo_cli.runs.status import StatusFile

LENGTHS = ("training.max_steps", "training.num_train_epochs")
"""Settings of how long a training is."""
_FREE = (
    "name",
    "description",
    "logging.",
    "evaluation.",
    "expect",
    "launch.machine_rank",
    "launch.main_process_",
    "launch.num_processes",
    "launch.slurm",
    "launch.stall_timeout_s",
    "training.max_steps",
    "training.num_train_epochs",
    "training.early_stopping",
    "training.fast.max_tokens_per_micro_batch",
    "training.stop_when",
    "training.save_",
    "training.eval_",
)
"""Settings that change nothing of what was trained so far, nor in distribution what is trained from there. The
processes are compared as planned."""


@dataclass(frozen=True)
class ResumePlan:
    """A run that can go on."""

    folder: RunFolder
    checkpoint: Path
    step: int
    """Optimizer steps done."""
    changed: tuple[Difference, ...]
    """Settings that are others now."""
    forced: bool
    """Whether it may be another training."""


def read_target(path: Path) -> tuple[RunFolder, int | None]:
    """The run that a path names, and the step where it names a checkpoint.

    Raises:
        UsageError: It names neither.
    """
    path = path.absolute()
    if (path / "resolved.json").is_file():
        return RunFolder(path), None
    run = RunFolder(path.parent.parent)
    for step, checkpoint in whole_checkpoints(run).items():
        if checkpoint == path:
            return run, step
    raise UsageError(
        f"{path} is neither a run folder nor a whole checkpoint in one. "
        "Fix: name a folder under runs/<name>/, or one of its checkpoints/"
    )


def plan_resumption(
    run: RunFolder, step: int | None, recipe: Recipe, plan: LaunchPlan, *, force: bool
) -> ResumePlan | None:
    """Works out from where a run goes on.

    Args:
        run: The run.
        step: A checkpoint's; None takes the newest whole one.
        recipe: What it goes on with.
        plan: How it would be launched.
        force: Whether the recipe may change what is trained, and random states may be missing.

    Returns:
        None where the run has no checkpoint yet.

    Raises:
        UsageError: It is another training now, or the checkpoint is not enough for it.
    """
    known = whole_checkpoints(run)
    if step is not None and step not in known:
        there = ", ".join(map(str, known)) or "none"
        raise UsageError(f"{run.path} has no checkpoint {step} (there: {there}). Fix: name another")
    if not known:
        return None
    step = max(known) if step is None else step
    changed = [*list_differences(run.read_recipe(), recipe), *_compare_plans(run, plan)]
    refused = [each for each in changed if not each.path.startswith(_FREE)]
    if refused and not force:
        told = "\n".join(f"  {each}" for each in refused)
        raise UsageError(
            f"with this recipe {run.path} would not go on as it began:\n{told}\n"
            "Fix: undo these changes, start a run of its own without --resume, or --force to go on "
            "with them"
        )
    if not force:
        changes_reference = read_setting(recipe, "sync_ref_model")
        check_resumable(
            known[step],
            _local_ranks(plan),
            needs_reference=changes_reference
            and step >= read_setting(recipe, "ref_model_sync_steps"),
        )
    return ResumePlan(run, known[step], step, tuple(changed), force)


def begin_attempt(
    resume_plan: ResumePlan, recipe: Recipe, plan: LaunchPlan, origin: Mapping[str, Any]
) -> None:
    """Takes the run folder back to the checkpoint and makes it ready for another attempt.

    Args:
        resume_plan: Where it goes on.
        recipe: With what.
        plan: How it is launched.
        origin: What this attempt's manifest says.

    Raises:
        UsageError: The last attempt's workers still work, or the folder cannot be written.
    """
    run = resume_plan.folder
    _refuse_company(run)
    status = StatusFile(run.status).read()
    try:
        rewind(run, resume_plan.step)
        _open_attempt(run, recipe, plan, origin)
        told = {
            "checkpoint": resume_plan.checkpoint.name,
            "step": resume_plan.step,
            "forced": resume_plan.forced,
        }
        write_json(run.resumption, told)
        record = {"event": "resume", "step": resume_plan.step, "attempt": run.attempts}
        append_record(run.metrics, record)
        StatusFile(run.status).update(
            state="pending",
            phase="starting",
            step=resume_plan.step,
            reason=None,
            stopped_by=None,
            traceback=None,
            # The time it did not work is none of its own.
            started_at=time.time() - status.seconds,
        )
    except OSError as error:
        raise unwritable(run.path, error) from None


def begin_anew(run: RunFolder, recipe: Recipe, plan: LaunchPlan, origin: Mapping[str, Any]) -> None:
    """Makes a run that has saved nothing ready to start over in the same folder.

    Args:
        run: It has no checkpoint.
        recipe: What it starts with.
        plan: How it is launched.
        origin: What this attempt's manifest says.

    Raises:
        UsageError: The last attempt's workers still work, or the folder cannot be written.
    """
    _refuse_company(run)
    try:
        start_over(run)
        _open_attempt(run, recipe, plan, origin)
        run.status.unlink(missing_ok=True)
        StatusFile(run.status).update(state="pending")
    except OSError as error:
        raise unwritable(run.path, error) from None


def _refuse_company(run: RunFolder) -> None:
    if alive := live_workers(run):
        raise UsageError(
            f"workers of the last attempt still finish their step in {run.path} (processes "
            f"{', '.join(map(str, alive))}). Fix: wait for them, or end them"
        )


def _open_attempt(
    run: RunFolder, recipe: Recipe, plan: LaunchPlan, origin: Mapping[str, Any]
) -> None:
    """Keeps the last attempt's recipe with its logs, and writes what this one works with."""
    before = run.attempt(run.attempts)
    shutil.copyfile(run.resolved, before / run.resolved.name)
    attempt = run.attempt(run.attempts + 1)
    attempt.mkdir(parents=True)
    run.completions.mkdir(exist_ok=True)
    write_json(attempt / run.manifest.name, dict(origin))
    run.write_recipe(recipe)
    run.write_plan(plan.as_json())


def is_finished(run: RunFolder, recipe: Recipe) -> bool:
    """Whether a run is completed, by machine 0's word, and the recipe is the same and asks for nothing more."""
    changed = {each.path for each in list_differences(run.read_recipe(), recipe)}
    others = changed & set(LENGTHS) or [each for each in changed if not each.startswith(_FREE)]
    return StatusFile(run.main.status).read().state == "completed" and not others


def _compare_plans(run: RunFolder, plan: LaunchPlan) -> list[Difference]:
    """The processes that work together: their number decides which rows meet in a batch."""
    before = run.read_plan().get("num_processes", plan.num_processes)
    if before == plan.num_processes:
        return []
    return [Difference("processes", before, plan.num_processes)]


def _local_ranks(plan: LaunchPlan) -> range | None:
    if plan.num_processes == 1:
        return None
    local = plan.num_processes // plan.num_machines
    return range(plan.machine_rank * local, (plan.machine_rank + 1) * local)
