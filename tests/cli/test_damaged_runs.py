"""Runs with a damaged file in lists and views; `integration/test_damaged_runs.py` has a matrix of damages."""

import json
import shutil
import subprocess
import sys

import pytest

from grpo_cli.errors import RunError
from grpo_cli.report.follower import Follower
from grpo_cli.report.live import ProgressView, watch_run
from grpo_cli.runs.metrics import append_record
from tests.cli.test_commands import grpo
from tests.run_folders import make_finished_run, write_samples


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A whole run, and one to be damaged, which was started last."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for seed in (2, 1):
        run = make_finished_run(tmp_path / "runs", seed, rewards=[0.1] * 40)
        write_samples(run, {f"sum {n}": [1.0] for n in range(10)})
        run.completions.mkdir()
        run.thumbnails.mkdir()
        run.launch.mkdir()
    return run


def test_a_damaged_run_is_one_line_of_the_list(runs):
    runs.status.write_text("{")
    done = grpo("runs", "list", cwd=runs.path.parents[2])
    assert done.returncode == 0
    assert "seed-2" in done.stdout
    assert "damaged" in done.stdout


def test_a_reader_that_goes_is_no_failure(runs):
    for step in range(41, 3000):
        append_record(runs.metrics, {"event": "train", "step": step, "reward": 0.5})
    command = f"{sys.executable} -m grpo_cli watch sums/seed-1 --json"
    piped = f"set -o pipefail; {command} | head -1"
    done = subprocess.run(
        ["bash", "-c", piped], cwd=runs.path.parents[2], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["step"] == 1


def test_a_name_of_nobody_is_no_run(runs):
    done = grpo("runs", "show", "~nosuch", cwd=runs.path.parents[2])
    assert done.returncode == 2
    assert "no run `~nosuch`" in done.stderr


def test_a_watch_ends_with_its_folder(runs, tmp_path):
    runs.status.write_text(json.dumps({"state": "pending"}))
    follower = Follower(runs)
    shutil.rmtree(runs.path)
    with pytest.raises(RunError, match="was removed"):
        watch_run(follower, ProgressView(), lambda: True)
