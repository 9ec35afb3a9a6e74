"""The device one process trains on: its memory, and what the libraries take of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_cli.machine import pick_device, read_available_memory
from grpo_cli.recipe.recipe import Recipe

CUDA_CONTEXT = 600 * 2**20
"""What a CUDA context with the kernels of torch takes, about, on current drivers."""
_FALLBACK_LIBRARIES = 440 * 2**20
"""torch, transformers, datasets, peft and trl once imported, on Linux."""


@dataclass(frozen=True)
class Device:
    """Where one process trains."""

    kind: Literal["cpu", "cuda"]
    total: int | None
    """Bytes of a GPU; None on a CPU."""
    available: int | None
    """Bytes that one process can take; None where the system does not tell."""
    library_bytes: int
    autocast: bool
    """Whether the model is computed in 16 bits, whatever its weights are in."""


def find_device(recipe: Recipe) -> Device:
    """The device of this machine that a recipe would train on."""
    import torch

    local = recipe.launch.num_processes
    processes = (local if isinstance(local, int) else 1) // recipe.launch.num_machines
    if pick_device(recipe.launch) == "cuda":
        free, total = torch.cuda.mem_get_info()
        mixed = recipe.training.mixed_precision(cpu=False) != "no"
        return Device("cuda", total, free, CUDA_CONTEXT, autocast=mixed)
    available, _ = read_available_memory()
    share = None if available is None else available // max(processes, 1)
    mixed = recipe.training.mixed_precision(cpu=True) != "no"
    return Device("cpu", None, share, _resident(), autocast=mixed)


def _resident(status: Path = Path("/proc/self/status")) -> int:
    """What this process holds, which by now has loaded the libraries that a worker loads."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return _FALLBACK_LIBRARIES
    found = [line.split() for line in lines if line.startswith("VmRSS:")]
    return int(found[0][1]) * 1024 if found else _FALLBACK_LIBRARIES
