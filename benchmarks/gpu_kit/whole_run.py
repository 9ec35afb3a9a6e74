"""A whole `grpo train` that is killed and resumed, against a script with TRL alone."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.gpu_kit.bench import Bench, Row
from benchmarks.training import bench as training
from benchmarks.training.cases import Case
from benchmarks.training.runs import (
    grpo_command,
    make_environment,
    read_figures,
    run_case,
    run_command,
)


@dataclass(frozen=True)
class _Sums(training.Bench):
    """The quickstart's recipe on rows that need no other package."""

    def make_rows(self, count: int, seed: int, silent_share: float = 0.0) -> list[dict[str, Any]]:
        questions = ([{"role": "user", "content": f"{n} + {n % 7} ="}] for n in range(count))
        return [{"prompt": question, "answer": "", "silent": False} for question in questions]


def train_whole(bench: Bench) -> Iterator[Row]:
    """Seconds from start to the saved adapter, and of a step."""
    model, dtype = bench.folder / "model", torch.float32 if bench.tiny else torch.bfloat16
    bench.make_model("0.5B", dtype).save_pretrained(model)
    bench.tokenizer.save_pretrained(model)
    runs = _Sums(bench.folder, str(model), bench.device == "cuda")
    changes = {
        "model.dtype": str(dtype).removeprefix("torch."),
        "generation.backend": "transformers",
        "generation.max_completion_length": bench.size(128),
        "training.per_device_train_batch_size": bench.size(64),
        "training.save_strategy": "steps",
        "training.save_steps": 3,
    }
    case = Case("whole", "killed and resumed", (), changes=changes, reward="spread", steps=12)
    runs.write_case(case)
    plain = run_case(runs, case, "trl", 0).figures
    yield {"run": "TRL alone", **plain}
    folder = bench.folder / "grpo"
    folder.mkdir()
    started = time.time()
    command, environment = grpo_command(runs, case, folder), make_environment(runs, case, folder)
    _kill_after_checkpoint(command, environment, folder)
    resumed = time.time()
    yield {"run": "grpo, killed after its first checkpoint", "total_s": resumed - started}
    peak_gib = run_command([*command, "--resume"], environment, folder / "log", gpu=runs.gpu)
    [metrics] = (folder / "runs").glob("*/*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [each for each in records if each.get("time", 0) > resumed and "loss" in each]
    figures = read_figures(steps, runs.completions_a_step(case)) | {"peak_gib": peak_gib}
    title = f"grpo, resumed, steps {steps[0]['step']} to {steps[-1]['step']}"
    yield {"run": title, **figures, "total_s": time.time() - resumed}
    ratios = {name: value / plain[name] for name, value in figures.items()}
    both = (time.time() - started) / plain["total_s"]
    yield {"run": "ratio to TRL, both runs together", **ratios, "total_s": both}


def _kill_after_checkpoint(command: list[str], environment: dict[str, str], folder: Path) -> None:
    """Kill the command and its workers as soon as there is a checkpoint."""
    process = psutil.Popen(command, env=environment, cwd=folder)
    while not list(folder.glob("runs/*/*/checkpoints/checkpoint-*")):
        if process.poll() is not None:
            raise RuntimeError(f"training ended with {process.returncode} before a checkpoint")
        time.sleep(0.05)
    family = [process, *process.children(recursive=True)]
    for each in family:
        each.kill()
    psutil.wait_procs(family)
