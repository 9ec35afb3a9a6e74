"""The memory that `grpo probe` foretells, against what the worker's process takes at its peak."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.integration.test_probe import SMOLLM2
from tests.nightly import nightly

ROWS = [{"question": "word " * 60, "answer": "1"}] * 32
CASES = {
    "all weights in float32": (
        {"dtype": "float32"},
        {"per_device_train_batch_size": 4, "gradient_checkpointing": False},
    ),
    "adapters": (
        {"dtype": "float32", "lora": {"r": 16}},
        {"per_device_train_batch_size": 16, "gradient_checkpointing": False},
    ),
    "checkpointing, accumulation and a reference": (
        {"dtype": "float32"},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "beta": 0.1},
    ),
}

REWARD = """
def differ(completions, **_):
    return [float(number) for number, _ in enumerate(completions)]
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "name",
    [
        nightly("adapters"),
        "checkpointing, accumulation and a reference",
        nightly("all weights in float32"),
    ],
)
def test_the_estimate_is_near_the_measured_peak(name, tmp_path):
    model, training = CASES[name]
    recipe = {
        "name": "memory",
        "model": {"path": SMOLLM2, **model},
        "dataset": {"kind": "inline", "prompt": {"user": "{{ question }}"}, "rows": ROWS},
        # Every completion is learned from, as in the worst step.
        "rewards": [{"kind": "python", "path": "./rewards.py:differ"}],
        "generation": {"num_generations": 4, "max_completion_length": 48},
        "training": {"max_steps": 2, "learning_rate": 1e-6, "save_strategy": "no", **training},
        "launch": {"use_cpu": True},
    }
    (tmp_path / "rewards.py").write_text(REWARD)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    told = json.loads(_grpo(tmp_path, "probe", path, "--quick", "--json"))
    planned = json.loads(_grpo(tmp_path, "train", path, "--dry-run", "--json"))
    measured = _peak_bytes(planned["argv"], planned["environment"], tmp_path)
    ratio = told["memory"]["peak_bytes"] / measured
    print(f"{name}: estimated {told['memory']['peak_bytes']:,}, measured {measured:,}, {ratio:.3f}")
    assert 0.75 <= ratio <= 1.25


def _grpo(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "grpo_cli", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def _peak_bytes(argv, environment, folder):
    """The most memory that a process held, as the kernel counts it.

    Read from `/proc` while it runs: what `wait4` tells counts the test's own memory before `exec` too.
    """
    peak = 0
    with (folder / "worker.txt").open("w") as log:
        worker = subprocess.Popen(
            argv, env={**os.environ, **environment}, cwd=folder, stdout=log, stderr=log
        )
        while worker.poll() is None:
            lines = Path(f"/proc/{worker.pid}/status").read_text().splitlines()
            peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
            peak = max([peak, *peaks])
            time.sleep(0.02)
    assert worker.returncode == 0, (folder / "worker.txt").read_text()[-2000:]
    return peak * 1024
