"""`manifest.json`: what a run was made of, so that it can be identified and repeated."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_cli.machine import usable_cpus
from grpo_cli.runs.files import SCHEMA_VERSION

_PACKAGES = (
    "grpo-cli trl transformers torch accelerate peft datasets tokenizers vllm math-verify "
    "reasoning-gym bitsandbytes deepspeed"
).split()


def describe_origin(argv: list[str], recipe_path: Path, seed: int) -> dict[str, Any]:
    """Return what is known before the launch: command, versions, git, machine.

    The worker adds what only it sees (accelerators, data) under its own keys.
    """
    path = recipe_path.resolve()
    return {
        "schema_version": SCHEMA_VERSION,
        "argv": argv,
        "recipe": str(path),
        "seed": seed,
        "python": platform.python_version(),
        "versions": {name: read_version(name) for name in _PACKAGES},
        "git": _read_git(path.parent),
        "hardware": {
            "host": platform.node(),
            "platform": platform.platform(),
            "machine": platform.machine(),
            "cpus": len(usable_cpus()),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
        },
        "executable": sys.executable,
    }


def read_version(name: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _read_git(folder: Path) -> dict[str, Any] | None:
    """Return the revision of the checkout that a folder lies in; None outside of one, or without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
