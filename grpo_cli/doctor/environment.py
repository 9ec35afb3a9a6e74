"""Checks of Python packages, environment variables, limits, ports and the hub."""

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from grpo_cli.issues import Issue
from grpo_cli.launch.server_plan import GROUP_PORT
from grpo_cli.machine import is_free, usable_cpus

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
_LEAST_FILES = 1024
"""Linux's default; with fewer, worker processes and their pipes run out."""
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
    cpus, threads = usable_cpus(), environ.get("OMP_NUM_THREADS", "1").strip()
    bad_threads = not (threads.isdigit() and 1 <= int(threads) <= cpus)
    groups = {
        "launcher": [name for name in _LAUNCHER_NAMES if name in environ],
        "accelerate": sorted(name for name in environ if name.startswith("ACCELERATE_")),
        "threads": ["OMP_NUM_THREADS"] if bad_threads else [],
        "": sorted(filter(_NOTED.fullmatch, environ)),
    }
    harm = {
        "launcher": "set for the workers of another launch; a training started here may wait for processes that "
        "never come",
        "accelerate": "accelerate silently reads these besides the recipe",
        "threads": f"not between 1 and the {cpus} usable processors, so threads would wait for each other",
        "": "set in this shell, and read by the libraries underneath",
    }
    fixes = {
        "threads": f"export OMP_NUM_THREADS={cpus}, or unset OMP_NUM_THREADS",
        "": f"unset {' '.join(groups[''])} if you did not mean to",
    }
    for group, names in groups.items():
        if names:
            yield Issue(
                f"{_show(environ, names)}: {harm[group]}",
                fixes.get(group, f"unset {' '.join(names)}"),
                level="warning" if group else "note",
                subject=f"environment: {group}" if group else "environment",
            )
    if not any(groups.values()):
        yield Issue("no variable that changes a training is set", level="ok", subject="environment")


def _show(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """Return variables with their values; secrets are left out."""
    return ", ".join(
        f"{name}={'…' if _SECRET.search(name) else _hide_login(environ[name])}" for name in names
    )


def _hide_login(address: str) -> str:
    return re.sub(r"//[^/@]+@", "//…@", address)


def check_launcher_config(environ: Mapping[str, str] = os.environ) -> Iterator[Issue]:
    """Check for the file that `accelerate config` leaves behind: every later launch reads it."""
    home = environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    for path in (Path(home) / "accelerate").glob("default_config.*"):
        seen = (
            f"{path} exists: launches of several processes take from it what they do not set (`gpu_ids`, "
            "`debug`, …)"
        )
        fix = f"mv {path} {path}.off if it belongs to another project"
        yield Issue(seen, fix, level="note", subject="accelerate config")


def check_open_files() -> Iterator[Issue]:
    """Check how many files a process may hold open."""
    if sys.platform == "win32":
        return
    import resource

    # -1 is no limit.
    soft, hard = (
        65536 if limit == -1 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft >= _LEAST_FILES:
        yield Issue(f"{soft:,} a process", level="ok", subject="open files")
        return
    fix = "raise the limit `nofile` in /etc/security/limits.conf, then log in again"
    if hard >= _LEAST_FILES:
        fix = f"ulimit -n {min(hard, 65536)}"
    seen = f"{soft} a process, fewer than {_LEAST_FILES}: several workers would run out of them"
    yield Issue(seen, fix, level="warning", subject="open files")


def check_ports(server: int = _SERVER_PORT, group: int = GROUP_PORT) -> Iterator[Issue]:
    """Check the two default ports of `generation.vllm.mode: server`."""
    for subject, port, holder, key in (
        ("port vLLM server", server, "a server, perhaps yours", "server_port"),
        (
            "port weight transfer",
            group,
            "a training in server mode, or another program",
            "group_port",
        ),
    ):
        if is_free(port):
            yield Issue(f"{port} is free", level="ok", subject=subject)
        else:
            fix = f"see who has it with `ss -ltnp sport = :{port}`, or set `generation.vllm.{key}`"
            yield Issue(f"{port} is taken by {holder}", fix, level="note", subject=subject)


def check_hub() -> Iterator[Issue]:
    """Check whether the hub answers; being offline is no error."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import get_session

    endpoint, failure = _hide_login(constants.ENDPOINT), ""
    if constants.HF_HUB_OFFLINE:
        seen = "offline by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE: only cached files can be loaded"
        yield Issue(seen, "unset it to download", level="note", subject="hub")
    else:
        try:
            status = get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S).status_code
            failure = f"answers with status {status}" if status >= 400 else ""
        except Exception as error:  # httpx, ssl and socket have many
            failure = f"cannot be reached ({error}): only cached or local files load"
        if failure:
            fix = (
                "check HF_ENDPOINT and the proxy; or export HF_HUB_OFFLINE=1 so that nothing waits for it, and "
                "use local models and data"
            )
            yield Issue(f"{endpoint} {failure}", fix, level="note", subject="hub")
        else:
            yield Issue(f"{endpoint} answers", level="ok", subject="hub")
    if get_token():
        yield Issue("present (not shown, not sent)", level="ok", subject="hub token")
    else:
        seen = "none: gated models and private data cannot be loaded"
        yield Issue(seen, "hf auth login, or export HF_TOKEN", level="note", subject="hub token")
