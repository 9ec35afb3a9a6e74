"""Trainings that sample with a real vLLM, on the CPU: recipes, commands, processes, and a server to share.

One file of tests for what each process of `make test-vllm` does at a time: `test_vllm_managed.py`, whose trainings
start servers; `test_vllm_server.py`, whose trainings share one; and `test_vllm.py`, which needs none.
"""

import contextlib
import importlib.util
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from grpo_cli.launch.server_process import answers
from grpo_cli.machine import pick_free_port
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
LORA = "model.lora={r: 8, target_modules: all-linear}"
ASYNC = ("--set", "training.mode=async", "--set", "training.asynchronous.max_staleness=2")
AGREEMENT = 0.06
"""Mean absolute difference between vLLM's and the trainer's log-probabilities, in bf16."""
# Every group has a signal, so that every step moves the weights.
# vLLM is given the weights of the first steps, and of no later one.
SKIP_LATER_SYNCS = """\
from grpo_cli.training.vllm_generation import RunGeneration

sync_weights, calls = RunGeneration.sync_weights, []

def sync_first_steps(self):
    calls.append(self)
    if len(calls) <= 4:
        sync_weights(self)

RunGeneration.sync_weights = sync_first_steps

"""
SPREAD = """\
def spread(completion_ids, **kwargs):
    return [sum(ids) / 1000 for ids in completion_ids]
"""
# Sends the weights 200 times before the third sampling, when the adapters have moved. Writes how many base weights
# there are, how many of them have changed, and how many adapters were sent.
MANY_SYNCS = """\
import json
from pathlib import Path
from grpo_cli.training.vllm_generation import RunGeneration

sync_weights, calls = RunGeneration.sync_weights, []

def sync_many_times(self):
    calls.append(self)
    base = {name: weight for name, weight in self.model.named_parameters() if "lora_" not in name}
    before = {name: weight.detach().clone() for name, weight in base.items()}
    for _ in range(200 if len(calls) == 3 else 1):
        sync_weights(self)
    if len(calls) == 3:
        changed = sum(not before[name].equal(weight) for name, weight in base.items())
        numbers = [len(base), changed, self._num_adapters]
        Path(__file__).with_name("changed.json").write_text(json.dumps(numbers))

RunGeneration.sync_weights = sync_many_times

"""
_background: list[psutil.Process] = []
"""Commands whose processes outlive a test."""


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


@dataclass
class Training:
    """A training that runs in the background."""

    workshop: Workshop
    process: subprocess.Popen[str]
    """The `grpo train` command."""

    @property
    def output(self) -> str:
        """What the command has printed."""
        return (self.workshop.folder / "output").read_text()

    def reach(self, step: int, limit_s: float = 600) -> None:
        """Wait for a step to be recorded."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(self.output[-3000:])
            written = list((self.workshop.folder / "runs").glob("*/*/metrics.jsonl"))
            if written and any(each["step"] >= step for each in self.workshop.records("train")):
                return
            time.sleep(0.2)
        pytest.fail(f"step {step} was not reached")

    def wait_for(self, text: str, limit_s: float = 600) -> None:
        """Wait for the command to print something."""
        deadline = time.monotonic() + limit_s
        while text not in self.output:
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{text!r} was not printed: {self.output[-3000:]}")
            time.sleep(0.1)

    def descendants(self) -> list[psutil.Process]:
        """All processes that the command has started, and theirs."""
        return _children(psutil.Process(self.process.pid))


@contextlib.contextmanager
def start(workshop: Workshop, *flags: str) -> Iterator[Training]:
    """Start a training in the background; kill the command if it still runs at the end."""
    recipe = workshop.folder / "recipe.yaml"
    command = workshop.command("train", recipe, *flags, **ENVIRONMENT)
    with (workshop.folder / "output").open("w") as output:
        process = subprocess.Popen(**command, stdout=output, stderr=subprocess.STDOUT)
    root = psutil.Process(process.pid)
    _background.append(root)
    try:
        yield Training(workshop, process)
    finally:
        process.kill()
        process.wait()
        _background.remove(root)


def differences(workshop: Workshop) -> list[float]:
    """By step, the mean difference between vLLM's and the trainer's log-probabilities."""
    return [
        record["sampling/sampling_logp_difference/mean"] for record in workshop.records("train")
    ]


def descendants() -> list[psutil.Process]:
    """The living processes that the test's commands started in this process.

    Those of the shared server and of commands in the background are left out, and so are the helpers of
    `multiprocessing`, which this process keeps to its end.
    """
    others = [each for root in _background for each in (root, *_children(root))]
    started = [each for each in _children(psutil.Process()) if each not in others]
    return [each for each in started if is_alive(each) and not _is_helper(each)]


def _is_helper(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return any(f"multiprocessing.{name}" in command for name in ("forkserver", "resource_tracker"))


def _children(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def assert_ended(processes: list[psutil.Process], limit_s: float = 60) -> None:
    """Fail if one of the processes does not end in time."""
    deadline = time.monotonic() + limit_s
    while (left := [each for each in processes if is_alive(each)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


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
    flags += ["--set", LORA]
    command = workshop.command("serve", folder / "recipe.yaml", *flags, **ENVIRONMENT)
    process = subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    root = psutil.Process(process.pid)
    _background.append(root)
    try:
        assert not answers(f"{address}/health")
        first = train_dynamic(folder / "first", model, f"mode: server, base_url: {address}")
        yield SharedServer(process, process.stdout.readline(), address, first)
    finally:
        children = _children(root)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        _background.remove(root)
    assert_ended(children)


def train_dynamic(folder: Path, model: Path, vllm: str, **environment: str) -> Workshop:
    """Train an adapter with vLLM on rows of which three in four have no signal, and are replaced."""
    from tests.integration.test_dynamic_sampling import workshop_of as workshop_of_silent_rows

    workshop = workshop_of_silent_rows(folder, model)
    reward = folder / "mine.py"
    reward.write_text(MANY_SYNCS + reward.read_text())
    settings = f"{{gpu_memory_utilization: 0.05, max_model_length: 256, {vllm}}}"
    values = ["generation.backend=vllm", f"generation.vllm={settings}", "model.dtype=bfloat16"]
    values += ["logging.log_completions=true", LORA]
    more = [part for value in values for part in ("--set", value)]
    train(workshop, *sets(4), *more, "--set", "evaluation.limit=3", **environment)
    return workshop


def assert_dynamic_adapter_run(workshop: Workshop) -> None:
    """Fail if vLLM had other weights, if the base changed, or if groups without signal were not replaced."""
    from tests.integration.test_dynamic_sampling import groups_of

    records = workshop.records("train")
    assert len(differences(workshop)) == 4
    assert max(differences(workshop)) < AGREEMENT
    assert min(record["grad_norm"] for record in records) > 0
    assert min(record["time/sync"] for record in records) > 0
    weights, changed, adapters = json.loads((workshop.folder / "changed.json").read_text())
    assert weights > 10
    assert changed == 0
    # Before the held-out rows, and before the first and the second step.
    assert adapters >= 202
    assert not (workshop.run / "launch" / "weights").exists()
    for when in ("before", "after"):
        measured = json.loads((workshop.run / "eval" / f"{when}.json").read_text())
        assert (measured["backend"], measured["prompts"]) == ("vllm", 2)
    assert sum(each["dynamic_sampling/resampled_groups"] for each in records) > 0
    assert records[-1]["dynamic_sampling/prompts_seen"] == len(groups_of(workshop))


# By batch: the log-probabilities and the correction of tokens that are not the model's, and how many tokens are.
WATCHED = """\
import json
from pathlib import Path
from grpo_cli.training.trainer import RunTrainer

make_batch = RunTrainer.make_batch

def keep(self, *arguments):
    batch = make_batch(self, *arguments)
    others = (batch["completion_mask"] * (1 - batch["tool_mask"])).bool()
    found = [
        batch["sampling_per_token_logps"][others].tolist(),
        batch["importance_sampling_ratio"][others].tolist(),
        (batch["completion_mask"] * batch["tool_mask"]).sum(1).tolist(),
    ]
    with Path(__file__).with_name("others.jsonl").open("a") as file:
        file.write(json.dumps(found) + "\\n")
    return batch

RunTrainer.make_batch = keep
"""


def assert_episodes_run(folder: Path, vllm: str, **environment: str) -> None:
    """Train a tiny agent with vLLM; fail if its log-probabilities are not those of its own tokens."""
    from tests.tiny_agents import RECIPE as AGENT
    from tests.tiny_agents import ROOM, make_agent

    workshop = Workshop(folder, make_agent(folder / "agent", hidden_size=128))
    (folder / "room.py").write_text(WATCHED + ROOM)
    more = "max_model_length: 512, importance_sampling_mode: token_truncate"
    settings = f"{{{{gpu_memory_utilization: 0.05, {more}, {vllm}}}}}"
    text = AGENT.replace("generation: {{", f"generation: {{{{backend: vllm, vllm: {settings}, ")
    workshop.write(text.replace("dtype: float32", "dtype: bfloat16"))
    train(workshop, *sets(3, "1e-4"), **environment)
    steps = workshop.records("train")
    assert len(steps) == 3
    assert max(differences(workshop)) < AGREEMENT
    # Any one step may have no signal, by what was sampled.
    assert max(step["episode/turns"] for step in steps) > 1
    assert max(step["grad_norm"] for step in steps) > 0
    lines = (folder / "others.jsonl").read_text().splitlines()
    for log_probs, ratios, own in map(json.loads, lines):
        assert len(log_probs) > 0
        assert set(log_probs) == {0.0}
        assert set(ratios) == {1.0}
        # Four turns of at most eight tokens.
        assert 1 <= min(own) <= max(own) <= 32
