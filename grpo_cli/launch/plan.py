"""The plan of a launch: argv, environment and who runs where. Pure; nothing is started here."""

import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_cli.preflight.hardware import Hardware, resolve_num_processes
from grpo_cli.recipe.recipe import Recipe

WORKER = "grpo_cli.train.worker"
"""The module that trains; named, never imported, on this side of the process boundary."""


@dataclass(frozen=True)
class LaunchPlan:
    """What will be started on this machine."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    """Variables added to the current ones; those the user has set win."""
    strategy: Literal["single", "ddp"]
    num_processes: int
    """Over all machines."""
    num_machines: int
    machine_rank: int
    device: Literal["cpu", "cuda"]
    stall_timeout_s: float | None
    """Seconds without progress after which the run is ended; None waits for ever."""

    def command_line(self) -> str:
        """The command as one would type it."""
        return shlex.join(self.argv)

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {**asdict(self), "argv": list(self.argv)}


def plan_launch(recipe: Recipe, run: Path, hardware: Hardware, worker: str = WORKER) -> LaunchPlan:
    """Works out what to start for a recipe on this machine.

    One process is started directly: a launcher in between would only be one more process to lose.
    """
    processes = resolve_num_processes(recipe.launch, hardware)
    cpu = recipe.launch.use_cpu or hardware.gpus == 0
    single = processes == 1
    return LaunchPlan(
        argv=(
            sys.executable,
            *(() if single else _accelerate(recipe, processes)),
            "-m",
            worker,
            str(run),
        ),
        environment=_environment(recipe, processes, hardware, cpu=cpu),
        strategy="single" if single else "ddp",
        num_processes=processes,
        num_machines=recipe.launch.num_machines,
        machine_rank=recipe.launch.machine_rank,
        device="cpu" if cpu else "cuda",
        stall_timeout_s=recipe.launch.stall_timeout_s,
    )


def _accelerate(recipe: Recipe, processes: int) -> tuple[str, ...]:
    """Arguments of `accelerate launch`.

    `--multi_gpu` is what makes accelerate start several processes on a CPU too: `--cpu` and
    `MULTI_CPU` start one, without a word (accelerate 1.15).
    """
    launch = recipe.launch
    flags = {
        "--num_processes": processes,
        "--num_machines": launch.num_machines,
        "--mixed_precision": "no",
        "--dynamo_backend": "no",
        "--main_process_port": launch.main_process_port or 0,
    }
    if launch.num_machines > 1:
        flags |= {
            "--machine_rank": launch.machine_rank,
            "--main_process_ip": launch.main_process_ip or "",
        }
    named = [str(part) for flag in flags.items() for part in flag]
    return ("-m", "accelerate.commands.launch", "--multi_gpu", *named)


def _environment(
    recipe: Recipe, processes: int, hardware: Hardware, *, cpu: bool
) -> dict[str, str]:
    environment = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if recipe.launch.use_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if not cpu:
        return environment
    local = max(processes // recipe.launch.num_machines, 1)
    environment["OMP_NUM_THREADS"] = str(max(hardware.cpus // local, 1))
    if hardware.linux:
        # glibc gives large blocks back to the kernel at once and page-faults them in again on
        # the next step; keeping them took a float32 step of SmolLM2-135M from 17 to 13 s.
        keep = str(16 * 2**30)
        environment |= {
            "MALLOC_MMAP_THRESHOLD_": keep,
            "MALLOC_TRIM_THRESHOLD_": keep,
            "MALLOC_TOP_PAD_": str(64 * 2**20),
        }
    return environment
