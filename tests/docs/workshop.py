"""A folder in which the names that the pages use exist: recipes, data, a tiny model, a finished run.

Owns what lies in it and how a command is run there. Which commands are run is `test_commands.py`'s.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import trl
import yaml
from PIL import Image

from tests.docs.pages import ROOT, read_blocks
from tests.in_process import run_command
from tests.slurm_standin import Cluster
from tests.tiny_models import make_tiny_model

TINY = {
    "extends": "gsm8k.yaml",
    "model": {"path": "./tiny", "dtype": "float32", "lora": {"r": 4, "lora_alpha": 8}},
    "rewards": [
        {"kind": "math", "answer": "answer"},
        {"kind": "python", "path": "./my_rewards.py:brevity", "weight": 0.1},
        {"kind": "length", "target": 20, "scale": 0.001},
    ],
    "generation": {"num_generations": 4, "max_completion_length": 8},
    "training": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_steps": 40,
        "save_steps": 20,
        "gradient_checkpointing": False,
    },
    "launch": {"use_cpu": True},
}
SERVED = {
    "extends": "recipe.yaml",
    "generation": {"backend": "vllm", "vllm": {"mode": "server"}},
}
OF_TRL = {
    "model_name_or_path": "./tiny",
    "torch_dtype": "float32",
    "dataset_name": "openai/gsm8k",
    "dataset_config": "main",
    "reward_funcs": ["accuracy_reward"],
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-5,
}
SCRIPT = """\
import trl
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    model="./tiny",
    args=GRPOConfig(per_device_train_batch_size=8),
    reward_funcs=trl.rewards.think_format_reward,
    train_dataset=load_dataset("openai/gsm8k", "main", split="train"),
)
"""
BROKEN = """\
name: broken
model: {path: ./tiny}
dataset:
  kind: inline
  prompt: {user: "{{ question }}"}
  rows:
    - {question: one, answer: "1"}
rewards:
  - {kind: maths, answer: answer}
generation: {num_generations: 2}
training:
  max_step: 2
"""
EPISODE_PAGES = ("docs/environments.md", "docs/own-environment.md", "docs/images.md")
TIMEOUT_S = 240
_SHELL = re.compile(r"[|&;<>*$`]")
"""What only a shell understands."""


class Workshop:
    """The folder; `grpo` and stand-ins for vLLM's and Slurm's commands are on its path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worked: set[tuple[str, tuple[str, ...]]] = set()
        """Slow commands that have worked, with what a page shows of their output: many pages repeat them."""
        self.cluster = Cluster(folder / "slurm")
        self._write_commands()
        self._write_data()
        self._write_recipes()
        made = shutil.ignore_patterns("tiny-*", "*.jsonl")
        shutil.copytree(ROOT / "recipes", folder / "recipes", ignore=made)
        make_tiny_model(folder / "tiny", kind="llama", chat=True)
        make_tiny_model(folder / "other-model", kind="llama", chat=True, seed=1)

    def _write_commands(self) -> None:
        standin = ROOT / "tests" / "vllm_standin.py"
        self.cluster.write("grpo", f'#!/bin/sh\nexec "{sys.executable}" -m grpo_cli "$@"\n')
        self.cluster.write("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        self.cluster.write("vllm", f'#!/bin/sh\nexec "{sys.executable}" "{standin}" "$@"\n')

    def _write_images(self) -> None:
        for name in ("charts/0001.png", "charts/0002.png", "maps/delta.jpg"):
            (self.folder / name).parent.mkdir(exist_ok=True)
            Image.new("RGB", (40, 30)).save(self.folder / name)
        rows = [
            {"chart": "charts/0001.png", "question": "How many?", "answer": "3", "map": None},
            {
                "chart": "charts/0002.png",
                "question": "Where?",
                "answer": "5",
                "map": "maps/delta.jpg",
            },
        ]
        lines = (f"{json.dumps(row)}\n" for row in rows * 8)
        (self.folder / "charts.jsonl").write_text("".join(lines))

    def _write_data(self) -> None:
        sums = [(a, b) for a in range(3, 19) for b in (4, 7, 12)]
        rows = [
            {
                "question": f"Ann has {a} apples and buys {b} more. How many has she now?",
                "answer": f"She has {a} + {b}.\n#### {a + b}",
            }
            for a, b in sums
        ]
        scored = [
            {"prompt": f"Customer {number} asks.", "response": text, "reward": reward}
            for number in range(20)
            for text, reward in ((" Gladly.", 0.9), (" No.", 0.1))
        ]
        (self.folder / "scored.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in scored))
        self._write_images()
        (self.folder / "data").mkdir()
        for name, part in (("train", rows[:40]), ("test", rows[40:])):
            text = "".join(f"{json.dumps(row)}\n" for row in part)
            (self.folder / "data" / f"{name}.jsonl").write_text(text)

    def _write_recipes(self) -> None:
        readme = {
            block.language: block.text
            for block in read_blocks("yaml", "python")[::-1]
            if block.page == "README.md"
        }
        (self.folder / "gsm8k.yaml").write_text(readme["yaml"])
        (self.folder / "my_rewards.py").write_text(readme["python"])
        (self.folder / "broken.yaml").write_text(BROKEN)
        (self.folder / "train.py").write_text(SCRIPT)
        command = "trl grpo --model_name_or_path org/model --dataset_name org/rows"
        (self.folder / "run.sh").write_text(f"{command} --reward_funcs think_format_reward\n")
        launch = next(block.text for block in read_blocks("yaml") if "machine 0" in block.text)
        machines = {**TINY, **yaml.safe_load(launch)}
        written = {"recipe": TINY, "served": SERVED, "machines": machines, "trl": OF_TRL}
        for name, recipe in written.items():
            (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
        self.write_episodes()
        self._write_shop()

    def write_episodes(self) -> None:
        """Write the functions and classes that pages show of tools and environments, and their recipes name."""
        blocks = [each for each in read_blocks("python", "yaml") if each.page in EPISODE_PAGES]
        for name, mark in (("tools", "def search"), ("sums", "class Sums"), ("shop", "class Shop")):
            [text] = [each.text for each in blocks if mark in each.text]
            (self.folder / f"{name}.py").write_text(text)
        (self.folder / "server.py").touch()

    def _write_shop(self) -> None:
        """Write the recipe of the shop with a model that is here; its answers are longer, a byte a token."""
        [text] = [each.text for each in read_blocks("yaml") if "name: shop\n" in each.text]
        template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
        recipe = yaml.safe_load(text)
        recipe["model"] |= {"path": "./tiny", "chat_template": str(template)}
        recipe["generation"]["max_completion_length"] = 3000
        recipe["episode"]["max_turn_tokens"] = 512
        (self.folder / "shop.yaml").write_text(yaml.safe_dump(recipe))

    def train(self) -> None:
        """Makes the finished runs that the pages speak of, under each of the recipe names they use."""
        # The last one is the newest, which `--resume` goes on with.
        for name, seed in (("seed-1", 1), ("seed-2", 2), ("seed-3", 3), ("20261121-104027", 42)):
            done = self.run(
                f"grpo train recipe.yaml --no-probe --quiet --run-id {name} --set seed={seed}"
            )
            assert done.returncode == 0, done.stderr
        runs = self.folder / "runs"
        for name in ("quickstart", "first"):
            shutil.copytree(runs / "gsm8k", runs / name)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, in this process where it is one of ours.

        What it asks is answered with a word, and then with nothing.
        """
        words = shlex.split(command)
        if words[0] == "grpo" and not _SHELL.search(command):
            environment = {**self.cluster.environment, "COLUMNS": "200"}
            return run_command(words[1:], self.folder, environment, stdin="hello\n")
        return subprocess.run(
            **self._process(command), input="hello\n", capture_output=True, timeout=TIMEOUT_S
        )

    @contextlib.contextmanager
    def serving(self, command: str) -> Iterator[None]:
        """Runs a server for as long as it is needed, and ends it as Ctrl-C does."""
        log = self.folder / "server.log"
        with (
            log.open("w") as said,
            subprocess.Popen(**self._process(command), stdout=said, stderr=said) as process,
        ):
            deadline = time.monotonic() + TIMEOUT_S
            try:
                while "curl http" not in log.read_text():
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.1)
                yield
            finally:
                process.send_signal(signal.SIGINT)
        assert process.returncode in (0, 130), log.read_text()

    def _process(self, command: str) -> dict[str, object]:
        more = {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
        environment = {**os.environ, **self.cluster.environment, **more}
        # A shell of its own only splits the words: signals are for the command.
        return {
            "args": ["bash", "-c", f"exec {command}"],
            "cwd": self.folder,
            "env": environment,
            "text": True,
        }

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Takes away what commands leave behind, so that every page begins with the same folder."""
        before = self._entries()
        recipes = {path: path.read_text() for path in self.folder.glob("*.yaml")}
        try:
            yield
        finally:
            for path, text in recipes.items():
                path.write_text(text)
            for path in self._entries() - before:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                    missing_ok=True
                )

    def _entries(self) -> set[Path]:
        places = ("*", "runs/*/*", "recipes/*/*")
        found = {path for place in places for path in self.folder.glob(place)}
        return found - {self.folder / "runs"}
