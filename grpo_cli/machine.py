"""This machine: GPUs, cores, memory and free ports, found without importing torch."""

import ctypes
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grpo_cli.errors import SetupError

if TYPE_CHECKING:
    from grpo_cli.recipe.launch import LaunchConfig
    from grpo_cli.recipe.recipe import Recipe

CGROUP = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_RENDERERS = Path("/dev/dri")
_NVIDIA: tuple[str, ...] = ("CUDA_VISIBLE_DEVICES",)
_AMD = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that choose among the GPUs; HIP and torch read the first that is set, vLLM refuses two that differ.

Source: torch 2.13, `torch.cuda._parse_visible_devices`; vLLM, `vllm/platforms/rocm.py`.
"""


@dataclass(frozen=True)
class Hardware:
    """What a launch can use on this machine."""

    gpus: int
    cpus: int
    """Cores that computing threads can keep busy."""
    linux: bool = True
    names: tuple[str, ...] = ()
    """The visible devices as the first of `selectors` that is set names them."""
    bfloat16: bool | None = None
    """Whether the processor computes in bfloat16 itself; None if the system does not tell."""
    selectors: tuple[str, ...] = _NVIDIA

    @property
    def devices(self) -> tuple[str, ...]:
        """The visible devices, as `CUDA_VISIBLE_DEVICES` would name them."""
        return self.names or tuple(map(str, range(self.gpus)))

    def select(self, devices: tuple[str, ...]) -> dict[str, str]:
        """Return the variables with which a process sees only these devices."""
        return dict.fromkeys(self.selectors, ",".join(devices))


def read_hardware(gpus: int | None = None) -> Hardware:
    """Look at this machine; with `gpus`, as if it had so many GPUs."""
    if gpus is not None:
        return Hardware(gpus, count_cores(), bfloat16=has_bfloat16())
    gpus, selectors = find_gpus()
    visible = next(filter(None, map(os.environ.get, selectors)), "")
    names = tuple(named_devices(visible))[:gpus]
    linux = sys.platform.startswith("linux")
    return Hardware(gpus, count_cores(), linux, names, has_bfloat16(), selectors)


def find_gpus(
    nodes: Path = _AMD_NODES, renderers: Path = _RENDERERS
) -> tuple[int, tuple[str, ...]]:
    """Return how many GPUs torch will see, NVIDIA's or AMD's, and the variables that choose among them."""
    count = _count_nvidia()
    selectors = limits = _NVIDIA
    if not count and (count := _count_amd(nodes, renderers)):
        selectors, limits = _AMD, ("ROCR_VISIBLE_DEVICES", *_AMD)
    for variable in limits:
        visible = os.environ.get(variable)
        if visible is not None:
            count = min(count, len(named_devices(visible)))
    return count, selectors


def named_devices(visible: str) -> list[str]:
    """Return what a list like `CUDA_VISIBLE_DEVICES` names; it ends at the first entry that is empty or -1."""
    return list(takewhile(lambda name: name not in {"", "-1"}, map(str.strip, visible.split(","))))


def _count_nvidia() -> int:
    """Ask the driver, which knows containers and WSL.

    Source: NVIDIA's MIG user guide, "CUDA Device Enumeration": where GPUs are divided into instances, a process
    sees one of these, however many it names, and no whole GPU.
    """
    # Without a driver, pynvml's thousands of definitions would be loaded for nothing.
    if not has_nvidia_driver():
        return 0
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        count = int(pynvml.nvmlDeviceGetCount())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = None if visible is None else named_devices(visible)
        instance = any(name.startswith("MIG-") for name in names or ())
        return 1 if instance or any(_is_divided(index, names) for index in range(count)) else count
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


def has_nvidia_driver() -> bool:
    """Return whether NVIDIA's driver may be here; elsewhere than on Linux, its library tells itself."""
    try:
        return not sys.platform.startswith("linux") or bool(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        return False


def _is_divided(index: int, names: list[str] | None) -> bool:
    """Return whether a GPU of NVIDIA's is among `names`, by index or UUID, and divided into instances (MIG)."""
    import pynvml

    try:
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        if not pynvml.nvmlDeviceGetMigMode(gpu)[0]:
            return False
        if names is None or str(index) in names:
            return True
        # CUDA takes the beginning of a UUID too.
        return pynvml.nvmlDeviceGetUUID(gpu).startswith(tuple(names))
    except pynvml.NVMLError:
        return False


def _count_amd(nodes: Path, renderers: Path) -> int:
    count = 0
    for file in nodes.glob("*/properties"):
        properties = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
        # CPUs are nodes too, without compute units. A container shows all nodes, but only its own devices.
        renderer = renderers / f"renderD{properties.get('drm_render_minor')}"
        count += int(properties.get("simd_count", 0)) > 0 and renderer.exists()
    return count


def pick_device(launch: "LaunchConfig") -> Literal["cpu", "cuda"]:
    """Return where a process of this machine works, as torch sees it; imports torch."""
    import torch

    return "cuda" if torch.cuda.is_available() and not launch.use_cpu else "cpu"


def is_on_cpu(launch: "LaunchConfig", hardware: Hardware) -> bool:
    """Return whether a launch on this machine trains on the CPU; without importing torch."""
    return launch.use_cpu or hardware.gpus == 0


def resolve_num_processes(recipe: "Recipe", hardware: Hardware) -> int:
    """Return the worker processes over all machines; `auto` is worked out for this one.

    Training does not use the GPUs of a managed vLLM server.
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
    """Return what `auto` means on this machine: one process for each visible GPU, or 1 on a CPU."""
    return max(hardware.gpus, 1)


def read_available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP
) -> tuple[int | None, bool]:
    """Return the bytes of available memory, None if unknown; and whether a container's limit decides."""
    available = _read_entry(meminfo, "MemAvailable:", unit=1024)
    most, now = (_read_number(cgroup / name) for name in ("memory.max", "memory.current"))
    if available is not None and most is not None and now is not None:
        # Page cache that can be dropped counts as free.
        room = max(most - now + (_read_entry(cgroup / "memory.stat", "inactive_file") or 0), 0)
        if room < available:
            return room, True
    return available, False


def _read_entry(path: Path, key: str, unit: int = 1) -> int | None:
    """Return a number from a file of names and numbers; None if it is missing."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
        return next((int(row[1]) * unit for row in rows if row and row[0] == key), None)
    except (OSError, ValueError, IndexError):
        return None


_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of processors that multiply bfloat16: two of x86's, and ARM's."""


def usable_cpus() -> list[int]:
    """Return the processors that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def count_cores(cgroup: Path = CGROUP, topology: Path = _TOPOLOGY) -> int:
    """Return the number of cores that computing threads can keep busy.

    Two threads of one core share its arithmetic, so a core counts once; and a container gets no more than
    its quota of time, which torch does not see.
    """
    usable = usable_cpus()
    files = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in usable)
    try:
        cores = len({file.read_text() for file in files})
    except OSError:
        cores = len(usable)
    # Without a limit it is `max`.
    with suppress(OSError, ValueError):
        quota, period = map(int, (cgroup / "cpu.max").read_text().split())
        cores = max(min(cores, quota // period), 1)
    return cores


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool | None:
    """Return whether the processor computes in bfloat16 itself; None if the system does not tell.

    If not, torch converts each number to float32 and rounds back.
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
    """Return a port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raise `SetupError` if an address cannot be listened on."""
    with socket.socket() as probe:
        # As servers do: a connection that has just been closed does not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SetupError(
                f"{host}:{port} cannot be listened on ({reason})",
                "another --port, or another --host",
            ) from error


def cache_folder() -> Path:
    """Return the folder of things that can be made again: `$GRPO_CACHE`, or `grpo` in the user's cache."""
    if own := os.environ.get("GRPO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo"
