"""Under which conditions runs were made, and in what another run differs: hardware, versions, settings, data.

Owns what is recorded of them. The hashes of settings are `recipe.fingerprint`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Literal

from grpo_cli.analysis.expectations.run_metrics import RunMetrics
from grpo_cli.recipe.expect import MeasuredConfig
from grpo_cli.recipe.fingerprint import fingerprint_settings
from grpo_cli.recipe.recipe import Recipe

_PACKAGES = ("grpo-cli", "trl", "transformers", "torch", "accelerate", "datasets")
_DIGITS = 12
"""Digits of the data's fingerprint that are kept."""


@dataclass(frozen=True)
class Mismatch:
    """One condition in which a run is not like those that were measured."""

    condition: Literal["hardware", "versions", "settings", "data"]
    details: tuple[str, ...]
    """What differs, in words."""

    def __str__(self) -> str:
        return f"measured {_OTHER[self.condition]} ({', '.join(self.details)})"


_OTHER = {
    "hardware": "on other hardware",
    "versions": "with other versions",
    "settings": "with other settings",
    "data": "on other data",
}


def describe_conditions(runs: Sequence[tuple[RunMetrics, Recipe]]) -> MeasuredConfig:
    """What a block says of the runs it was made from."""
    manifests = [evidence.run.read_manifest() for evidence, _ in runs]
    seen = [
        _versions(manifest, recipe) for manifest, (_, recipe) in zip(manifests, runs, strict=True)
    ]
    data = {_read_data(manifest) for manifest in manifests}
    began = max(evidence.status.started_at for evidence, _ in runs)
    return MeasuredConfig(
        runs=tuple(evidence.name for evidence, _ in runs),
        seeds=tuple(recipe.seed for _, recipe in runs),
        hardware=tuple(dict.fromkeys(filter(None, map(_hardware, manifests)))),
        versions={
            name: tuple(dict.fromkeys(each[name] for each in seen if name in each))
            for name in dict.fromkeys(name for each in seen for name in each)
        },
        date=date.isoformat(datetime.fromtimestamp(began)),
        settings=fingerprint_settings(runs[0][1]),
        data=data.pop() if len(data) == 1 else None,
    )


def list_mismatches(measured: MeasuredConfig, run: RunMetrics, recipe: Recipe) -> list[Mismatch]:
    """In what a run differs from those that were measured; what either does not say is left out."""
    manifest = run.run.read_manifest()
    found = {
        "hardware": _compare_hardware(measured, _hardware(manifest)),
        "versions": _compare_versions(measured, _versions(manifest, recipe)),
        "settings": _compare_settings(measured, fingerprint_settings(recipe)),
        "data": _compare_data(measured, _read_data(manifest)),
    }
    return [Mismatch(name, details) for name, details in found.items() if details]  # type: ignore[arg-type]


def _compare_hardware(measured: MeasuredConfig, here: str | None) -> tuple[str, ...]:
    if not measured.hardware or here is None or here in measured.hardware:
        return ()
    return (f"{' or '.join(measured.hardware)}; here {here}",)


def _compare_versions(measured: MeasuredConfig, here: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        f"{name} {' or '.join(then)}, here {here[name]}"
        for name, then in measured.versions.items()
        if name in here and here[name] not in then
    )


def _compare_settings(measured: MeasuredConfig, here: Mapping[str, str]) -> tuple[str, ...]:
    if not measured.settings:
        return ()
    names = dict.fromkeys([*measured.settings, *here])
    return tuple(name for name in names if measured.settings.get(name) != here.get(name))


def _compare_data(measured: MeasuredConfig, here: str | None) -> tuple[str, ...]:
    if None in (measured.data, here) or measured.data == here:
        return ()
    return (f"fingerprint {measured.data}, here {here}",)


def _hardware(manifest: Mapping[str, Any]) -> str | None:
    """Such as `2 CPU cores (x86_64), 24 GiB`, with the accelerator before it where there is one."""
    machine, device = manifest.get("hardware") or {}, manifest.get("accelerator") or {}
    if not machine.get("cpus"):
        return None
    cores = f"{machine['cpus']} CPU cores ({machine.get('machine', 'unknown')})"
    memory = [f"{machine['memory_gib']:.0f} GiB"] if machine.get("memory_gib") else []
    named = [str(device["device"])] if device.get("device") not in (None, "cpu") else []
    return ", ".join([*named, cores, *memory])


def _versions(manifest: Mapping[str, Any], recipe: Recipe) -> dict[str, str]:
    """Of what decides what is trained: the adapter's library and the sampler only where they take part."""
    lora, sampler = recipe.model.lora is not None, recipe.generation.backend == "vllm"
    wanted = [*_PACKAGES, *(["peft"] if lora else []), *(["vllm"] if sampler else [])]
    known = manifest.get("versions") or {}
    return {name: str(known[name]) for name in wanted if known.get(name)}


def _read_data(manifest: Mapping[str, Any]) -> str | None:
    found = (manifest.get("data") or {}).get("fingerprint")
    return str(found)[:_DIGITS] if found else None
