"""Tiny models and recipes for tests that train for real, in real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


class Workshop:
    """A folder with a tiny model, in which `grpo` can be run."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model

    def write(self, text: str = RECIPE, rows: int = 8) -> Path:
        """Writes a recipe; `{model}` and `{rows}` are filled in."""
        lines = "\n".join(f'    - {{question: "count {i}", answer: "{i}"}}' for i in range(rows))
        path = self.folder / "recipe.yaml"
        path.write_text(text.format(model=self.model, rows=lines))
        return path

    def grpo(self, *arguments, **environment) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; `train` without the probe, which has tests of its own."""
        return subprocess.run(**self.command(*arguments, **environment), capture_output=True)

    def command(self, *arguments, **environment):
        """Arguments for `subprocess`."""
        if arguments[0] == "train":
            arguments = (*arguments, "--no-probe")
        code = "from grpo_cli.cli.app import main; main()"
        return {
            "args": [sys.executable, "-c", code, *map(str, arguments)],
            "cwd": self.folder,
            "env": {**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            "text": True,
        }

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


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "chat"
    make_tiny_model(folder, kind="llama", chat=True)
    return folder


@pytest.fixture(scope="session")
def base_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    make_tiny_model(folder, kind="gpt2", chat=False)
    return folder


@pytest.fixture
def workshop(tmp_path, chat_model):
    return Workshop(tmp_path, chat_model)
