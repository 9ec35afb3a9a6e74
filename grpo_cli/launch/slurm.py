"""A Slurm job that trains a recipe, or an array of them: its script, from `job.sh.jinja`, and its submission.

Source: sbatch, srun, scontrol and squeue of Slurm 22.05 and newer (`SLURM_JOB_END_TIME`).
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from grpo_cli.checks.recipe import CheckedRecipe, check_recipe
from grpo_cli.errors import RunError, SetupError, UsageError
from grpo_cli.launch.prepare import ResumeRequest, already_exists
from grpo_cli.machine import Hardware, read_hardware, resolve_num_processes
from grpo_cli.recipe.launch import SlurmConfig, is_directive
from grpo_cli.recipe.loading import load_tree
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.reporter import Reporter
from grpo_cli.runs.folder import locate_run

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.,:=/@%+-")
_EARLY_S = 60
"""Slurm may send the signal this much earlier than asked (`man sbatch`, --signal)."""
_STRAGGLER_S = 300
"""Seconds that the other machines get to end after the first one has."""
_RENDEZVOUS = (
    "launch.main_process_ip=first-node",
    "launch.main_process_port=15000",
    "launch.machine_rank=0",
)
_SERVER = "generation.vllm.base_url=http://last-node:8000"
"""Placeholders for values that are known only in the job, for checking the recipe."""


@dataclass(frozen=True)
class JobPlan:
    """What is submitted, and where it will be seen."""

    script: str
    log: str
    """The job's output; `%j` stands for its number, `%A` and `%a` for those of an array and its task."""
    run: str
    """The run folder; `$SLURM_JOB_ID` stands for the job's number."""


@dataclass(frozen=True)
class ArrayTask:
    """One task of a job array: a run of its own."""

    number: int
    """Its index in the array."""
    run_id: str
    overrides: tuple[str, ...]
    """`--set` texts that follow those of all tasks."""


@dataclass(frozen=True)
class JobArray:
    """The tasks of a job array."""

    tasks: tuple[ArrayTask, ...]
    parallel: int | None
    """Tasks at a time; None is as many as Slurm allows."""
    logs: Path
    """Where the tasks' output goes."""

    @property
    def option(self) -> str:
        """The value of sbatch's `--array`."""
        numbers = [task.number for task in self.tasks]
        is_range = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
        text = f"{numbers[0]}-{numbers[-1]}" if is_range else ",".join(map(str, numbers))
        return f"{text}%{self.parallel}" if self.parallel else text


@dataclass(frozen=True)
class JobRequest:
    """What the command line says of a job."""

    recipe: Path
    """The file."""
    overrides: tuple[str, ...]
    """`--set` texts."""
    runs: Path
    """Where run folders go, on a disk that all nodes see."""
    folder: Path
    """Where the command is run."""
    flags: tuple[str, ...] = ()
    """Further flags for `grpo train`."""
    run_id: str | None = None
    """The run it goes on with; None is one named after the job."""
    array: JobArray | None = None
    """Tasks that are submitted as one array."""

    def log_folder(self, name: str) -> Path:
        """Return where the job's output goes, by the recipe's name."""
        return self.array.logs if self.array else self.runs / name

    @property
    def log_name(self) -> str:
        """The output's file, in which sbatch fills in the number of the job, or of array and task."""
        return "slurm-%A_%a.log" if self.array else "slurm-%j.log"


def plan_job(recipe: Recipe, request: JobRequest) -> JobPlan:
    """Return the script of a job; raises `UsageError` if sbatch cannot read a path."""
    from jinja2 import Environment, StrictUndefined

    slurm, machines = recipe.launch.slurm or SlurmConfig(), recipe.launch.num_machines
    text = resources.files("grpo_cli.launch").joinpath("job.sh.jinja").read_text("utf-8")
    template = Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    ).from_string(text)
    named = shlex.quote(request.run_id) if request.run_id else '"slurm-$SLURM_JOB_ID"'
    script = template.render(
        slurm=slurm,
        directives=list(_directives(recipe, slurm, request)),
        machines=machines,
        nodes=machines + slurm.server_nodes,
        grpo=f"{shlex.quote(sys.executable)} -m grpo_cli",
        recipe=shlex.quote(str(request.recipe)),
        runs=shlex.quote(str(request.runs)),
        tasks=request.array.tasks if request.array else (),
        run_id='"$run_id"' if request.array else named,
        quote=shlex.join,
        flags=shlex.join(request.flags),
        overrides=list(map(shlex.quote, request.overrides)),
        sets_timeout="server_timeout" in recipe.generation.vllm.extras,
        sets_group_port="group_port" in recipe.generation.vllm.extras,
        cpus=f"--cpus-per-task={slurm.cpus_per_task} " if slurm.cpus_per_task else "",
        straggler_s=_STRAGGLER_S,
        margin_s=slurm.signal_before_end_s + _EARLY_S,
    )
    run = request.runs / recipe.name / (request.run_id or "slurm-$SLURM_JOB_ID")
    return JobPlan(script, f"{request.log_folder(recipe.name)}/{request.log_name}", str(run))


def submit(plan: JobPlan, logs: Path) -> str:
    """Submit a job; return its number.

    Args:
        logs: The folder of the log, which is made: Slurm opens the log in it.

    Raises:
        SetupError: There is no Slurm here.
        RunError: It refuses the job.
    """
    logs.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=plan.script, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise SetupError(
            "there is no sbatch on this machine",
            "submit where Slurm is installed; `--slurm --dry-run` prints the script anywhere",
        ) from None
    if done.returncode:
        raise RunError(
            f"sbatch refuses the job: {done.stderr.strip().rstrip('.')}",
            "change `launch.slurm` in the recipe; `--slurm --dry-run` prints the script",
        )
    number = done.stdout.strip().partition(";")[0]
    if not number:
        raise RunError("sbatch printed no job number", "see with `squeue --me` whether it runs")
    return number


def read_queue(array: str) -> dict[int, str] | None:
    """Return task → state (PENDING, RUNNING, …) of a job array in the queue; None if Slurm does not tell."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%F %K %T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    if done.returncode:
        return None
    jobs = (line.split() for line in done.stdout.splitlines())
    return {int(job[1]): job[2] for job in jobs if len(job) == 3 and job[0] == array}


def _directives(recipe: Recipe, slurm: SlurmConfig, request: JobRequest) -> Iterator[str]:
    named = ("partition", "account", "qos", "constraint", "time", "mem")
    options: dict[str, object] = {
        "job-name": recipe.name,
        "nodes": recipe.launch.num_machines + slurm.server_nodes,
        "ntasks-per-node": 1,
        **{name: getattr(slurm, name) for name in named},
        "gpus-per-node": slurm.gpus_per_node,
        "cpus-per-task": slurm.cpus_per_task,
        "exclusive": slurm.exclusive,
        "chdir": request.folder,
        # sbatch replaces % in this one.
        "output": f"{str(request.log_folder(recipe.name)).replace('%', '%%')}/{request.log_name}",
        "open-mode": "append",
        "requeue" if slurm.requeue else "no-requeue": True,
        "signal": f"TERM@{slurm.signal_before_end_s}",
        **slurm.options,
        **({"array": request.array.option} if request.array else {}),
    }
    for name, value in options.items():
        if value is True:
            yield name
        elif value is not None and value is not False:
            yield f"{name}={_quote_directive(str(value))}"


def _quote_directive(text: str) -> str:
    if not is_directive(text):
        raise UsageError(
            f"sbatch cannot read {text!r}",
            "use a path without double quotes, backslashes and line breaks",
        )
    return text if _PLAIN.issuperset(text) else f'"{text}"'


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
            "a job resumes its own run by itself",
            "name an earlier run with --run-id and --resume, or remove --resume and --resume-from",
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
