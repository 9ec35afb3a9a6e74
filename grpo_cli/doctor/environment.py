"""Environment variables and limits of this shell that change what a training does."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from grpo_cli.issues import Finding
from grpo_cli.machine import usable_cpus

_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set by launchers for their workers; in a shell they are left over from something else."""
_TELLING_PREFIXES = ("FSDP_", "DEEPSPEED_", "NCCL_", "GLOO_", "TORCH_NCCL_", "VLLM_")
_TELLING_NAMES = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "HF_ENDPOINT",
    "HF_HOME",
    "WANDB_MODE",
    "WANDB_DISABLED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_LAUNCH_BLOCKING",
)
_SECRET_PARTS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_FEWEST_FILES = 1024
"""Linux's own default; below it worker processes and their pipes run out."""


def check_environment(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Variables that override, or silently change, what a recipe says."""
    found = [*_check_ranks(environ), *_check_accelerate(environ), *_check_threads(environ)]
    yield from found
    names = [
        name
        for name in sorted(environ)
        if name in _TELLING_NAMES or name.startswith(_TELLING_PREFIXES)
    ]
    if names:
        yield Finding(
            "environment",
            "note",
            f"{_show(environ, names)}: set in this shell, and read by the libraries underneath",
            f"unset {' '.join(names)} if you did not mean to",
        )
    elif not found:
        yield Finding("environment", "ok", "no variable that changes a training is set")


def _show(environ: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={_hide(name, environ[name])}" for name in names)


def _hide(name: str, value: str) -> str:
    return "…" if any(part in name for part in _SECRET_PARTS) else hide_login(value)


def hide_login(address: str) -> str:
    """An address without the name and password it may carry."""
    return re.sub(r"//[^/@]+@", "//…@", address)


def _check_ranks(environ: Mapping[str, str]) -> Iterator[Finding]:
    left = [name for name in _RANK_NAMES if name in environ]
    if left:
        yield Finding(
            "environment: launcher",
            "warning",
            f"{_show(environ, left)}: set for the workers of another launch; a training "
            "started here may wait for processes that never come",
            f"unset {' '.join(left)}",
        )


def _check_accelerate(environ: Mapping[str, str]) -> Iterator[Finding]:
    found = [name for name in sorted(environ) if name.startswith("ACCELERATE_")]
    if found:
        yield Finding(
            "environment: accelerate",
            "warning",
            f"{_show(environ, found)}: accelerate reads these besides what the recipe says, without a word",
            f"unset {' '.join(found)}",
        )


def check_launcher_config(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The file that `accelerate config` leaves behind: every later launch reads it."""
    home = environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    folder = Path(home) / "accelerate"
    for name in ("default_config.yaml", "default_config.json"):
        path = folder / name
        if path.is_file():
            yield Finding(
                "accelerate config",
                "note",
                f"{path} exists: what a launch of several processes leaves open (`gpu_ids`, "
                "`debug`, …) is taken from it",
                f"mv {path} {path}.off if it belongs to another project",
            )


def _check_threads(environ: Mapping[str, str]) -> Iterator[Finding]:
    text = environ.get("OMP_NUM_THREADS")
    if text is None:
        return
    cpus = usable_cpus()
    threads = int(text) if text.strip().isdigit() else 0
    if not 1 <= threads <= cpus:
        yield Finding(
            "environment: threads",
            "warning",
            f"OMP_NUM_THREADS={text} with {cpus} usable processors: threads would wait for each other",
            f"export OMP_NUM_THREADS={cpus}, or unset OMP_NUM_THREADS",
        )


def check_open_files() -> Iterator[Finding]:
    """How many files a process may hold open."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= _FEWEST_FILES:
        count = "any number" if soft == unlimited else str(soft)
        yield Finding("open files", "ok", f"{count} a process")
        return
    most = 65536 if hard == unlimited else hard
    fix = f"ulimit -n {min(most, 65536)}"
    if most < _FEWEST_FILES:
        fix = "have the hard limit `nofile` raised in /etc/security/limits.conf, then log in again"
    yield Finding(
        "open files",
        "warning",
        f"{soft} a process, fewer than {_FEWEST_FILES}: several workers would run out of them",
        fix,
    )
