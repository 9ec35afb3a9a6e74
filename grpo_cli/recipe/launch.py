"""The `launch` section: on which devices and machines the worker processes run."""

from typing import Annotated, Literal

from pydantic import Field

from grpo_cli.recipe.base import Integer, Number, Section
from grpo_cli.recipe.slurm import SlurmConfig

Strategy = Literal["auto", "single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]

SHARED_WEIGHTS: frozenset[Strategy] = frozenset({"fsdp2", "zero3"})
"""With these no process holds the whole model."""
KEEPS_FLOAT32: frozenset[Strategy] = frozenset({"fsdp2", "zero1", "zero2", "zero3"})
"""With these the optimizer changes float32 weights, whatever the model is loaded in, if bf16 or fp16 is on."""


class LaunchConfig(Section):
    """How many processes, and how they share the model."""

    strategy: Strategy = "auto"
    """`single` is one process, `ddp` one copy of the model a process. `fsdp2` shares weights, gradients and
    optimizer among GPUs; so do DeepSpeed's `zero1` (optimizer), `zero2` (and gradients) and `zero3` (and
    weights). `auto` is `single` or `ddp`, by the number of processes."""
    accelerate_config: str | None = None
    """A config file of accelerate's in the place of `strategy`; how many processes and machines take part
    is still this section's to say."""
    num_processes: Literal["auto"] | Annotated[Integer, Field(ge=1)] = "auto"
    """Worker processes over all machines; `auto` is one for each visible GPU, and 1 on a CPU."""
    num_machines: Integer = Field(default=1, ge=1)
    """Machines that take part; start `grpo train` on each."""
    machine_rank: Integer = Field(default=0, ge=0)
    """This machine's number, from 0."""
    main_process_ip: str | None = None
    """Address of machine 0 (needed with several machines)."""
    main_process_port: Integer | None = Field(default=None, ge=1, le=65535)
    """Port of machine 0 (needed with several machines; otherwise a free one is taken)."""
    stall_timeout_s: Number | None = Field(default=3600, gt=0)
    """Seconds without any progress after which a training is ended as failed, with the stacks of all
    workers in its log; null waits for ever."""
    use_cpu: bool = False
    """Train on the CPU even where there is a GPU."""
    slurm: SlurmConfig | None = None
    """The job that `grpo train --slurm` submits."""
