"""What is tried in a process of its own: `python -m grpo_cli.doctor.child_checks TRIAL …`.

Runs the named trials in order and writes one JSON line when a trial begins and one when it ends, so
that whoever reads them knows which one a crash or a hang belongs to. Judges nothing: that is
`trials.py`. A trial that fails is the last: what it left half done could spoil the next.
"""

import importlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import IO, Any

_IMPORTS = {
    "trl": ("trl", "GRPOTrainer"),
    "transformers": ("transformers", "PreTrainedModel"),
    "vllm": ("vllm", "LLM"),
}
"""Packages that load their parts late, and a name whose asking loads what a training will load."""


def try_import(name: str) -> dict[str, Any]:
    """Imports a package far enough that its compiled parts are loaded."""
    module_name, attribute = _IMPORTS.get(name, (name, None))
    module = importlib.import_module(module_name)
    if attribute is not None:
        getattr(module, attribute)
    origin = getattr(module, "__file__", None)
    return {"origin": origin, "platform": _vllm_platform() if name == "vllm" else None}


def _vllm_platform() -> str:
    """The kind of device vLLM has found; empty where it has found none."""
    return importlib.import_module("vllm.platforms").current_platform.device_type


def try_devices(_: str) -> dict[str, Any]:
    """What torch was built for, and what it sees."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        why = "" if available or not torch.version.cuda else _why_no_cuda(torch)
    count = torch.cuda.device_count() if available else 0
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "available": available,
        "why": str(caught[0].message) if caught else why,
        "capabilities": [list(torch.cuda.get_device_capability(index)) for index in range(count)],
        "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        "mps": torch.backends.mps.is_available(),
    }


def _why_no_cuda(torch: Any) -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return _last_line(error)
    return ""


def try_step(kind: str) -> list[dict[str, Any]]:
    """One optimizer step of a tiny model on every device of a kind, `cpu` or `cuda`."""
    import torch

    count = torch.cuda.device_count() if kind == "cuda" else 1
    names = [f"cuda:{index}" for index in range(count)] if kind == "cuda" else ["cpu"]
    return [_step_on(name) for name in names]


def _step_on(device: str) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    began = time.monotonic()
    try:
        model = LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.arange(32, device=device).reshape(2, 16)
        losses = []
        for _ in range(2):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    except Exception as error:  # any failure of any device is the answer
        return {"device": device, "error": _last_line(error)}
    return {"device": device, "losses": losses, "seconds": time.monotonic() - began}


def try_hub(_: str) -> dict[str, Any]:
    """One short request to the hub, the way the libraries make theirs: proxy, certificates, address."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import get_session

    offline = constants.HF_HUB_OFFLINE
    status, failure = 0, ""
    if not offline:
        try:
            status = get_session().head(constants.ENDPOINT, timeout=3).status_code
        except Exception as error:  # httpx, ssl and socket have many
            failure = _last_line(error)
    return {
        "endpoint": constants.ENDPOINT,
        "offline": offline,
        "status": status,
        "failure": failure,
        "token": get_token() is not None,
    }


_TRIALS: dict[str, Callable[[str], Any]] = {
    "import": try_import,
    "devices": try_devices,
    "step": try_step,
    "hub": try_hub,
}


def _last_line(error: BaseException) -> str:
    """The last line of an error, or of the one it was raised from: packages wrap what really broke."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {lines[-1].strip()}" if lines else name


def run_trials(names: list[str], output: IO[str]) -> bool:
    """Runs trials such as `import:torch` in order, up to the first that fails."""
    for name in names:
        _write(output, {"trial": name, "state": "begun"})
        began = time.monotonic()
        kind, _, argument = name.partition(":")
        try:
            value, error = _TRIALS[kind](argument), None
        except BaseException as caught:  # some packages raise SystemExit on import
            value, error = None, _last_line(caught)
        seconds = round(time.monotonic() - began, 2)
        _write(
            output,
            {"trial": name, "state": "ended", "value": value, "error": error, "seconds": seconds},
        )
        if error is not None:
            return False
    return True


def _write(output: IO[str], line: dict[str, Any]) -> None:
    output.write(json.dumps(line) + "\n")
    output.flush()


def main() -> None:
    """Keeps the real stdout for the answers; what libraries print goes to stderr."""
    # An interrupt ends the process; as an exception it would pass for a failed trial.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    complete = run_trials(sys.argv[1:], answers)
    answers.close()
    # Without the clean-up of half-loaded libraries, which is where some of them hang.
    os._exit(0 if complete else 1)


if __name__ == "__main__":
    main()
