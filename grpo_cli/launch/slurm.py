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

from grpo_cli.errors import RunError, SetupError, UsageError
from grpo_cli.recipe.launch import SlurmConfig, is_directive
from grpo_cli.recipe.recipe import Recipe

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.,:=/@%+-")
_EARLY_S = 60
"""Slurm may send the signal this much earlier than asked (`man sbatch`, --signal)."""
_STRAGGLER_S = 300
"""Seconds that the other machines get to end after the first one has."""


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
            "there is no sbatch on this machine. Fix: submit where Slurm is installed; "
            "`--slurm --dry-run` prints the script anywhere"
        ) from None
    if done.returncode:
        raise RunError(
            f"sbatch refuses the job: {done.stderr.strip()} Fix: change `launch.slurm` in the recipe; "
            "`--slurm --dry-run` prints the script"
        )
    number = done.stdout.strip().partition(";")[0]
    if not number:
        raise RunError("sbatch told no job's number. Fix: see with `squeue --me` whether it runs")
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
            f"sbatch cannot read {text!r}. Fix: use a path without double quotes, backslashes and "
            "line breaks"
        )
    return text if _PLAIN.issuperset(text) else f'"{text}"'
