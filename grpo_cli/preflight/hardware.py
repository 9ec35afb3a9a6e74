"""What this machine has, found without importing torch."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_cli.runs.manifest import usable_cpus

if TYPE_CHECKING:
    from grpo_cli.recipe.launch import LaunchConfig


@dataclass(frozen=True)
class Hardware:
    """What a launch can use on this machine."""

    gpus: int
    """Visible CUDA devices."""
    cpus: int
    """Processors this process may run on."""
    linux: bool = True


def read_hardware() -> Hardware:
    """Looks at this machine."""
    return Hardware(count_gpus(), usable_cpus(), sys.platform.startswith("linux"))


def count_gpus(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Visible NVIDIA devices: those of the driver, less what `CUDA_VISIBLE_DEVICES` hides."""
    present = len(list(driver.iterdir())) if driver.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    names = [name.strip() for name in visible.split(",")]
    # CUDA stops at the first entry that names no device.
    hidden = next((index for index, name in enumerate(names) if name in {"", "-1"}), len(names))
    return min(present, hidden)


def resolve_num_processes(launch: "LaunchConfig", hardware: Hardware) -> int:
    """Worker processes over all machines, with `auto` worked out for this one."""
    if launch.num_processes != "auto":
        return launch.num_processes
    if launch.strategy == "single":
        return 1
    return (1 if launch.use_cpu else processes_per_machine(hardware)) * launch.num_machines


def processes_per_machine(hardware: Hardware) -> int:
    """What `auto` means on this machine: one process for each visible GPU, and 1 on a CPU."""
    return max(hardware.gpus, 1)
