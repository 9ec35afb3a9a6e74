"""Check a recipe as the nodes of a Slurm job will see it, and submit the job."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.checks.recipe import CheckedRecipe, check_recipe
from grpo_cli.errors import UsageError
from grpo_cli.launch.prepare import ResumeRequest, already_exists
from grpo_cli.launch.slurm import JobPlan, JobRequest, plan_job, submit
from grpo_cli.machine import Hardware, read_hardware, resolve_num_processes
from grpo_cli.recipe.loading import load_tree
from grpo_cli.reporter import Reporter
from grpo_cli.runs.folder import locate_run

_RENDEZVOUS = (
    "launch.main_process_ip=first-node",
    "launch.main_process_port=15000",
    "launch.machine_rank=0",
)
_SERVER = "generation.vllm.base_url=http://last-node:8000"
"""Placeholders for values that are known only in the job, for checking the recipe."""


@dataclass(frozen=True)
class SubmittedJob:
    """A job, and its number once it is submitted."""

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
        """Return the job as plain values."""
        return {"job": self.number, "run": self.run, "log": self.log, "script": self.plan.script}


def run_as_job(
    path: Path,
    overrides: list[str] | None,
    root: Path,
    resume: ResumeRequest,
    flags: tuple[str, ...],
    reporter: Reporter,
    *,
    dry_run: bool,
) -> SubmittedJob:
    """Check a recipe as its nodes will see it, and submit the job, or only write its script.

    Args:
        path: The recipe.
        overrides: `--set` texts.
        root: Where run folders go.
        resume: Which run it resumes, if any.
        flags: Further flags for the training.
        reporter: Gets the warnings.
        dry_run: Only write the script.

    Raises:
        ProblemsError: The recipe cannot be trained.
        UsageError: The flags do not fit together, or the runs cannot be written.
    """
    if resume.wanted and resume.run_id is None:
        raise UsageError(
            "a job resumes its own run by itself. Fix: name an earlier run with --run-id and --resume, "
            "or remove --resume and --resume-from"
        )
    given = overrides or []
    # A dry run may be made where nothing is installed.
    checked, processes = check_for_nodes(path, given, environment=not dry_run)
    recipe = checked.recipe
    reporter.issues(checked.problems)
    root = root.absolute()
    if resume.run_id is not None:
        run = locate_run(root, recipe, resume.run_id)
        if run.resolved.is_file() and not resume.wanted:
            raise already_exists(run)
    request = JobRequest(
        path.absolute(), (*given, *processes), root, Path.cwd(), flags, run_id=resume.run_id
    )
    plan = plan_job(recipe, request)
    return SubmittedJob(plan, None if dry_run else submit(plan, root / recipe.name))


def check_for_nodes(
    path: Path, overrides: list[str], *, environment: bool
) -> tuple[CheckedRecipe, list[str]]:
    """Check a recipe as a job's nodes will see it; return it, and the settings that follow from the nodes.

    Args:
        path: The recipe.
        overrides: `--set` texts.
        environment: Whether a package that this machine lacks is an error, rather than a note.
    """
    hardware, processes, later = _nodes_settings(path, overrides)
    settings = [*overrides, *processes, *later]
    return check_recipe(path, settings, hardware, environment=environment), processes


def _nodes_settings(path: Path, overrides: list[str]) -> tuple[Hardware, list[str], list[str]]:
    """Return the nodes' hardware, the settings that follow from it, and those that the job will set."""
    here = read_hardware()
    recipe = load_tree(path, overrides).recipe
    slurm = recipe.launch.slurm if recipe else None
    later = [*_RENDEZVOUS, *([_SERVER] if slurm and slurm.server_nodes else [])]
    # Without the section the recipe would be checked for this machine.
    later += [] if slurm else ["launch.slurm={}"]
    if recipe is None or slurm is None or slurm.gpus is None:
        return here, [], later
    nodes = Hardware(slurm.gpus, slurm.cpus_per_task or here.cpus)
    if recipe.launch.num_processes != "auto":
        return nodes, [], later
    served = load_tree(path, [*overrides, *later]).recipe or recipe
    # The nodes would find the same number. With it set, a node that lacks a GPU is an error, not a smaller batch.
    return nodes, [f"launch.num_processes={resolve_num_processes(served, nodes)}"], later
