"""Every check of a machine, in the order in which they are printed."""

import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_cli.doctor import child_checks
from grpo_cli.errors import pip
from grpo_cli.issues import Issue, Level
from grpo_cli.machine import CGROUP, find_gpus, named_devices, read_available_memory
from grpo_cli.runs.manifest import read_version

_PROJECT = "grpo-cli"
_CENTRAL = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "vllm")
"""Shown one by one; others only if their version is wrong."""
_LAUNCHER_NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
"""Launchers set these for their workers; in a shell they are leftovers."""
_NOTED = re.compile(
    r"(FSDP|DEEPSPEED|NCCL|GLOO|TORCH_NCCL|VLLM)_.*|(HF_HUB|TRANSFORMERS|HF_DATASETS)_OFFLINE|HF_ENDPOINT|HF_HOME"
    r"|WANDB_MODE|WANDB_DISABLED|PYTORCH_(CUDA_)?ALLOC_CONF|CUDA_LAUNCH_BLOCKING"
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD")
_HUB_TIMEOUT_S = 3.0
_GIB = 2**30
_BUSY_SHARE = 0.1
"""Memory in use above which a GPU is not free; a desktop session takes a few percent."""
LEAST_MEMORY_GIB = 1.0
"""TRL and torch alone take about half a GiB once imported, before any weight."""
SCARCE_MEMORY_GIB = 4.0
"""Full fine-tuning in float32 takes 16 bytes a weight: 0.25 billion weights fit into this."""
LEAST_DISK_GIB = 1.0
SCARCE_DISK_GIB = 10.0
"""One checkpoint in float32 takes 12 bytes a weight (weights and AdamW's two moments)."""
SCARCE_SHARED_GIB = 1.0
"""NCCL and vLLM's workers exchange tensors here; containers start with 0.06 GiB."""
_TEST_BYTES = 2**20


@dataclass(frozen=True)
class MachineReport:
    """What was found on a machine."""

    issues: tuple[Issue, ...]
    seconds: float

    def at(self, level: Level) -> list[Issue]:
        """Return the issues of one level."""
        return [issue for issue in self.issues if issue.level == level]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, for `--json`."""
        return {
            "healthy": not self.at("error"),
            "errors": len(self.at("error")),
            "warnings": len(self.at("warning")),
            "seconds": round(self.seconds, 1),
            "findings": [issue.as_json() for issue in self.issues],
        }


def diagnose_machine(
    runs: Path, *, quick: bool = False, on_progress: Callable[[str], None] = lambda text: None
) -> MachineReport:
    """Check this machine without changing it; `quick` leaves out what takes seconds."""
    began, gpus = time.monotonic(), find_gpus()[0]
    checks: list[Iterable[Issue]] = [
        check_packages(),
        check_gpus(),
        check_memory(),
        check_shared_memory(gpus),
        check_folders(runs),
        check_variables(),
    ]
    if not quick:
        checks += [child_checks.check_training(gpus, on_progress), check_hub()]
    issues = tuple(issue for check in checks for issue in check)
    return MachineReport(issues, time.monotonic() - began)


# --- packages and environment ------------------------------------------------------------------


def check_packages() -> Iterator[Issue]:
    """Check Python and the direct dependencies against the versions that this project declares."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    required, version = metadata.metadata(_PROJECT)["Requires-Python"], platform.python_version()
    if SpecifierSet(required).contains(version, prereleases=True):
        yield Issue(f"{version} (required: {required})", level="ok", subject="python")
    else:
        fix = "make an environment from a newer Python: python3.12 -m venv .venv"
        yield Issue(f"{version}, but {required} is required", fix, subject="python")
    others = 0
    for requirement in map(Requirement, metadata.requires(_PROJECT) or ()):
        marker = str(requirement.marker or "")
        if requirement.name == _PROJECT or 'extra == "dev"' in marker:
            continue
        # As people write it: the lower end first.
        versions = ",".join(sorted(str(requirement.specifier).split(","), reverse=True))
        issue = _check_package(requirement.name, versions, extra="extra" in marker)
        if issue and issue.level == "ok" and requirement.name not in _CENTRAL:
            others += 1
        elif issue:
            yield issue
    yield Issue(f"{others} others have the required versions", level="ok", subject="packages")


def _check_package(name: str, required: str, *, extra: bool) -> Issue | None:
    """Check one dependency; those of extras may be missing, and a wrong version of them is a warning."""
    from packaging.specifiers import SpecifierSet

    subject, fix = f"package {name}", pip(f'install "{name}{required}"')
    version = read_version(name)
    if version is None:
        return None if extra else Issue("is not installed", fix, subject=subject)
    if SpecifierSet(required).contains(version, prereleases=True):
        return Issue(f"{version} (required: {required or 'any'})", level="ok", subject=subject)
    seen = f"{version} is installed, but {_PROJECT} requires {required}"
    return Issue(seen, fix, level="warning" if extra else "error", subject=subject)


def check_variables(environ: Mapping[str, str] = os.environ) -> Iterator[Issue]:
    """Check for variables that override, or silently change, what a recipe says."""
    found: dict[str, tuple[list[str], str, Level]] = {
        "environment: launcher": (
            [name for name in _LAUNCHER_NAMES if name in environ],
            "set for the workers of another launch; a training started here may wait for processes that never "
            "come",
            "warning",
        ),
        "environment: accelerate": (
            sorted(name for name in environ if name.startswith("ACCELERATE_")),
            "accelerate silently reads these besides the recipe",
            "warning",
        ),
        "environment": (
            sorted(filter(_NOTED.fullmatch, environ)),
            "set in this shell, and read by the libraries underneath",
            "note",
        ),
    }
    for subject, (names, harm, level) in found.items():
        if names:
            seen, fix = f"{_show(environ, names)}: {harm}", f"unset {' '.join(names)}"
            fix += " if you did not mean to" if level == "note" else ""
            yield Issue(seen, fix, level=level, subject=subject)
    if not any(names for names, _, _ in found.values()):
        yield Issue("no variable that changes a training is set", level="ok", subject="environment")


def _show(environ: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(
        f"{name}={'…' if _SECRET.search(name) else _hide_login(environ[name])}" for name in names
    )


def _hide_login(address: str) -> str:
    return re.sub(r"//[^/@]+@", "//…@", address)


def check_hub() -> Iterator[Issue]:
    """Check whether the hub answers; being offline is not an error."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import get_session

    endpoint, failure = _hide_login(constants.ENDPOINT), ""
    if constants.HF_HUB_OFFLINE:
        failure = "is not asked (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)"
    else:
        try:
            status = get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S).status_code
            failure = f"answers with status {status}" if status >= 400 else ""
        except Exception as error:  # httpx, ssl and socket have many
            failure = f"cannot be reached ({error})"
    if failure:
        fix = "check HF_ENDPOINT, HF_HUB_OFFLINE and the proxy, or use local models and data"
        seen = f"{endpoint} {failure}: only cached or local files load"
        yield Issue(seen, fix, level="note", subject="hub")
    else:
        yield Issue(f"{endpoint} answers", level="ok", subject="hub")
    if get_token():
        yield Issue("present (not shown, not sent)", level="ok", subject="hub token")
    else:
        seen = "none: gated models and private data cannot be loaded"
        yield Issue(seen, "hf auth login, or export HF_TOKEN", level="note", subject="hub token")


# --- hardware ----------------------------------------------------------------------------------


def check_gpus() -> Iterator[Issue]:
    """Check the driver, the GPUs, what hides them and what else uses them."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        count = find_gpus()[0]
        seen = f"{count} GPUs by AMD" if count else "no GPU: training runs on the processor"
        yield Issue(seen, level="ok", subject="GPU")
        return
    except pynvml.NVMLError as error:
        yield _broken_driver(error)
        return
    try:
        count, driver = pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion()
        if not count:
            yield Issue("no GPU: training runs on the processor", level="ok", subject="GPU")
            return
        yield from _check_visibility(count)
        for index in range(count):
            yield from _check_gpu(index, driver)
    except pynvml.NVMLError as error:
        yield _broken_driver(error)
    finally:
        pynvml.nvmlShutdown()


def _broken_driver(error: Exception) -> Issue:
    fix = "see whether `nvidia-smi` works; reboot, or reload the kernel module nvidia"
    return Issue(f"the NVIDIA driver fails: {error}", fix, subject="GPU driver")


def _check_gpu(index: int, driver: str) -> Iterator[Issue]:
    """Describe a GPU, hidden ones too, and name the processes that fill its memory."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name, total, used, pids = pynvml.nvmlDeviceGetName(handle), 0.0, 0.0, ""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = memory.total / _GIB, memory.used / _GIB
        pids = " ".join(
            str(each.pid) for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        )
    except pynvml.NVMLError_NotSupported:
        pass  # memory shared with the processor
    size = f"{total:.0f} GiB, " if total else ""
    yield Issue(f"{name}, {size}driver {driver}", level="ok", subject=f"GPU {index}")
    if used > _BUSY_SHARE * total:
        used_by = f"processes {pids}" if pids else "processes that are not visible here"
        other = "use another device with CUDA_VISIBLE_DEVICES"
        yield Issue(
            f"{used:.1f} of {total:.1f} GiB are in use by {used_by}: a training sized for a free GPU runs out "
            "of memory",
            f"if they are yours, kill {pids}; or {other}" if pids else other,
            level="warning",
            subject=f"GPU {index} memory",
        )


def _check_visibility(present: int) -> Iterator[Issue]:
    """Check what `CUDA_VISIBLE_DEVICES` leaves of the GPUs."""
    visible, subject = os.environ.get("CUDA_VISIBLE_DEVICES"), "GPU visibility"
    if visible is None:
        return
    names = named_devices(visible)
    setting = f"CUDA_VISIBLE_DEVICES='{visible}'"
    if wrong := [name for name in names if name.isdigit() and int(name) >= present]:
        seen = (
            f"{setting} names device {', '.join(wrong)}, but there are {present}, numbered from 0: CUDA ignores "
            "it and all after it"
        )
        fix = f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(present)))}"
        yield Issue(seen, fix, subject=subject)
    elif not names:
        seen = f"{setting} hides all {present}: training runs on the processor"
        yield Issue(seen, "unset CUDA_VISIBLE_DEVICES", level="warning", subject=subject)
    elif len(names) < present:
        seen = f"{setting} leaves {len(names)} of {present}"
        fix = "unset CUDA_VISIBLE_DEVICES to use all"
        yield Issue(seen, fix, level="note", subject=subject)


def check_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> Iterator[Issue]:
    """Check the memory that is available now, within the container's limit."""
    available, limited = read_available_memory(meminfo, cgroup)
    if available is None:
        fix = "watch it while training"
        yield Issue("cannot be read on this system", fix, level="note", subject="memory")
        return
    gib = available / _GIB
    seen = f"{gib:.1f} GiB available{' within the limit of this container' if limited else ''}"
    if gib >= SCARCE_MEMORY_GIB:
        yield Issue(seen, level="ok", subject="memory")
        return
    level: Level = "error" if gib < LEAST_MEMORY_GIB else "warning"
    seen += ": too little to start a training" if level == "error" else ": little room for a model"
    more = "give the container more (docker run --memory)" if limited else "end other programs"
    fix = f"{more}, or train a smaller model with `model.lora`"
    yield Issue(seen, fix, level=level, subject="memory")


def check_shared_memory(gpus: int, folder: Path = Path("/dev/shm")) -> Iterator[Issue]:
    """Check shared memory: NCCL and vLLM end with a bus error if there is too little."""
    if not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free / _GIB
    seen, subject = f"{free:.2f} GiB free in {folder}", "shared memory"
    if free >= SCARCE_SHARED_GIB:
        yield Issue(seen, level="ok", subject=subject)
        return
    seen += ": several GPUs, or vLLM, may end with a bus error"
    fix = "start the container with --shm-size=8g or --ipc=host"
    yield Issue(seen, fix, level="warning" if gpus else "note", subject=subject)


def check_folders(runs: Path) -> Iterator[Issue]:
    """Check the folders that a training writes to."""
    cache = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    yield from check_folder("disk: runs", runs, "pass --runs FOLDER to grpo train")
    yield from check_folder("disk: hub cache", Path(cache), "export HF_HOME=FOLDER")
    # Nothing large goes there: being able to write is enough.
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    yield from check_folder("disk: temporary", temporary, "export TMPDIR=FOLDER", least_gib=0.1)


def check_folder(
    subject: str, folder: Path, fix: str, least_gib: float = LEAST_DISK_GIB
) -> Iterator[Issue]:
    """Write a temporary file to a folder, or to its nearest existing parent, and read the free space."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        yield Issue(f"{place} is a file, not a folder", fix, subject=subject)
        return
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * _TEST_BYTES)
    except OSError as error:
        seen = f"{place} cannot be written: {error.strerror or error}"
        yield Issue(seen, fix, subject=subject)
        return
    gib = shutil.disk_usage(place).free / _GIB
    seen = f"{gib:.1f} GiB free in {place}"
    level: Level = "error" if gib < least_gib else "warning"
    if level == "warning" and gib >= min(SCARCE_DISK_GIB, 10 * least_gib):
        yield Issue(seen, level="ok", subject=subject)
    else:
        fix = f"{fix}, on a disk with room"
        yield Issue(f"{seen}: checkpoints soon fill that", fix, level=level, subject=subject)
