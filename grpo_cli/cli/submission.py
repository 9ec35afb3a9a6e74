"""`grpo train --slurm`: from flags to a checked recipe, and from that to a job that is submitted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.checks.recipe_checks import check_recipe
from grpo_cli.cli.output import print_problems
from grpo_cli.cli.preparing import Earlier
from grpo_cli.errors import UsageError
from grpo_cli.launch.slurm import JobPlan, JobRequest, plan_job, submit
from grpo_cli.machine import Hardware, read_hardware, resolve_num_processes
from grpo_cli.recipe.loading import load_tree
from grpo_cli.runs.folder import check_writable, locate_run

_MEETING_POINT = (
    "launch.main_process_ip=first-node",
    "launch.main_process_port=15000",
    "launch.machine_rank=0",
)
_SERVER = "generation.vllm.base_url=http://last-node:8000"
"""Stand in, while the recipe is checked, for what the job will know."""


@dataclass(frozen=True)
class SubmittedJob:
    """A job, and its number once it has one."""

    plan: JobPlan
    number: str | None

    @property
    def log(self) -> str:
        """The job's output."""
        return self.plan.log.replace("%j", self.number or "%j")

    @property
    def run(self) -> str:
        """The run folder."""
        name = "$SLURM_JOB_ID"
        return self.plan.run.replace(name, self.number or name)

    def as_json(self) -> dict[str, Any]:
        """The job as plain values."""
        return {"job": self.number, "run": self.run, "log": self.log, "script": self.plan.script}


def run_as_job(
    path: Path,
    overrides: list[str] | None,
    root: Path,
    earlier: Earlier,
    flags: tuple[str, ...],
    *,
    dry_run: bool,
) -> SubmittedJob:
    """Checks a recipe as its nodes will see it, and submits the job, or only writes its script.

    Args:
        path: The recipe.
        overrides: `--set` texts.
        root: Where run folders go.
        earlier: Which run it goes on with, if any.
        flags: Further flags for the training.
        dry_run: Whether nothing is submitted.

    Raises:
        ProblemsError: The recipe cannot be trained.
        UsageError: The flags do not fit together, or the runs cannot be written.
    """
    if earlier.wanted and earlier.run_id is None:
        raise UsageError(
            "a job goes on by itself with the run named after it. Fix: name an earlier run with "
            "--run-id and --resume, or leave out --resume and --resume-from"
        )
    hardware, world, later = _foresee(path, overrides)
    given = [*(overrides or []), *world]
    checked = check_recipe(path, [*given, *later], hardware)
    recipe = checked.recipe
    check_writable(root)
    print_problems(problem for problem in checked.problems if problem.level != "error")
    root = root.absolute()
    if earlier.run_id is not None:
        run = locate_run(root, recipe, earlier.run_id)
        if run.resolved.is_file() and not earlier.wanted:
            raise UsageError(
                f"the run {run.path} is there already. Fix: go on with it with --resume, or give "
                "another --run-id"
            )
    request = JobRequest(
        path.absolute(), tuple(given), root, Path.cwd(), flags, run_id=earlier.run_id
    )
    plan = plan_job(recipe, request)
    return SubmittedJob(plan, None if dry_run else submit(plan, root / recipe.name))


def _foresee(path: Path, overrides: list[str] | None) -> tuple[Hardware, list[str], list[str]]:
    """The nodes' hardware as far as the recipe tells it, the settings that follow, and what the job will set."""
    here = read_hardware()
    recipe = load_tree(path, overrides).recipe
    slurm = recipe.launch.slurm if recipe else None
    later = [*_MEETING_POINT, *([_SERVER] if slurm and slurm.server_nodes else [])]
    if recipe is None or slurm is None or slurm.gpus is None:
        return here, [], later
    nodes = Hardware(slurm.gpus, slurm.cpus_per_task or here.cpus)
    if recipe.launch.num_processes != "auto":
        return nodes, [], later
    served = load_tree(path, [*(overrides or []), *later]).recipe or recipe
    # The nodes would find the same; told, a node that lacks a GPU is an error instead of a smaller batch.
    return nodes, [f"launch.num_processes={resolve_num_processes(served, nodes)}"], later
