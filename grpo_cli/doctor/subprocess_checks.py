"""Runs the trials of `child_checks.py` in child processes.

Owns those processes: a crash, a hang or a broken library in one of them costs that trial alone. What
the results mean is said in `verdicts.py`.
"""

import importlib.util
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from grpo_cli.processes import run_module

_WORKBENCH = "grpo_cli.doctor.child_checks"
IMPORT_TIMEOUT_S = 180.0
"""For all imports of one process; a cold network disk takes a minute or two."""
_IMPORT_ORDER = (
    "torch",
    "triton",
    "torchvision",
    "torchaudio",
    "torchcodec",
    "bitsandbytes",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "deepspeed",
    "vllm",
    "trl",
    "math_verify",
)
"""A package stands before those that import it, so that a failure is laid at the right door."""
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class TrialResult:
    """How one trial ended."""

    name: str
    value: Any
    error: str | None
    """The last line of what was raised, or how the process died; None where all went well."""
    seconds: float | None
    interrupted: bool = False
    """Whether somebody pressed Ctrl-C, which reaches the child too."""


def run_trials(
    names: list[str],
    on_progress: Callable[[str], None] = lambda text: None,
    timeout_s: float = IMPORT_TIMEOUT_S,
) -> dict[str, TrialResult]:
    """Runs trials in child processes; after one that fails, the rest go on in a fresh process."""
    results: dict[str, TrialResult] = {}
    left = list(names)
    while left:
        for result in _run_child(left, on_progress, timeout_s):
            results[result.name] = result
        left = [name for name in left if name not in results]
        if any(result.interrupted for result in results.values()):
            return results
        torch = results.get("import:torch")
        if torch is not None and torch.error is not None:
            # Everything else would fail for the same reason.
            return results
    return results


def _run_child(
    names: list[str], on_progress: Callable[[str], None], timeout_s: float
) -> Iterator[TrialResult]:
    with tempfile.TemporaryFile() as noise:
        child = subprocess.Popen(
            [*run_module(_WORKBENCH), *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=noise,
            text=True,
            env={**QUIET, **os.environ},
        )
        timer = threading.Timer(timeout_s, child.kill)
        timer.start()
        running = names[0]
        ended = 0
        try:
            for line in child.stdout or ():
                answer = json.loads(line)
                running = answer["trial"]
                if answer["state"] == "begun":
                    on_progress(running.replace(":", " "))
                    continue
                ended += 1
                yield TrialResult(running, answer["value"], answer["error"], answer["seconds"])
                failed = answer["error"] is not None
                if failed or ended == len(names):
                    return
        finally:
            late = not timer.is_alive()
            timer.cancel()
            child.kill()
            code = child.wait()
            if child.stdout:
                child.stdout.close()
        error = f"no end within {timeout_s:g} s" if late else _explain_death(code, noise)
        yield TrialResult(running, None, error, None, interrupted=code == -signal.SIGINT)


def _explain_death(code: int, noise: IO[bytes]) -> str:
    noise.seek(0)
    lines = noise.read()[-4000:].decode(errors="replace").strip().splitlines()
    last = f" ({lines[-1].strip()})" if lines else ""
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}{last}"
    return f"the process ended with exit code {code}{last}"


def list_imports() -> list[str]:
    """The packages worth importing: those of the order above that are installed."""
    return [name for name in _IMPORT_ORDER if importlib.util.find_spec(name) is not None]
