"""Trainings that sample with a real vLLM, on the CPU: recipes, commands, processes, and a server to share.

The fixtures `wide_model`, `shared_server` and `colocated_run` in `conftest.py` use this.
"""

import contextlib
import importlib.util
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from grpo_cli.servers.ports import pick_free_port
from grpo_cli.servers.process import answers
from tests.integration.conftest import RECIPE, Workshop

NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""GiB for keys and values; a share of the machine's memory may be less than vLLM's worker itself takes."""
EAGER = {"VLLM_CPU_CI_ENV": "1"}
"""vLLM's own switch for tests on a CPU: no compilation, no warm-up."""
MANAGED = "mode: server, server_args: {{enforce-eager: true}}"
"""For `workshop_of`: a server that `grpo train` starts, sooner without compilation."""
AGREEMENT = 0.06
"""Mean absolute difference between vLLM's and the trainer's log-probabilities, in bf16."""
# Every group has a signal, so that every step moves the weights.
SPREAD = """\
def spread(completion_ids, **kwargs):
    return [sum(ids) / 1000 for ids in completion_ids]
"""
_shared: list[psutil.Process] = []


def workshop_of(folder: Path, model: Path, vllm: str) -> Workshop:
    """A workshop whose recipe samples with vLLM, set up as `vllm` says."""
    workshop = Workshop(folder, model)
    (folder / "spread.py").write_text(SPREAD)
    text = RECIPE.replace("dtype: float32", "dtype: bfloat16").replace(
        "rewards:\n", "rewards:\n  - {{kind: python, path: ./spread.py:spread, name: spread}}\n"
    )
    settings = f"{{{{gpu_memory_utilization: 0.05, max_model_length: 256, {vllm}}}}}"
    text = text.replace("generation:\n", f"generation:\n  backend: vllm\n  vllm: {settings}\n")
    workshop.write(text)
    return workshop


def sets(steps: int, rate: str = "1e-2", **more: object) -> list[str]:
    """Flags for a training of so many steps, without evaluation."""
    values = {"max_steps": steps, "learning_rate": rate, "warmup_steps": 0, **more}
    named = [f"training.{key}={value}" for key, value in values.items()]
    return [part for text in [*named, "evaluation.limit=0"] for part in ("--set", text)]


def train(workshop: Workshop, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Train the workshop's recipe to the end."""
    recipe = workshop.folder / "recipe.yaml"
    done = workshop.grpo("train", recipe, *flags, **ENVIRONMENT, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def start(workshop: Workshop, *flags: str):
    """Start a training in the background; return its process and a function that waits for a step."""
    recipe = workshop.folder / "recipe.yaml"
    command = workshop.command("train", recipe, *flags, **ENVIRONMENT)
    process = subprocess.Popen(**command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)

    def reach(step: int, limit_s: float = 240) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                pytest.fail(process.communicate()[1][-3000:])
            written = list((workshop.folder / "runs").glob("*/*/metrics.jsonl"))
            if written and any(record["step"] >= step for record in workshop.records("train")):
                return
            time.sleep(0.2)
        pytest.fail(f"step {step} was not reached")

    return process, reach


def differences(workshop: Workshop) -> list[float]:
    """By step, the mean difference between vLLM's and the trainer's log-probabilities."""
    return [
        record["sampling/sampling_logp_difference/mean"] for record in workshop.records("train")
    ]


def descendants() -> list[psutil.Process]:
    """All living processes that the tests' commands started, without those of the shared server."""
    shared = [each for root in _shared for each in (root, *root.children(recursive=True))]
    children = psutil.Process().children(recursive=True)
    return [each for each in children if each not in shared and is_alive(each)]


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class SharedServer:
    """A server that `grpo serve` runs for trainings, and the first training that sampled from it."""

    process: subprocess.Popen[str]
    """The `grpo serve` command."""
    announcement: str
    """The first line that it printed."""
    address: str
    """Its root, for `generation.vllm.base_url`."""
    first: Workshop
    """Holds the run of a training that began before the server answered, with dynamic sampling."""

    @property
    def settings(self) -> str:
        """What `workshop_of` takes."""
        return f"mode: server, base_url: {self.address}"


@contextlib.contextmanager
def serving(folder: Path, model: Path) -> Iterator[SharedServer]:
    """Start a server for trainings and train from it at once; end it with Ctrl-C."""
    port = str(pick_free_port())
    address = f"http://127.0.0.1:{port}"
    workshop = workshop_of(folder, model, f"mode: server, base_url: {address}")
    flags = ["--gpu-memory-utilization", "0.05", "--max-model-len", "256", "--port", port]
    command = workshop.command("serve", folder / "recipe.yaml", *flags, **ENVIRONMENT)
    process = subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    root = psutil.Process(process.pid)
    _shared.append(root)
    try:
        assert not answers(f"{address}/health")
        first = train_dynamic(folder / "first", model, f"mode: server, base_url: {address}")
        yield SharedServer(process, process.stdout.readline(), address, first)
    finally:
        children = root.children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        _shared.remove(root)
    _, left = psutil.wait_procs(children, timeout=10)
    assert not left


def train_dynamic(
    folder: Path, model: Path, vllm: str, *flags: str, **environment: str
) -> Workshop:
    """Train with vLLM on rows of which three in four have no signal, and are replaced."""
    from tests.integration.test_dynamic_sampling import workshop_of as workshop_of_silent_rows

    workshop = workshop_of_silent_rows(folder, model)
    settings = f"{{gpu_memory_utilization: 0.05, max_model_length: 256, {vllm}}}"
    values = ["generation.backend=vllm", f"generation.vllm={settings}", "model.dtype=bfloat16"]
    values.append("logging.log_completions=true")
    more = [part for value in values for part in ("--set", value)]
    train(workshop, *sets(4), *more, *flags, **environment)
    return workshop
