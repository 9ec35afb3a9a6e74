"""Prints how long large data and long runs take, and in how much memory, each in a process of its own.

CPU seconds are those of a command and all its children; on a busy machine they tell more than the clock.

python benchmarks/scale.py                      # all of it: minutes, and 700 MB in a temporary folder
python benchmarks/scale.py --rows 200000 --records 20000 --runs 1000
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = """\
name: big
model: {path: ./tiny, dtype: float32}
dataset: {kind: files, train: rows.jsonl, prompt: {user: "{{ question }}"}}
rewards: [{kind: exact, answer: answer}]
generation: {num_generations: 4, max_completion_length: 16}
training: {per_device_train_batch_size: 8, max_steps: 1, learning_rate: 1e-6, save_strategy: "no"}
evaluation: {limit: 0}
launch: {use_cpu: true}
"""


def measure(name: str, arguments: list[str], folder: Path, until: bytes = b"") -> None:
    """Prints seconds until a text is printed, or until the end, and the peak memory of the largest process."""
    start, shown = time.perf_counter(), None
    command = [sys.executable, "-m", "grpo_cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=folder, env=environment, **streams)
    for line in process.stdout:
        if until and shown is None and line.strip() == until:
            shown = time.perf_counter() - start
    # The children that were waited for count, too.
    _, status, usage = os.wait4(process.pid, 0)
    seconds = shown or time.perf_counter() - start
    failed = "" if status == 0 else f"  exit {os.waitstatus_to_exitcode(status)}"
    used, memory = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
    print(
        f"{name:<34}{seconds:8.1f} s {used:8.1f} s CPU {memory:8.0f} MiB{failed}"
        f"   load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def make(module: str, expression: str, folder: Path) -> None:
    """Runs a maker of `tests/` in a process of its own: a child's peak memory begins with that of its parent."""
    name = expression.lstrip("[").partition("(")[0]
    lines = [
        "from pathlib import Path",
        f"from tests.{module} import {name}",
        f"folder = {str(folder)!r}",
    ]
    code = "\n".join([*lines, expression])
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)


def write_rows(path: Path, count: int) -> None:
    draw = random.Random(1)
    words = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()
    with path.open("w") as file:
        for number in range(count):
            text = f"Question {number}: {' '.join(draw.choices(words, k=16))}"
            file.write(json.dumps({"question": text, "answer": str(number % 97)}) + "\n")


def write_log(path: Path, count: int) -> None:
    draw = random.Random(1)
    names = [f"rewards/{name}/{what}" for name in "abcdefgh" for what in ("mean", "std")]
    names += ["loss", "grad_norm", "entropy", "kl", "reward_std", "frac_reward_zero_std"]
    with path.open("w") as file:
        for step in range(1, count + 1):
            record = {name: round(draw.random(), 6) for name in names}
            file.write(json.dumps({**record, "reward": draw.random(), "step": step}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, count in (("rows", 2_000_000), ("records", 200_000), ("runs", 10_000)):
        parser.add_argument(f"--{name}", type=int, default=count)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if chosen.rows:
            make("tiny_models", "make_tiny_model(Path(folder) / 'tiny')", folder)
            write_rows(folder / "rows.jsonl", chosen.rows)
            (folder / "recipe.yaml").write_text(RECIPE)
            measure(f"check, {chosen.rows:,} rows", ["check", "recipe.yaml"], folder)
            until = "· training".encode()
            measure(
                f'until "training", {chosen.rows:,} rows', ["train", "recipe.yaml"], folder, until
            )
        if chosen.records:
            long = f"make_long_run(Path(folder), steps={chosen.records}, completions=2000)"
            make("long_runs", long, folder)
            run = str(folder / "sums" / "long")
            for command in (["runs", "show"], ["diagnose"], ["report"], ["watch"]):
                name = f"{' '.join(command)}, {chosen.records:,} records"
                measure(name, [*command, run], folder)
            log = folder / "train.jsonl"
            write_log(log, chosen.records)
            measure(f"diagnose a log, {chosen.records:,} records", ["diagnose", str(log)], folder)
        if chosen.runs:
            many = f"[make_finished_run(Path(folder) / 'many', n) for n in range({chosen.runs})]"
            make("run_folders", many, folder)
            measure(f"runs list, {chosen.runs:,} runs", ["runs", "list", "--runs", "many"], folder)


if __name__ == "__main__":
    main()
