"""NVIDIA devices as the driver sees them: there, visible, and free.

Asks `nvidia-smi` only; whether torch can compute on them is tried in `trials.py`.
"""

import csv
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_cli.issues import Finding
from grpo_cli.machine import count_gpus, named_devices

_TIMEOUT_S = 15.0
_BUSY_SHARE = 0.1
"""Memory in use above which a device is not free; a desktop session takes a few percent."""
_DEVICE_FIELDS = "index,uuid,name,driver_version,memory.total,memory.used"
_PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"


@dataclass(frozen=True)
class Gpu:
    """One device, as `nvidia-smi` describes it."""

    index: str
    uuid: str
    name: str
    driver: str
    total_mib: int | None
    used_mib: int | None
    """None where the driver does not tell, as with memory shared with the processor."""


class DriverError(Exception):
    """`nvidia-smi` is there and cannot answer; the text is its own."""


def read_gpus() -> list[Gpu]:
    """The devices of this machine, hidden ones too; empty where there is no driver.

    Raises:
        DriverError: The driver is there and does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    rows = _query("--query-gpu", _DEVICE_FIELDS)
    return [
        Gpu(index, uuid, name, driver, _number(total), _number(used))
        for index, uuid, name, driver, total, used in rows
    ]


def count_visible(gpus: list[Gpu]) -> int:
    """How many of the devices `CUDA_VISIBLE_DEVICES` leaves to a training."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus:
        return count_gpus()
    return len(gpus) if visible is None else min(len(gpus), len(named_devices(visible)))


def check_gpus(gpus: list[Gpu]) -> Iterator[Finding]:
    """Devices, what hides them, and who else uses them."""
    if not gpus:
        yield from _explain_none()
        return
    for gpu in gpus:
        memory = f"{gpu.total_mib / 1024:.0f} GiB, " if gpu.total_mib else ""
        seen = f"{gpu.name}, {memory}driver {gpu.driver}"
        yield Finding(f"GPU {gpu.index}", "ok", seen)
    yield from check_visibility(len(gpus))
    yield from _check_neighbours(gpus)


def _explain_none() -> Iterator[Finding]:
    present = count_gpus()
    if present:
        yield Finding(
            "GPU",
            "warning",
            f"there are {present}, but no nvidia-smi to ask about them",
            "install nvidia-utils of the driver's version; AMD's are counted, and not looked at",
        )
    else:
        yield Finding("GPU", "ok", "no GPU: training runs on the processor")


def explain_driver(error: DriverError) -> Finding:
    """What a driver that does not answer means."""
    return Finding(
        "GPU driver",
        "error",
        f"nvidia-smi fails: {error}",
        "reboot, or reload the kernel module (sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm)",
    )


def check_visibility(present: int) -> Iterator[Finding]:
    """What `CUDA_VISIBLE_DEVICES` leaves of the devices that are there."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return
    names = named_devices(visible)
    wrong = [name for name in names if name.isdigit() and int(name) >= present]
    subject = "GPU visibility"
    if wrong:
        yield Finding(
            subject,
            "error",
            f"CUDA_VISIBLE_DEVICES={visible} names device {', '.join(wrong)}, but there are {present}, "
            "numbered from 0: CUDA drops it and all after it",
            f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(present)))}",
        )
    elif not names:
        yield Finding(
            subject,
            "warning",
            f"CUDA_VISIBLE_DEVICES='{visible}' hides all {present}: training runs on the processor",
            "unset CUDA_VISIBLE_DEVICES",
        )
    elif len(names) < present:
        yield Finding(
            subject,
            "note",
            f"CUDA_VISIBLE_DEVICES={visible} leaves {len(names)} of {present}",
            "unset CUDA_VISIBLE_DEVICES to use all",
        )


def _check_neighbours(gpus: list[Gpu]) -> Iterator[Finding]:
    try:
        holders = _query("--query-compute-apps", _PROCESS_FIELDS)
    except DriverError:
        holders = []
    for gpu in gpus:
        if not gpu.total_mib or gpu.used_mib is None:
            continue
        if gpu.used_mib < _BUSY_SHARE * gpu.total_mib:
            continue
        mine = [row for row in holders if row[0] == gpu.uuid]
        who = "; ".join(f"process {pid} ({name}) {used} MiB" for _, pid, name, used in mine)
        pids = " ".join(row[1] for row in mine)
        yield Finding(
            f"GPU {gpu.index} memory",
            "warning",
            f"{gpu.used_mib} of {gpu.total_mib} MiB are in use"
            f"{f' by {who}' if who else ', by processes this one cannot see'}: "
            "a training sized for a free device runs out of memory",
            f"if they are yours, kill {pids}; or choose another device with CUDA_VISIBLE_DEVICES"
            if pids
            else "choose another device with CUDA_VISIBLE_DEVICES",
        )


def _query(what: str, fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"{what}={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise DriverError(f"no answer within {_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise DriverError(str(error)) from error
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()
        raise DriverError(said[-1] if said else f"exit code {done.returncode}")
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines)]
    wanted = fields.count(",") + 1
    if any(len(row) != wanted for row in rows):
        raise DriverError(f"it answers {lines[-1].strip()}")
    return rows


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
