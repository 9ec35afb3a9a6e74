"""This machine's processors: how many a process may use, and what they compute in. Without torch."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where a container's limits stand."""
_CPUINFO = Path("/proc/cpuinfo")
_TOPOLOGY = Path("/sys/devices/system/cpu")
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
