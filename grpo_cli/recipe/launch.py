"""The `launch` section: on which devices and machines the worker processes run, and the Slurm job."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import Integer, Number, OneOrMany, Section

Strategy = Literal["auto", "single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]

SHARED_WEIGHTS: frozenset[Strategy] = frozenset({"fsdp2", "zero3"})
"""With these no process holds the whole model."""
KEEPS_FLOAT32: frozenset[Strategy] = frozenset({"fsdp2", "zero1", "zero2", "zero3"})
"""With these the optimizer changes float32 weights, whatever the model is loaded in, if bf16 or fp16 is on."""
_ONE_LINE = re.compile(r"[^\x00-\x1f\x7f\x85\u2028\u2029\"\\]+")
"""What sbatch reads back as it was written, between double quotes."""


def is_directive(text: str) -> bool:
    """Return whether a text can stand in a `#SBATCH` line without ending it, or sbatch's quotes."""
    return _ONE_LINE.fullmatch(text) is not None


def _matching(pattern: re.Pattern[str], message: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise PydanticCustomError("grpo_text", f"{message} ({{text}})", {"text": repr(text)})
        return text

    return AfterValidator(check)


_Line = Annotated[
    str, _matching(_ONE_LINE, "should be one line without double quotes and backslashes")
]
_OptionName = Annotated[
    str,
    _matching(
        re.compile(r"[a-z][a-z0-9-]+"), "is not an option of sbatch; options look like mail-type"
    ),
]
_Time = Annotated[
    str,
    _matching(
        re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})|UNLIMITED|INFINITE"),
        "should be a time as sbatch reads it, such as 04:00:00, 2-12:00:00 or 90 (minutes)",
    ),
]
_TypedGpus = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+:[1-9][0-9]{0,3}$")]


class SlurmConfig(Section):
    """The job that `--slurm` submits, or each task of the array of a sweep: sbatch's own names, all optional."""

    partition: _Line | None = None
    """Partition (queue) of the job."""
    account: _Line | None = None
    """Account that is charged."""
    qos: _Line | None = None
    """Quality of service."""
    constraint: _Line | None = None
    """Features the nodes must have."""
    time: Integer | _Time | None = None
    """Time limit: minutes, or in sbatch's format, such as `04:00:00` or `2-12:00:00`."""
    mem: Integer | _Line | None = None
    """Memory per node: MiB, or with a unit, such as `64G`; 0 means all."""
    gpus_per_node: Annotated[Integer, Field(ge=1)] | _TypedGpus | None = None
    """GPUs per node, such as `4` or `a100:4`. If set, `num_processes: auto` is one process per GPU of the
    job, wherever it is submitted; otherwise it is the number of GPUs found on the nodes."""
    cpus_per_task: Integer | None = Field(default=None, ge=1)
    """CPUs per node that the job uses."""
    exclusive: bool = False
    """Do not share the nodes with other jobs."""
    requeue: bool = True
    """Requeue the job when the time limit ends it; Slurm itself requeues it when it is preempted."""
    max_requeues: Integer = Field(default=10, ge=0)
    """Restarts, for any reason, after which the job is no longer requeued; otherwise a time limit that is too
    short for any progress would requeue it forever."""
    signal_before_end_s: Integer = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit at which the run is signaled to finish its step and save; must be longer
    than a step and a checkpoint take."""
    server_nodes: Integer = Field(default=0, ge=0, le=1)
    """1 adds a node on which `grpo serve` runs the vLLM server of `generation.vllm.mode: server`."""
    setup: OneOrMany[str] = ()
    """Shell lines that run first, such as `module load cuda` or `source .venv/bin/activate`."""
    options: dict[_OptionName, bool | Integer | _Line] = Field(default_factory=dict)
    """Any other sbatch option by its long name, such as `mail-type: END`; `true` for an option without a value."""

    @property
    def gpus(self) -> int | None:
        """GPUs of a node as a number; None if it is not set."""
        if self.gpus_per_node is None:
            return None
        return int(str(self.gpus_per_node).rpartition(":")[2])


class LaunchConfig(Section):
    """How many processes to start, and how they shard the model."""

    strategy: Strategy = "auto"
    """`single` is one process, `ddp` one copy of the model per process. `fsdp2` shards weights, gradients
    and optimizer over the GPUs; so do DeepSpeed's `zero1` (optimizer), `zero2` (and gradients) and `zero3` (and
    weights). `auto` is `single` or `ddp`, depending on the number of processes."""
    accelerate_config: str | None = None
    """An accelerate config file that replaces `strategy`; this section still sets the number of processes and
    machines."""
    num_processes: Literal["auto"] | Annotated[Integer, Field(ge=1)] = "auto"
    """Worker processes over all machines; `auto` is one per visible GPU, or 1 on a CPU."""
    num_machines: Integer = Field(default=1, ge=1)
    """Number of machines; start `grpo train` on each."""
    machine_rank: Integer = Field(default=0, ge=0)
    """This machine's number, from 0."""
    main_process_ip: str | None = None
    """Address of machine 0 (required with several machines)."""
    main_process_port: Integer | None = Field(default=None, ge=1, le=65535)
    """Port of machine 0 (required with several machines; otherwise a free port is used)."""
    stall_timeout_s: Number | None = Field(default=3600, gt=0)
    """Seconds without progress after which the run fails, with the stacks of all workers in its log; null waits
    indefinitely."""
    use_cpu: bool = False
    """Train on the CPU even if there is a GPU."""
    slurm: SlurmConfig | None = None
    """The job that `grpo train --slurm` submits."""
