"""A sweep as one Slurm job array: submit its runs, each a task, and read what they have come to."""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.checks.recipe import CheckedRecipe
from grpo_cli.errors import UsageError
from grpo_cli.launch.slurm import (
    ArrayTask,
    JobArray,
    JobRequest,
    check_for_nodes,
    plan_job,
    read_queue,
    submit,
)
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.reporter import Reporter
from grpo_cli.runs.files import lock_folder
from grpo_cli.runs.folder import FINAL, RunFolder, Status, look_at_life
from grpo_cli.runs.selection import read_status
from grpo_cli.sweep.plan import (
    SWEEPS,
    CellRun,
    Sweep,
    SweepRequest,
    as_flags,
    check_points,
    check_unchanged,
    check_vllm_server,
    create_sweep,
    plan_sweep,
)
from grpo_cli.sweep.run import SweepResult, finish_sweep, list_unfinished

_UNNAMED = "TIME"
"""Stands for the folder's name in the script of a dry run."""


@dataclass(frozen=True)
class SubmittedSweep:
    """A sweep whose runs are tasks of a job array; `sweep.job` is None for a dry run."""

    sweep: Sweep
    script: str
    tasks: int

    @property
    def log(self) -> Path:
        """The output of the tasks; `*` stands for their numbers."""
        return self.sweep.logs / f"slurm-{self.sweep.job}_*.log"

    def as_json(self) -> dict[str, Any]:
        """Return the job as plain values."""
        return {
            "job": self.sweep.job,
            "sweep": str(self.sweep.folder),
            "tasks": self.tasks,
            "log": str(self.log),
            "script": self.script,
        }


def submit_sweep(
    request: SweepRequest,
    root: Path,
    parallel: int | None,
    reporter: Reporter,
    old: Sweep | None = None,
    *,
    dry_run: bool,
) -> SubmittedSweep:
    """Check every cell as its nodes will see it, and submit the runs as one job array, or only write its script.

    `parallel` are the tasks at a time; None is as many as Slurm allows. Of an `old` sweep, the unfinished runs are
    submitted.
    """
    first, settings = _check_cells(request, parallel, environment=not dry_run)
    recipe = first.recipe
    reporter.issues(first.problems)
    if old is not None:
        check_unchanged(old, recipe)
        # A dry run writes nothing.
        with contextlib.nullcontext() if dry_run else lock_folder(old.folder, "running the sweep"):
            return _submit(old, recipe, settings, parallel, _choose_runs(old), dry_run=dry_run)
    if dry_run:
        reporter.say(f"{_UNNAMED} stands for the time at which the sweep is submitted", "note")
        sweep = plan_sweep(root.absolute() / recipe.name / SWEEPS / _UNNAMED, request, recipe)
        return _submit(sweep, recipe, settings, parallel, list_unfinished(sweep), dry_run=True)
    sweep = create_sweep(root, request, recipe)
    try:
        return _submit(sweep, recipe, settings, parallel, list_unfinished(sweep), dry_run=False)
    except BaseException:
        shutil.rmtree(sweep.folder, ignore_errors=True)
        raise


def read_job(sweep: Sweep, reporter: Reporter) -> SweepResult:
    """Compare the cells by the runs that are finished so far, and say how the others stand."""
    _refresh(sweep)
    result, unfinished = finish_sweep(sweep, reporter), list_unfinished(sweep)
    if unfinished and not result.is_under_way:
        again = f"grpo sweep --resume {sweep.folder} --slurm"
        reporter.say(f"{len(unfinished)} runs are not finished. To submit them again: {again}")
    return result


def _check_cells(
    request: SweepRequest, parallel: int | None, *, environment: bool
) -> tuple[CheckedRecipe, list[list[str]]]:
    """Check each cell; return the first, and the settings of each that follow from its nodes."""
    recipes: list[Recipe] = []
    settings: list[list[str]] = []

    def check(path: Path, flags: list[str]) -> CheckedRecipe:
        checked, more = check_for_nodes(path, flags, environment=environment)
        settings.append(more)
        if not checked.errors:
            recipes.append(checked.recipe)
        return checked

    first = check_points(request, request.points(), check)
    nodes = [(recipe.launch.slurm, recipe.launch.num_machines) for recipe in recipes]
    if any(each != nodes[0] for each in nodes):
        raise UsageError(
            "the cells differ in launch.slurm or launch.num_machines, and all tasks of a job array get the same "
            "nodes",
            "submit a sweep for each, with --set",
        )
    for recipe in recipes:
        slurm = recipe.launch.slurm
        if not (slurm and slurm.server_nodes):
            check_vllm_server(recipe, parallel)
    return first, settings


def _choose_runs(sweep: Sweep) -> list[CellRun]:
    """Return the runs that are submitted again; refuse a sweep that has none, or is in the queue still."""
    if queue := read_queue(sweep.job or ""):
        raise UsageError(
            f"job {sweep.job} has {len(queue)} tasks in the queue",
            f"wait for them, or end them with `scancel {sweep.job}`",
        )
    _refresh(sweep)
    if unfinished := list_unfinished(sweep):
        return unfinished
    raise UsageError(
        f"every run of {sweep.folder} is finished",
        f"grpo sweep --resume {sweep.folder} shows the result",
    )


def _submit(
    sweep: Sweep,
    recipe: Recipe,
    settings: list[list[str]],
    parallel: int | None,
    runs: Sequence[CellRun],
    *,
    dry_run: bool,
) -> SubmittedSweep:
    request = sweep.request
    tasks = tuple(
        ArrayTask(number, run.run_id, (*flags, *settings[cell.number - 1]))
        for number, (cell, run) in enumerate(sweep.in_order())
        if run in runs
        and (flags := as_flags(request, cell.settings, run.seed)[len(request.overrides) :])
    )
    array = JobArray(tasks, parallel, sweep.logs)
    root, folder = sweep.folder.parent.parent.parent, Path(request.cwd)
    job = JobRequest(Path(request.recipe), request.overrides, root, folder, array=array)
    plan = plan_job(recipe, job)
    if not dry_run:
        sweep.job = submit(plan, sweep.logs)
        sweep.save()
    return SubmittedSweep(sweep, plan.script, len(tasks))


def _refresh(sweep: Sweep) -> None:
    """Read the state of each run from its folder and from Slurm's queue; nothing is written."""
    queue = read_queue(sweep.job) if sweep.job else None
    for number, (_, run) in enumerate(sweep.in_order()):
        task = queue.get(number, "") if queue is not None else None
        run.state, run.reason = _read_state(sweep.run_folder(run), task)
        if run.state == "interrupted":
            run.reason = (
                f"its task has left the queue; see {sweep.logs}/slurm-{sweep.job}_{number}.log"
            )


def _read_state(folder: RunFolder, task: str | None) -> tuple[str, str | None]:
    """Return the state of a run, and how far it is or why it ended.

    `task` is the state of its task in the queue; empty if it is not there, None if Slurm does not tell.
    """
    status = (read_status(folder) if folder.resolved.is_file() else None) or Status()
    reason = status.reason_line or None
    if status.state == "completed" or status.stopped_by:
        return status.state, reason
    step = f"step {status.progress}" if status.total_steps else None
    if task == "PENDING":
        return "waiting", step
    state = look_at_life(folder, status).state
    if state in FINAL:
        return state, reason
    if task:
        return "running", step or status.phase
    if task is None:
        return ("waiting", None) if state == "pending" else (state, step)
    return "interrupted", None
