"""`manifest.json`: what a run was made of, so that it can be told apart and repeated."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_cli.machine import usable_cpus
from grpo_cli.runs.files import SCHEMA_VERSION

PACKAGES = (
    "grpo-cli trl transformers torch accelerate peft datasets tokenizers vllm math-verify "
    "reasoning-gym bitsandbytes deepspeed"
).split()


def describe_origin(argv: list[str], recipe_path: Path, seed: int) -> dict[str, Any]:
    """What is known before the launch: command, versions, git, machine.

    The worker adds what only it sees (accelerators, data) under its own keys.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "argv": argv,
        "recipe": str(recipe_path.resolve()),
        "seed": seed,
        "python": platform.python_version(),
        "versions": read_versions(),
        "git": read_git(recipe_path.resolve().parent),
        "hardware": {
            "host": platform.node(),
            "platform": platform.platform(),
            "machine": platform.machine(),
            "cpus": usable_cpus(),
            "memory_gib": _memory_gib(),
        },
        "executable": sys.executable,
    }


def read_versions() -> dict[str, str | None]:
    """The installed version of each package that matters; None where it is missing."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def read_git(folder: Path) -> dict[str, Any] | None:
    """Revision and dirtiness of the checkout a folder lies in; None outside of one."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None
    return {"revision": revision, "dirty": bool(_git(folder, "status", "--porcelain"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _memory_gib() -> float | None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    return round(size / 2**30, 1)
