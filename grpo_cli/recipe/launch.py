"""The `launch` section: on which devices and machines the worker processes run."""

from typing import Literal

from pydantic import Field

from grpo_cli.recipe.base import Integer, Number, Section


class LaunchConfig(Section):
    """How many processes, and how they share the model."""

    strategy: Literal["auto", "single", "ddp"] = "auto"
    """`single` is one process, `ddp` one model copy a process; `auto` picks by the number of processes."""
    num_processes: Literal["auto"] | Integer = "auto"
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
