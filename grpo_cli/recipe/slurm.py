"""The `launch.slurm` section: what a job asks of Slurm, under the names of sbatch's options.

Owns which texts may stand in a script's `#SBATCH` lines. Does not write the script: that is
`launch/slurm.py`.
"""

import re
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import Integer, OneOrMany, Section

_ONE_LINE = re.compile(r"[^\x00-\x1f\x7f\x85\u2028\u2029\"\\]+")
"""What sbatch reads back as it was written, between double quotes."""


_OPTION = re.compile(r"[a-z][a-z0-9-]+")
_TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})|UNLIMITED|INFINITE")


def is_directive(text: str) -> bool:
    """Whether a text can stand in a `#SBATCH` line without ending it, or sbatch's quotes."""
    return _ONE_LINE.fullmatch(text) is not None


def _check_option(text: str) -> str:
    if not _OPTION.fullmatch(text):
        raise PydanticCustomError(
            "grpo_option", f"names no option of sbatch's: {text!r}; they look like mail-type"
        )
    return text


def _check_line(text: str) -> str:
    if not is_directive(text):
        raise PydanticCustomError(
            "grpo_line", "should be one line without double quotes and backslashes"
        )
    return text


def _check_time(text: str) -> str:
    if not _TIME.fullmatch(text):
        raise PydanticCustomError(
            "grpo_time",
            "should be a time as sbatch reads it, such as 04:00:00, 2-12:00:00 or 90 (minutes)",
        )
    return text


Line = Annotated[str, AfterValidator(_check_line)]
"""A value of a `#SBATCH` line."""
OptionName = Annotated[str, AfterValidator(_check_option)]
"""A long option of sbatch's without its dashes."""
_TypedGpus = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+:[1-9][0-9]{0,3}$")]


class SlurmConfig(Section):
    """The job that `grpo train --slurm` submits: sbatch's own names, and none of them is needed."""

    partition: Line | None = None
    """Partition (queue) of the job."""
    account: Line | None = None
    """Account that is charged."""
    qos: Line | None = None
    """Quality of service."""
    constraint: Line | None = None
    """Features the nodes must have."""
    time: Integer | Annotated[str, AfterValidator(_check_time)] | None = None
    """Time limit: minutes, or as sbatch reads it, such as `04:00:00` or `2-12:00:00`."""
    mem: Integer | Line | None = None
    """Memory of a node: MiB, or with a unit, such as `64G`; 0 is all of it."""
    gpus_per_node: Annotated[Integer, Field(ge=1)] | _TypedGpus | None = None
    """GPUs of a node, such as `4` or `a100:4`. With it `num_processes: auto` is one process for each
    GPU of the job, wherever it is submitted from; without it, what the nodes turn out to have."""
    cpus_per_task: Integer | None = Field(default=None, ge=1)
    """Processors of a node that the job uses."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    requeue: bool = True
    """Go on in the queue where the time limit ends the job; Slurm does so itself where it preempts it."""
    max_requeues: Integer = Field(default=10, ge=0)
    """Restarts, of every kind, after which the time limit ends the job for good: a run whose limit is
    too short to get on would be queued for ever."""
    signal_before_end_s: Integer = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit at which the run is asked to finish its step and save; longer than
    a step and a checkpoint take."""
    server_nodes: Integer = Field(default=0, ge=0, le=1)
    """1 takes a node more, on which `grpo serve` runs the vLLM server of `generation.vllm.mode: server`."""
    setup: OneOrMany[str] = ()
    """Shell lines that run first, such as `module load cuda` or `source .venv/bin/activate`."""
    options: dict[OptionName, bool | Integer | Line] = Field(default_factory=dict)
    """Any other option of sbatch's by its long name, such as `mail-type: END`; `true` is one without a
    value."""

    @property
    def gpus(self) -> int | None:
        """GPUs of a node as a number; None where it is not said."""
        if self.gpus_per_node is None:
            return None
        return int(str(self.gpus_per_node).rpartition(":")[2])
