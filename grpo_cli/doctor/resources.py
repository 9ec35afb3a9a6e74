"""Memory, processors and disk: how much there is, and whether a file can really be written."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from grpo_cli.issues import Finding, FindingLevel
from grpo_cli.machine import CGROUP, read_available_memory, read_cpu_quota, usable_cpus

_GIB = 2**30
LEAST_MEMORY_GIB = 1.0
"""TRL and torch alone hold about half a GiB once imported, before any weight."""
SCARCE_MEMORY_GIB = 4.0
"""Full fine-tuning in float32 takes 16 bytes a weight: 0.25 billion weights fit into this."""
LEAST_DISK_GIB = 1.0
SCARCE_DISK_GIB = 10.0
"""One checkpoint in float32 takes 12 bytes a weight (weights and AdamW's two moments)."""
SCARCE_SHARED_GIB = 1.0
"""NCCL and vLLM's workers exchange tensors here; containers start with 0.06 GiB."""
_PROBE_BYTES = 2**20


def check_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> Iterator[Finding]:
    """Memory that a training could take now, with a container's limit counted in."""
    available, limited = read_available_memory(meminfo, cgroup)
    if available is None:
        yield Finding("memory", "note", "cannot be read on this system", "watch it while training")
        return
    gib = available / _GIB
    within = " within this container's limit" if limited else ""
    seen = f"{gib:.1f} GiB available{within}"
    if gib >= SCARCE_MEMORY_GIB:
        yield Finding("memory", "ok", seen)
        return
    more = "give the container more (docker run --memory)" if limited else "end other programs"
    too_little = gib < LEAST_MEMORY_GIB
    yield Finding(
        "memory",
        "error" if too_little else "warning",
        f"{seen}: {'too little even to start' if too_little else 'little room for a model'}",
        f"{more}, or take a smaller model with `model.lora`",
    )


def check_processors(cgroup: Path = CGROUP) -> Iterator[Finding]:
    """Usable processors against a container's quota, which torch does not see."""
    cpus, quota = usable_cpus(), read_cpu_quota(cgroup)
    if quota is None or quota >= cpus - 0.5:
        yield Finding("processors", "ok", f"{cpus} usable")
        return
    threads = max(int(quota), 1)
    yield Finding(
        "processors",
        "warning",
        f"{cpus} are visible, but this container gets the time of {quota:g}: training starts no more "
        "threads than that, other programs would start one for each visible one",
        f"export OMP_NUM_THREADS={threads}, or give the container more (docker run --cpus)",
    )


def check_shared_memory(gpus: int, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Shared memory: with a GPU, too little of it ends NCCL and vLLM with a bus error."""
    if not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free / _GIB
    if free >= SCARCE_SHARED_GIB:
        yield Finding("shared memory", "ok", f"{free:.1f} GiB free in {folder}")
        return
    yield Finding(
        "shared memory",
        "warning" if gpus else "note",
        f"{free:.2f} GiB free in {folder}: several GPUs, or vLLM, may end with a bus error",
        "start the container with --shm-size=8g or --ipc=host; else "
        f"sudo mount -o remount,size=8G {folder}",
    )


def check_folders(runs: Path) -> Iterator[Finding]:
    """Every folder that a training writes to: written for a moment, and free space."""
    cache = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    yield from check_folder("disk: runs", runs, "pass --runs FOLDER to grpo train")
    yield from check_folder("disk: hub cache", Path(cache), "export HF_HOME=FOLDER")
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        yield Finding("disk: temporary", "error", str(error), "export TMPDIR=FOLDER")
        return
    # Nothing large goes there: being able to write is enough.
    yield from check_folder("disk: temporary", temporary, "export TMPDIR=FOLDER", least_gib=0.1)


def check_folder(
    subject: str, folder: Path, elsewhere: str, least_gib: float = LEAST_DISK_GIB
) -> Iterator[Finding]:
    """Writes a small file where a folder is, or would be made, takes it away, and reads the space."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    other = f"{elsewhere}, on a disk with room"
    if not place.is_dir():
        yield Finding(subject, "error", f"{place} is a file, not a folder", elsewhere)
        return
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        seen = f"{place} cannot be written: {error.strerror or error}"
        yield Finding(subject, "error", seen, other if full else elsewhere)
        return
    gib = shutil.disk_usage(place).free / _GIB
    level: FindingLevel = "ok"
    if gib < least_gib:
        level = "error"
    elif gib < min(SCARCE_DISK_GIB, 10 * least_gib):
        level = "warning"
    seen = f"{gib:.1f} GiB free in {place}"
    if level == "ok":
        yield Finding(subject, level, seen)
    else:
        yield Finding(subject, level, f"{seen}: checkpoints soon fill that", other)
