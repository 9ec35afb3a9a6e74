"""A job of Slurm's that trains a recipe: the text of its script, which is pure, and its submission.

Owns what the job does on its nodes: setting up, meeting, training on all of them in one run folder, going
back into the queue. Which run the machines share and from where it goes on is `grpo train --run-id`'s.

Source: sbatch, srun and scontrol of Slurm 22.05 and newer (`SLURM_JOB_END_TIME`).
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_cli.errors import RunError, SetupError, UsageError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.slurm import SlurmConfig, is_directive

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
    """The job's output; `%j` stands for its number."""
    run: str
    """The run folder; `$SLURM_JOB_ID` stands for the job's number."""


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


def plan_job(recipe: Recipe, request: JobRequest) -> JobPlan:
    """Writes the script of a job.

    Args:
        recipe: The checked recipe, with overrides; `launch.slurm` may be left out.
        request: What the command line says.

    Raises:
        UsageError: A path holds characters that sbatch cannot read.
    """
    slurm = recipe.launch.slurm or SlurmConfig()
    log = f"{request.runs / recipe.name}/slurm-%j.log"
    parts = (
        "#!/bin/bash",
        *_directives(recipe, slurm, request, log),
        "# Written by `grpo train --slurm`. sbatch takes it as it is, once the folder of --output is there.",
        "# The recipe is read when the job starts: what is changed there by then is trained.",
        "",
        "set -euo pipefail",
        *_setup(slurm),
        *_meeting(recipe, slurm),
        *_train_command(recipe, slurm, request),
        *(_server(slurm, request) if slurm.server_nodes else ()),
        *_step(recipe, slurm),
        *(_requeue(slurm) if slurm.requeue else ()),
        'exit "$code"',
    )
    run = request.runs / recipe.name / (request.run_id or "slurm-$SLURM_JOB_ID")
    return JobPlan("\n".join(parts) + "\n", log, str(run))


def submit(plan: JobPlan, runs: Path) -> str:
    """Hands a job to Slurm; gives its number.

    Args:
        plan: What is submitted.
        runs: The folder of the recipe's runs, which is made: Slurm opens the log in it.

    Raises:
        SetupError: There is no Slurm here.
        RunError: It refuses the job.
    """
    runs.mkdir(parents=True, exist_ok=True)
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


def _directives(recipe: Recipe, slurm: SlurmConfig, request: JobRequest, log: str) -> Iterator[str]:
    own = ("partition", "account", "qos", "constraint", "time", "mem")
    options: dict[str, object] = {
        "job-name": recipe.name,
        "nodes": recipe.launch.num_machines + slurm.server_nodes,
        "ntasks-per-node": 1,
        **{name: getattr(slurm, name) for name in own},
        "gpus-per-node": slurm.gpus_per_node,
        "cpus-per-task": slurm.cpus_per_task,
        "exclusive": slurm.exclusive,
        "chdir": request.folder,
        # In this one, % is sbatch's own.
        "output": f"{str(request.runs / recipe.name).replace('%', '%%')}/slurm-%j.log",
        "open-mode": "append",
        "requeue" if slurm.requeue else "no-requeue": True,
        "signal": f"TERM@{slurm.signal_before_end_s}",
        **slurm.options,
    }
    for name, value in options.items():
        if value is True:
            yield f"#SBATCH --{name}"
        elif value is not None and value is not False:
            yield f"#SBATCH --{name}={_quote_directive(str(value))}"


def _quote_directive(text: str) -> str:
    if not is_directive(text):
        raise UsageError(
            f"sbatch cannot read {text!r}. Fix: use a path without double quotes, backslashes and "
            "line breaks"
        )
    return text if _PLAIN.issuperset(text) else f'"{text}"'


def _setup(slurm: SlurmConfig) -> Iterator[str]:
    if slurm.setup:
        yield "# Modules and environments read variables that may not be set."
        yield from ("set +u", *slurm.setup, "set -u")


def _meeting(recipe: Recipe, slurm: SlurmConfig) -> Iterator[str]:
    """Who the nodes are, and where they find each other."""
    if recipe.launch.num_machines + slurm.server_nodes == 1:
        return
    yield ""
    yield 'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    yield "# Jobs that share a node meet at ports of their own."
    if recipe.launch.num_machines > 1:
        yield "port=$((15000 + SLURM_JOB_ID % 15000))"
    if slurm.server_nodes:
        yield "server_port=$((31000 + SLURM_JOB_ID % 1000))"
        yield 'server_node="${nodes[-1]}"'


def _train_command(recipe: Recipe, slurm: SlurmConfig, request: JobRequest) -> Iterator[str]:
    """The command of every node, less what tells them apart."""
    launch = recipe.launch
    named = shlex.quote(request.run_id) if request.run_id else '"slurm-$SLURM_JOB_ID"'
    yield ""
    yield "train=("
    yield f"  {_grpo()} train {shlex.quote(str(request.recipe))}"
    yield f"  --runs {shlex.quote(str(request.runs))} --run-id {named} --resume"
    if request.flags:
        yield f"  {shlex.join(request.flags)}"
    for text in request.overrides:
        yield f"  --set {shlex.quote(text)}"
    if launch.num_machines > 1:
        yield '  --set "launch.main_process_ip=${nodes[0]}"'
        yield '  --set "launch.main_process_port=$port"'
    if slurm.server_nodes:
        yield '  --set "generation.vllm.base_url=http://$server_node:$server_port"'
        if "server_timeout" not in recipe.generation.vllm.extras:
            # Both start together, and a large model takes its time.
            yield "  --set generation.vllm.server_timeout=3600"
    yield ")"


def _grpo() -> str:
    return f"{shlex.quote(sys.executable)} -m grpo_cli"


def _server(slurm: SlurmConfig, request: JobRequest) -> Iterator[str]:
    """The vLLM server on the last node; a stop is not for it: the last step still samples."""
    yield ""
    yield "# Slurm asks every step to stop; the training needs the server until its own step is done."
    processors = f"--cpus-per-task={slurm.cpus_per_task} " if slurm.cpus_per_task else ""
    yield f'srun --nodes=1 --ntasks=1 {processors}--nodelist="$server_node" bash -c \''
    yield "  trap : TERM"
    yield '  "$@" & server=$!'
    yield '  trap "kill $server" USR1'
    yield '  while kill -0 "$server" 2>/dev/null; do wait "$server" || true; done'
    serve = f"{_grpo()} serve {shlex.quote(str(request.recipe))}"
    changes = "".join(f" --set {shlex.quote(text)}" for text in request.overrides)
    yield f'\' bash {serve}{changes} --host 0.0.0.0 --port "$server_port" --timeout 3600 &'
    yield "server_step=$!"
    yield "trap 'kill -USR1 \"$server_step\" 2>/dev/null || true' EXIT"


def _step(recipe: Recipe, slurm: SlurmConfig) -> Iterator[str]:
    """The training itself, on all nodes at once."""
    machines = recipe.launch.num_machines
    flags = [f"--nodes={machines}", f"--ntasks={machines}", "--ntasks-per-node=1"]
    if slurm.cpus_per_task:
        # srun no longer takes it over from the job.
        flags.append(f"--cpus-per-task={slurm.cpus_per_task}")
    if slurm.server_nodes:
        flags.append(f'--nodelist="$(IFS=,; echo "${{nodes[*]:0:{machines}}}")"')
    yield ""
    yield "# The script outlives a SIGTERM, so as to say what comes after it."
    yield "trap : TERM"
    yield "code=0"
    yield "# Slurm's signals are for the process of the task itself, hence the exec."
    yield f"srun {' '.join(flags)} --wait={_STRAGGLER_S} bash -c '"
    yield '  exec "$@" --set "launch.machine_rank=$SLURM_PROCID"'
    yield '\' bash "${train[@]}" || code=$?'


def _requeue(slurm: SlurmConfig) -> Iterator[str]:
    """What follows a stop. One before the time is Slurm's to requeue, or somebody's wish."""
    margin = slurm.signal_before_end_s + _EARLY_S
    most = slurm.max_requeues
    yield ""
    yield "# 143 and 130: it was asked to stop, and is saved. Slurm requeues a job that it preempts by itself."
    yield "if [[ $code == 143 || $code == 130 ]]; then"
    yield f"  if (($(date +%s) + {margin} < ${{SLURM_JOB_END_TIME:-9999999999}})); then"
    yield '    echo "grpo: stopped before the time limit; not requeued from here" >&2'
    yield f"  elif ((${{SLURM_RESTART_COUNT:-0}} >= {most})); then"
    yield f'    echo "grpo: started again {most} times (launch.slurm.max_requeues); not requeued" >&2'
    yield '  elif scontrol requeue "$SLURM_JOB_ID"; then'
    yield "    exit 0"
    yield "  else"
    yield '    echo "grpo: not requeued from here; it may be in the queue already" >&2'
    yield "  fi"
    yield "fi"
