"""One run of one system: a real process, its records, and the figures in them."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]

from benchmarks.training.bench import ROOT, Bench
from benchmarks.training.cases import Case
from benchmarks.training.replay import VARIABLE

System = Literal["trl", "grpo"]
_LOOK_EVERY_S = 0.2
_TAIL_LINES = 25


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    figures: dict[str, float]
    """`step_s`, `tokens_per_s`, `total_s`, `peak_gib`."""
    model: Path
    """The final weights or adapter."""
    completions: Path
    """Where they were written down, if they were."""


class RunFailedError(Exception):
    """A run did not end well; the text is the end of its log."""


def run_case(bench: Bench, case: Case, system: System, number: int) -> Measured:
    """Trains once.

    Raises:
        RunFailedError: The training did not end well.
    """
    folder = bench.folder / case.name / f"{system}-{number}"
    folder.mkdir()
    command = (_plain_command if system == "trl" else grpo_command)(bench, case, folder)
    started = time.time()
    peak_gib = run_command(
        command, make_environment(bench, case, folder), folder / "log.txt", gpu=bench.gpu
    )
    total_s = time.time() - started
    if system == "trl":
        records, model = folder / "steps.jsonl", folder / "model"
    else:
        [run] = (folder / "runs").glob("*/*/metrics.jsonl")
        records, model = run, run.parent / "model"
    told = [json.loads(line) for line in records.read_text().splitlines()]
    figures = read_figures(told, bench.completions_a_step(case))
    figures |= {"total_s": total_s, "peak_gib": peak_gib}
    return Measured(figures, model, folder / "completions.txt")


def read_figures(records: Sequence[Mapping[str, Any]], completions: int) -> dict[str, float]:
    """Seconds of a step and tokens a second, from records of training steps with their times.

    From the end of the first step to the end of the last: what only the first step has to do is left out,
    and so is everything before and after training.

    Args:
        records: In their order; those that are not of a step are passed over.
        completions: In each step.
    """
    steps = [record for record in records if "loss" in record]
    if len(steps) < 2:
        return {}
    seconds = steps[-1]["time"] - steps[0]["time"]
    lengths = [float(record.get("completions/mean_length", 0.0)) for record in steps[1:]]
    return {
        "step_s": seconds / (len(steps) - 1),
        "tokens_per_s": completions * sum(lengths) / seconds,
    }


def _plain_command(bench: Bench, case: Case, folder: Path) -> list[str]:
    settings = json.loads((bench.folder / case.name / "plain.json").read_text())
    own = folder / "settings.json"
    own.write_text(json.dumps({**settings, "output": str(folder)}))
    return [sys.executable, str(ROOT / "benchmarks" / "plain_trl.py"), str(own)]


def grpo_command(bench: Bench, case: Case, folder: Path) -> list[str]:
    """The command that trains a case into `folder/runs`."""
    recipe = bench.folder / case.name / "recipe.yaml"
    sets = [f"--set={key}={json.dumps(value)}" for key, value in case.ours.items()]
    command = [sys.executable, "-m", "grpo_cli", "train", str(recipe), "--quiet", *sets]
    # What is no part of a step is left out, except where all of it counts.
    whole = any(figure.key == "total_s" for figure in case.figures)
    return [*command, *([] if whole else ["--no-probe"]), "--runs", str(folder / "runs")]


def make_environment(bench: Bench, case: Case, folder: Path) -> dict[str, str]:
    """The environment of both systems."""
    replay = bench.replay_settings(case)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TOKENIZERS_PARALLELISM": "false",
        # One process a side, which would train on all GPUs that it sees.
        **({"CUDA_VISIBLE_DEVICES": visible.partition(",")[0]} if bench.gpu else {}),
        **({} if replay is None else {VARIABLE: replay.as_text()}),
        **({"GRPO_BENCH_COMPLETIONS": str(folder / "completions.txt")} if case.compares else {}),
    }


def run_command(command: list[str], environment: dict[str, str], log: Path, *, gpu: bool) -> float:
    """Runs a command to its end and returns the most memory it had, in GiB; ended with this program."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=log.parent, stdout=output, stderr=subprocess.STDOUT
        )
        watch = _MemoryWatch(process.pid, gpu=gpu)
        watch.start()
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            watch.ended.set()
            watch.join()
    if code:
        tail = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        raise RunFailedError("\n".join([f"{' '.join(command)} ended with {code}:", *tail]))
    return watch.peak_bytes / 2**30


class _MemoryWatch(threading.Thread):
    """The peak of the largest process of a tree, or of the GPU over what was taken before."""

    def __init__(self, pid: int, *, gpu: bool) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.ended = threading.Event()
        self._root = psutil.Process(pid)
        self._gpu = gpu
        self._before = _gpu_bytes() if gpu else 0

    def run(self) -> None:
        while not self.ended.wait(_LOOK_EVERY_S):
            seen = _gpu_bytes() - self._before if self._gpu else self._largest()
            self.peak_bytes = max(self.peak_bytes, seen)

    def _largest(self) -> int:
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        return max(map(_high_water_mark, tree))


def _high_water_mark(process: psutil.Process) -> int:
    """Most bytes of memory that a process ever had; 0 where it has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0
    marks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(marks[0]) * 1024 if marks else 0


def _gpu_bytes() -> int:
    """Memory taken on all GPUs."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return sum(int(line) * 2**20 for line in told.split())
