"""This machine: GPUs, cores, memory and free ports, found without importing torch."""

import os
import socket
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grpo_cli.errors import SetupError

if TYPE_CHECKING:
    from grpo_cli.recipe.launch import LaunchConfig
    from grpo_cli.recipe.recipe import Recipe

CGROUP = Path("/sys/fs/cgroup")
"""Where a container's limits stand."""
_CPUINFO = Path("/proc/cpuinfo")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_RENDERERS = Path("/dev/dri")


@dataclass(frozen=True)
class Hardware:
    """What a launch can use on this machine."""

    gpus: int
    """GPUs that torch sees."""
    cpus: int
    """Cores that computing threads can keep busy."""
    linux: bool = True
    names: tuple[str, ...] = ()
    """What `CUDA_VISIBLE_DEVICES` calls the visible devices, where it is set."""
    bfloat16: bool | None = None
    """Whether the processor computes in bfloat16 itself; None where the system does not tell."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The visible devices, as `CUDA_VISIBLE_DEVICES` would name them."""
        return self.names or tuple(map(str, range(self.gpus)))


def read_hardware(gpus: int | None = None) -> Hardware:
    """Look at this machine; with `gpus`, as if it had so many GPUs."""
    if gpus is not None:
        return Hardware(gpus, count_cores(), bfloat16=has_bfloat16())
    gpus = count_gpus()
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    visible = tuple(name for name in names if name)[:gpus]
    return Hardware(
        gpus,
        count_cores(),
        sys.platform.startswith("linux"),
        visible,
        has_bfloat16(),
    )


def count_gpus(nodes: Path = _AMD_NODES, renderers: Path = _RENDERERS) -> int:
    """Return how many GPUs torch will see: NVIDIA's or AMD's, less those that the environment hides.

    Args:
        nodes: What Linux tells of AMD's GPUs.
        renderers: The devices that this machine, or container, may use.
    """
    found, variables = _count_nvidia(), ["CUDA_VISIBLE_DEVICES"]
    if not found:
        found = _count_amd(nodes, renderers)
        variables += ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]
    for variable in variables:
        visible = os.environ.get(variable)
        if visible is not None:
            found = min(found, len(named_devices(visible)))
    return found


def named_devices(visible: str) -> list[str]:
    """Return what a list like `CUDA_VISIBLE_DEVICES` names; it ends at the first entry that is empty or -1."""
    return list(takewhile(lambda name: name not in {"", "-1"}, map(str.strip, visible.split(","))))


def _count_nvidia() -> int:
    """Ask the driver, which knows containers and WSL."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


def _count_amd(nodes: Path, renderers: Path) -> int:
    found = 0
    for properties in nodes.glob("*/properties"):
        told = dict(line.split(maxsplit=1) for line in properties.read_text().splitlines())
        # Processors are nodes too, without compute units. A container shows all nodes, but its own devices alone.
        renderer = renderers / f"renderD{told.get('drm_render_minor')}"
        found += int(told.get("simd_count", 0)) > 0 and renderer.exists()
    return found


def pick_device(launch: "LaunchConfig") -> Literal["cpu", "cuda"]:
    """Where a process of this machine works, as torch sees it; imports torch."""
    import torch

    return "cuda" if torch.cuda.is_available() and not launch.use_cpu else "cpu"


def is_on_cpu(launch: "LaunchConfig", hardware: Hardware) -> bool:
    """Whether a launch on this machine trains on the CPU; without importing torch."""
    return launch.use_cpu or hardware.gpus == 0


def resolve_num_processes(recipe: "Recipe", hardware: Hardware) -> int:
    """Worker processes over all machines, with `auto` worked out for this one.

    GPUs that a managed vLLM server works on are not training's.
    """
    launch = recipe.launch
    if launch.num_processes != "auto":
        return launch.num_processes
    if launch.strategy == "single":
        return 1
    if launch.use_cpu:
        return launch.num_machines
    left = hardware.gpus - recipe.generation.managed_gpus
    return max(left, 1) * launch.num_machines


def processes_per_machine(hardware: Hardware) -> int:
    """What `auto` means on this machine: one process for each visible GPU, and 1 on a CPU."""
    return max(hardware.gpus, 1)


def read_available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP
) -> tuple[int | None, bool]:
    """Memory that could be taken now.

    Returns:
        Bytes, None where the system does not tell; and whether a container's limit decides.
    """
    available, room = _read_available(meminfo), _read_cgroup_room(cgroup)
    if available is not None and room is not None and room < available:
        return room, True
    return available, False


def _read_available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def _read_cgroup_room(cgroup: Path) -> int | None:
    """What a container may still take; page cache that can be dropped counts as free."""
    for limit, used, key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, now = read_number(cgroup / limit), read_number(cgroup / used)
        if most is not None and now is not None:
            stat = (cgroup / limit).parent / "memory.stat"
            return max(most - now + _read_entry(stat, key), 0)
    return None


def _read_entry(path: Path, key: str) -> int:
    try:
        entries = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(entries.get(key, 0))


_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of processors that multiply bfloat16: two of x86's, and ARM's."""


def usable_cpus() -> int:
    """Processors this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def count_cores(cgroup: Path = CGROUP, topology: Path = _TOPOLOGY) -> int:
    """Cores that computing threads can keep busy.

    Two threads of one core share its arithmetic, so a core counts once; and a container gets no more than
    its quota of time, which torch does not see.

    Args:
        cgroup: Where the quota stands.
        topology: Where the kernel says which processors share a core.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = _count_cores(affinity(0), topology) if affinity else usable_cpus()
    quota = read_cpu_quota(cgroup)
    return cores if quota is None else max(min(cores, int(quota)), 1)


def _count_cores(usable: set[int], topology: Path) -> int:
    """Different cores among some processors; one each where the system does not tell."""
    siblings = set()
    for cpu in usable:
        try:
            text = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            return len(usable)
        siblings.add(text.strip())
    return len(siblings)


def read_cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Processors whose time a container gets; None where nothing limits it."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        old = read_number(cgroup / "cpu/cpu.cfs_quota_us")
        period_us = read_number(cgroup / "cpu/cpu.cfs_period_us")
        return old / period_us if old and period_us else None


def read_number(path: Path) -> int | None:
    """The whole number in a file of the kernel's; None where there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool | None:
    """Whether the processor computes in bfloat16 itself; None where the system does not tell.

    Where it does not, torch makes float32 of each number and rounds back.
    """
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return bool(_BFLOAT16 & set(flags.split()))
    return None


def pick_free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on a port of this machine."""
    return _why_not("0.0.0.0", port) is None


def check_port(host: str, port: int) -> None:
    """Refuses an address that cannot be listened on.

    Raises:
        SetupError: It is another program's, or not this machine's.
    """
    said = _why_not(host, port)
    if said is not None:
        raise SetupError(
            f"{host}:{port} cannot be listened on ({said}). Fix: another --port, or another --host"
        )


def _why_not(host: str, port: int) -> str | None:
    with socket.socket() as probe:
        # As servers do: a connection that has just been closed does not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            return str(getattr(error, "strerror", None) or error)
    return None
