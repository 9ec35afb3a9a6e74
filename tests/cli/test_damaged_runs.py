"""Runs whose files are missing or torn: every command that reads runs says so, or passes over it."""

import json
import shutil
import subprocess
import sys

import pytest

from grpo_cli.cli.app import make_app
from grpo_cli.cli.errors import run_guarded
from grpo_cli.errors import RunError
from grpo_cli.report.live import Follower, ProgressView, watch_run
from grpo_cli.runs.metrics import append_record
from tests.cli.test_commands import grpo
from tests.run_folders import make_finished_run, write_samples

DAMAGES = {
    "status.json": ["", "{"],
    "resolved.json": ["", "{"],
    "manifest.json": ["", "{"],
    "metrics.jsonl": ['{"event": "train", "step": 41, "rew', "[1]\n"],
    "eval/before.json": ["", "{"],
    "eval/after.json": ["", "{"],
    "eval/after.jsonl": ['{"row": 0, "tok'],
    "completions/rank_0.jsonl": ['{"step": 1, "compl', "[1]\n"],
    "thumbnails/rank_0.jsonl": ['{"thumbnail": "ab", "jp', '{"name": "ab"}\n', "[1]\n"],
}
COMMANDS = (
    ("runs", "list", "--json"),
    ("runs", "show"),
    ("runs", "show", "--json"),
    ("runs", "compare", "sums/seed-2", "sums/seed-1", "--json"),
    ("diagnose", "sums/seed-1"),
    ("report", "sums/seed-1", "-o", "page.html", "--force"),
    ("watch", "sums/seed-1", "--json"),
)


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


@pytest.mark.parametrize("file", DAMAGES)
def test_no_command_breaks_on_a_damaged_file(file, runs, capsys):
    path = runs.path / file
    # `watch` waits for a run without a status.
    missing = [] if file == "status.json" else [None]
    for damage in [*DAMAGES[file], *missing]:
        whole = path.read_text() if path.is_file() else None
        if damage is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text((whole or "") + damage if path.suffix == ".jsonl" else damage)
        for command in COMMANDS:
            code = run_guarded(lambda given=command: make_app()(list(given), standalone_mode=False))
            said = capsys.readouterr()
            assert code in (0, 1, 2), (command, damage, said.err)
            if "--json" in command and said.out:
                lines = said.out.splitlines() if "watch" in command else [said.out]
                for line in lines:
                    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
        if whole is not None:
            path.write_text(whole)


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
