"""Checks of Python packages, environment variables, ports and the hub."""

import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata

from grpo_cli.issues import Issue, Level
from grpo_cli.launch.server_plan import GROUP_PORT
from grpo_cli.machine import is_free

_PROJECT = "grpo-cli"
_CENTRAL = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "vllm")
"""Shown one by one; others only if their version is wrong."""
_SERVER_PORT = 8000
"""Default of TRL's `vllm_server_port`."""
_LAUNCHER_NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
"""Launchers set these for their workers; in a shell they are leftovers."""
_NOTED = re.compile(
    r"(FSDP|DEEPSPEED|NCCL|GLOO|TORCH_NCCL|VLLM)_.*|(HF_HUB|TRANSFORMERS|HF_DATASETS)_OFFLINE|HF_ENDPOINT|HF_HOME"
    r"|WANDB_MODE|WANDB_DISABLED|PYTORCH_(CUDA_)?ALLOC_CONF|CUDA_LAUNCH_BLOCKING"
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD")
_HUB_TIMEOUT_S = 3.0


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

    subject, fix = f"package {name}", f'pip install "{name}{required}"'
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
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
    """Return variables with their values; secrets are left out."""
    return ", ".join(
        f"{name}={'…' if _SECRET.search(name) else _hide_login(environ[name])}" for name in names
    )


def _hide_login(address: str) -> str:
    return re.sub(r"//[^/@]+@", "//…@", address)


def check_ports() -> Iterator[Issue]:
    """Check the two default ports of `generation.vllm.mode: server`."""
    for port, key in ((_SERVER_PORT, "server_port"), (GROUP_PORT, "group_port")):
        subject, fix = (
            f"port {key}",
            f"set `generation.vllm.{key}`, or see `ss -ltnp sport = :{port}`",
        )
        if is_free(port):
            yield Issue(f"{port} is free", level="ok", subject=subject)
        else:
            yield Issue(f"{port} is taken", fix, level="note", subject=subject)


def check_hub() -> Iterator[Issue]:
    """Check whether the hub answers; being offline is no error."""
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
