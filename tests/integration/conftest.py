"""Tiny models and recipes for tests that train for real."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forking import GRPO, ForkedPopen
from tests.in_process import run_command
from tests.tiny_models import make_tiny_model

RECIPE = """\
name: tiny
seed: 1
model:
  path: {model}
  dtype: float32
dataset:
  kind: inline
  prompt: {{user: "{{{{ question }}}}"}}
  rows:
{rows}
  eval_rows:
    - {{question: "held out 1", answer: "1"}}
    - {{question: "held out 2", answer: "2"}}
rewards:
  - {{kind: length, target: 4, scale: 0.1, weight: 0.5}}
  - {{kind: regex, pattern: "a", name: has_a}}
generation:
  num_generations: 2
  max_completion_length: 8
training:
  per_device_train_batch_size: 4
  max_steps: 2
  learning_rate: 1e-3
  gradient_checkpointing: false
launch: {{use_cpu: true}}
"""


LORA = "dtype: float32\n  lora: {{r: 4, lora_alpha: 8}}"


class Workshop:
    """A folder with a tiny model, in which `grpo` can be run."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model

    @classmethod
    def copy(cls, original: Path, folder: Path, model: Path) -> "Workshop":
        """Copy a folder with finished runs."""
        shutil.copytree(original, folder, dirs_exist_ok=True)
        return cls(folder, model)

    def write(self, text: str = RECIPE, rows: int = 8) -> Path:
        """Writes a recipe; `{model}` and `{rows}` are filled in."""
        lines = "\n".join(f'    - {{question: "count {i}", answer: "{i}"}}' for i in range(rows))
        path = self.folder / "recipe.yaml"
        path.write_text(text.format(model=self.model, rows=lines))
        return path

    def grpo(self, *arguments, **environment) -> subprocess.CompletedProcess[str]:
        """Run a command to its end in this process; `train` without the probe, which has its own tests.

        With a `PYTHONPATH` it gets a process of its own: what is found there is not for other tests.
        """
        if "PYTHONPATH" in environment:
            return self.process(*arguments, **environment)
        return run_command(_without_probe(arguments), self.folder, environment)

    def process(self, *arguments, probe: bool = False, **environment):
        """Run a command to its end in a process of its own; `train` with its probe where asked to."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = self.command(*arguments, probe=probe, **environment)
        with ForkedPopen(**command, **pipes) as process:
            output = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, *output)

    def command(self, *arguments, probe: bool = False, **environment):
        """Arguments for `subprocess.Popen`, or for `ForkedPopen`, which starts sooner."""
        words = map(str, arguments) if probe else _without_probe(arguments)
        return {
            "args": [sys.executable, "-c", GRPO, *words],
            "cwd": self.folder,
            "env": {**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            "text": True,
        }

    def wait_for_step(self, process: subprocess.Popen[str]) -> None:
        """Wait until a training in another process has taken a step; fail if it ends before."""
        for _ in range(1200):
            if process.poll() is not None:
                pytest.fail(f"no step was trained: {process.returncode}, {process.communicate()}")
            if list(self.folder.glob("runs/*/*/metrics.jsonl")) and self.records("train"):
                return
            time.sleep(0.2)
        process.kill()
        pytest.fail(f"no step was trained in four minutes: {process.communicate()}")

    @property
    def run(self) -> Path:
        """The only run folder."""
        (folder,) = (self.folder / "runs").glob("*/*")
        return folder

    def records(self, event: str):
        """Records of one kind in the run's metrics."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["event"] == event]

    def status(self):
        """The run's status."""
        return json.loads((self.run / "status.json").read_text())


def _without_probe(arguments) -> list[str]:
    more = ["--no-probe"] if arguments[0] == "train" else []
    return [*map(str, arguments), *more]


@pytest.fixture(scope="session")
def chat_model(once):
    return once("chat", lambda folder: make_tiny_model(folder, kind="llama", chat=True))


@pytest.fixture(scope="session")
def base_model(once):
    return once("base", lambda folder: make_tiny_model(folder, kind="gpt2", chat=False))


@pytest.fixture(scope="session")
def full_run(once, chat_model):
    """The folder of a finished run of two steps, both saved, that trained all weights."""
    return once("full_run", lambda folder: _finish_run(folder, chat_model, RECIPE))


@pytest.fixture(scope="session")
def lora_run(once, chat_model):
    """The same with LoRA, and 12 held-out prompts that a reward judges the answers to."""
    text = with_held_out_rows(RECIPE).replace("dtype: float32", LORA)
    return once("lora_run", lambda folder: _finish_run(folder, chat_model, text))


def _finish_run(folder: Path, model: Path, text: str) -> None:
    workshop = Workshop(folder, model)
    done = workshop.grpo("train", workshop.write(text), "--set", "training.save_steps=1")
    assert done.returncode == 0, done.stderr


def with_held_out_rows(text: str) -> str:
    """`RECIPE` with 12 held-out rows and a reward that judges answers."""
    rows = [f'    - {{{{question: "held out {n}", answer: "{n}"}}}}\n' for n in range(12)]
    head, _, rest = text.partition("  eval_rows:\n")
    judged = "rewards:\n  - {{kind: contains, answer: answer}}\n"
    rest = rest[rest.index("rewards:") :].replace("rewards:\n", judged)
    return f"{head}  eval_rows:\n{''.join(rows)}{rest}"


@pytest.fixture
def workshop(tmp_path, chat_model):
    return Workshop(tmp_path, chat_model)


@pytest.fixture(scope="session")
def wide_model(once):
    """A model with heads of 32 and more, which vLLM's CPU kernels require."""
    return once("wide", lambda folder: make_tiny_model(folder, hidden_size=128))
