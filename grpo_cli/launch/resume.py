"""Resume a run: which one, from which checkpoint, and whether it would be the same training. Starts nothing."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.errors import UsageError
from grpo_cli.launch.plan import LaunchPlan
from grpo_cli.recipe.comparison import Difference, hash_code, list_differences
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.checkpoints import check_resumable, rewind, whole_checkpoints
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import RunFolder, StatusFile, live_workers, unwritable
from grpo_cli.runs.metrics import append_record

LENGTHS = ("training.max_steps", "training.num_train_epochs")
"""Settings of how long a training is."""
_FREE = (
    *LENGTHS,
    "name",
    "description",
    "logging.",
    "evaluation.",
    "expect",
    "generation.vllm.base_url",
    "generation.vllm.group_port",
    "generation.vllm.max_restarts",
    *(f"generation.vllm.server_{name}" for name in ("base_url", "host", "port", "timeout")),
    "launch.machine_rank",
    "launch.main_process_",
    "launch.num_processes",
    "launch.slurm",
    "launch.stall_timeout_s",
    "teacher.base_url",
    "training.early_stopping",
    "training.fast.max_tokens_per_micro_batch",
    "training.stop_when",
    "training.save_",
    "training.eval_",
)
"""Settings that change neither what was trained so far nor the distribution of what follows. The processes are
compared as planned."""


@dataclass(frozen=True)
class ResumePlan:
    """A run that can be resumed."""

    folder: RunFolder
    checkpoint: Path
    step: int
    """Optimizer steps done."""
    changed: tuple[Difference, ...]
    forced: bool
    """Whether it may be another training."""
    trusted: bool = False
    """Whether the checkpoint may hold more than tensors and plain values."""


def read_target(path: Path) -> tuple[RunFolder, int | None]:
    """Return the run that a path names, and the step of a checkpoint; raises `UsageError` if it names neither."""
    path = path.absolute()
    if (path / "resolved.json").is_file():
        return RunFolder(path), None
    run = RunFolder(path.parent.parent)
    for step, checkpoint in whole_checkpoints(run).items():
        if checkpoint == path:
            return run, step
    raise UsageError(
        f"{path} is neither a run folder nor a complete checkpoint in one",
        "name a folder under runs/<name>/, or one of its checkpoints/",
    )


def plan_resumption(
    run: RunFolder, step: int | None, recipe: Recipe, plan: LaunchPlan, *, force: bool
) -> ResumePlan | None:
    """Work out from where a run resumes; None if it has no checkpoint yet.

    Args:
        step: A checkpoint's; None takes the newest complete one.
        force: Whether the recipe may change what is trained, and random states may be missing.

    Raises:
        UsageError: It is another training now, or the checkpoint is not enough for it.
    """
    known = whole_checkpoints(run)
    if step is not None and step not in known:
        steps = ", ".join(map(str, known)) or "none"
        raise UsageError(
            f"{run.path} has no checkpoint {step} (checkpoints: {steps})", "name another"
        )
    if not known:
        return None
    step = max(known) if step is None else step
    if 0 < (planned := int(recipe.setting("max_steps") or 0)) < step:
        raise UsageError(
            f"the run has done {step} steps, more than `training.max_steps: {planned}`",
            "set `max_steps: "
            f"{step}` to end it there, a higher one to train on, or name an earlier checkpoint with --resume-from",
        )
    changed = list_changes(run, recipe, plan, force=force)
    if not force:
        syncs = recipe.setting("sync_ref_model")
        needs_reference = syncs and step >= recipe.setting("ref_model_sync_steps")
        check_resumable(known[step], _local_ranks(plan), needs_reference=needs_reference)
    return ResumePlan(run, known[step], step, tuple(changed), force)


def list_changes(
    run: RunFolder, recipe: Recipe, plan: LaunchPlan, *, force: bool
) -> list[Difference]:
    """Return what has changed since a run began; raises `UsageError` if that makes it another training."""
    changed = list_differences(run.read_recipe(), recipe)
    # Their number decides which rows meet in a batch.
    processes = run.read_plan().get("num_processes", plan.num_processes)
    if processes != plan.num_processes:
        changed.append(Difference("processes", processes, plan.num_processes))
    before, now = run.read_manifest()["code"], hash_code(recipe)
    changed += [
        Difference(f"the code in {file}", before[file], now[file])
        for file in sorted(before.keys() & now.keys())
        if before[file] != now[file]
    ]
    refused = [f"  {each}" for each in changed if not each.path.startswith(_FREE)]
    if refused and not force:
        raise UsageError(
            f"with this recipe {run.path} would not go on as it began",
            "undo these changes, start a new run without --resume, or continue with them by --force",
            details=refused,
        )
    return changed


def _local_ranks(plan: LaunchPlan) -> range | None:
    if plan.num_processes == 1:
        return None
    local = plan.num_processes // plan.num_machines
    return range(plan.machine_rank * local, (plan.machine_rank + 1) * local)


def is_finished(run: RunFolder, recipe: Recipe) -> bool:
    """Return whether machine 0 has completed the run, and the recipe is the same and asks for nothing more."""
    changed = {each.path for each in list_differences(run.read_recipe(), recipe)}
    more = changed & set(LENGTHS) or [path for path in changed if not path.startswith(_FREE)]
    return StatusFile(run.main.status).read().state == "completed" and not more


def begin_attempt(
    run: RunFolder,
    resume_plan: ResumePlan | None,
    recipe: Recipe,
    plan: LaunchPlan,
    origin: Mapping[str, Any],
) -> None:
    """Take a run folder back to the checkpoint, or to its beginning, and prepare it for another attempt.

    Raises:
        UsageError: The last attempt's workers still run, or the folder cannot be written.
    """
    if alive := live_workers(run):
        raise UsageError(
            f"workers of the last attempt still finish their step in {run.path} (processes "
            f"{', '.join(map(str, alive))})",
            "wait for them, or end them",
        )
    trained_s = StatusFile(run.status).read().seconds
    try:
        rewind(run, resume_plan.step if resume_plan else 0)
        _open_attempt(run, recipe, plan, origin)
        if resume_plan is None:
            run.status.unlink(missing_ok=True)
            StatusFile(run.status).update(state="pending")
        else:
            _resume(run, resume_plan, trained_s)
    except OSError as error:
        raise unwritable(run.path, error) from None


def _resume(run: RunFolder, resume_plan: ResumePlan, trained_s: float) -> None:
    step, name = resume_plan.step, resume_plan.checkpoint.name
    flags = {"forced": resume_plan.forced, "trusted": resume_plan.trusted}
    write_json(run.resumption, {"checkpoint": name, "step": step, **flags})
    append_record(run.metrics, {"event": "resume", "step": step, "attempt": run.attempts})
    StatusFile(run.status).update(
        state="pending",
        phase="starting",
        step=step,
        reason=None,
        fix="",
        stopped_by=None,
        traceback=None,
        # Time between the attempts does not count.
        started_at=time.time() - trained_s,
    )


def _open_attempt(
    run: RunFolder, recipe: Recipe, plan: LaunchPlan, origin: Mapping[str, Any]
) -> None:
    """Keep the last attempt's recipe with its logs, and write what this one works with."""
    shutil.copyfile(run.resolved, run.attempt(run.attempts) / run.resolved.name)
    attempt = run.attempt(run.attempts + 1)
    attempt.mkdir(parents=True)
    run.completions.mkdir(exist_ok=True)
    write_json(attempt / run.manifest.name, dict(origin))
    run.write_manifest({**run.read_manifest(), "code": hash_code(recipe)})
    run.write_recipe(recipe)
    run.write_plan(plan.as_json())
