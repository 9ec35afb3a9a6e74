"""`grpo runs` as a person types it: what is printed where, and how it ends."""

import json
import os
import pty
import subprocess
import sys

import pytest

from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder
from tests.cli.test_commands import grpo
from tests.run_folders import PLAIN, make_finished_run, write_samples


@pytest.fixture
def folder(tmp_path):
    """A folder with two finished runs, measured on the same prompts."""
    for seed, right in ((1, 0.0), (2, 1.0)):
        run = make_finished_run(tmp_path / "runs", seed, accuracy=right)
        write_samples(run, {f"sum {n}": [right] for n in range(10)})
    return tmp_path


def test_a_list_is_a_table_for_people_and_json_for_programs(folder):
    done = grpo("runs", "list", cwd=folder)
    assert done.returncode == 0, done.stderr
    header, newest, *_ = done.stdout.splitlines()
    assert header.split() == ["run", "state", "steps", "reward", "held-out", "took", "started"]
    assert newest.split()[:4] == ["sums/seed-2", "✓", "completed", "40/40"]
    done = grpo("runs", "list", "--sort", "name", "--json", cwd=folder)
    assert [each["id"] for each in json.loads(done.stdout)] == ["seed-1", "seed-2"]


@pytest.mark.parametrize(("columns", "last"), [(40, "steps"), (60, "held-out"), (72, "started")])
def test_columns_that_do_not_fit_are_left_out(folder, columns, last):
    script = (
        "import sys; from pathlib import Path; from rich.console import Console\n"
        "from grpo_cli.cli import runs_view; from grpo_cli.report.run_list import list_runs\n"
        f"runs_view.stdout = lambda: Console(width={columns}, soft_wrap=True)\n"
        "runs_view.print_runs(list_runs(Path('runs')), Path('runs'), filtered=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    header, newest, *_ = done.stdout.splitlines()
    assert header.split()[-1] == last
    assert "sums/seed-2" in newest
    assert max(map(len, done.stdout.splitlines())) <= columns


def test_an_empty_list_says_so_on_stderr(folder):
    done = grpo("runs", "list", "--name", "words", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert "no runs in runs: none is like this" in done.stderr


def test_a_run_is_shown_with_what_it_was_made_of_and_what_comes_next(folder):
    done = grpo("runs", "show", "sums/seed-1", cwd=folder)
    assert done.returncode == 0, done.stderr
    for part in ("✓ completed: 40/40", "org/model", "math × 1", "trl 1.16.0", "grpo report runs/"):
        assert part in done.stdout, part
    told = json.loads(grpo("runs", "show", "sums", "--json", cwd=folder).stdout)
    assert (told["id"], told["state"], told["recipe"]["seed"]) == ("seed-2", "completed", 2)


def test_a_path_is_printed_alone(folder):
    done = grpo("runs", "path", cwd=folder)
    assert (done.stdout, done.stderr) == (f"{folder}/runs/sums/seed-2\n", "")
    done = grpo("runs", "path", "sums/seed-1", "--checkpoint", "last", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no complete checkpoint" in done.stderr


def test_runs_are_compared_with_the_first(folder):
    done = grpo("runs", "compare", "sums/seed-1", "sums/seed-2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (
        "better: +1.000 in accuracy/math against sums/seed-1 on each of the same 10" in done.stdout
    )
    (row,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["seed"]]
    assert row.split() == ["seed", "1", "2"]
    told = json.loads(grpo("runs", "compare", "sums/seed-1", "sums", "--json", cwd=folder).stdout)
    assert told["held_out"][0]["differences"]["accuracy/math"]["value"] == 1.0


def test_a_comparison_shows_where_long_values_differ(folder):
    for seed, name in ((1, "vowels"), (2, "consonants")):
        run = RunFolder(folder / "runs" / "sums" / f"seed-{seed}")
        path = f"/a/folder/of/several/long/names/my_rewards.py::{name}"
        rewards = [{"kind": "python", "path": path}]
        run.write_recipe(Recipe.model_validate({**PLAIN, "seed": seed, "rewards": rewards}))
    done = grpo("runs", "compare", "sums/seed-1", "sums/seed-2", cwd=folder)
    assert done.returncode == 0, done.stderr
    names = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert not names & {"reward", "rewards/math", "accuracy/math"}, "they are scored differently"
    (row,) = [line for line in done.stdout.splitlines() if "rewards[0].path" in line]
    (_, first, second) = row.split()
    assert (first[0], first.endswith("vowels"), second.endswith("consonants")) == ("…", True, True)


def test_the_list_marks_what_is_noise(folder):
    make_finished_run(folder / "runs", 3, rewards=[0.2, 0.1, 0.3, 0.15, 0.25, 0.21] * 4)
    done = grpo("runs", "list", "--name", "sums/seed-3", cwd=folder)
    assert " ≈ " in done.stdout
    assert "no more than its noise" in done.stderr
    shown = grpo("runs", "show", "sums/seed-3", cwd=folder).stdout
    assert "within noise (means of 4)" in shown


def test_a_run_that_is_not_there_says_where_was_looked(folder):
    done = grpo("runs", "show", "sums/seed-9", cwd=folder)
    assert f"no run `sums/seed-9` is in {folder}/runs. Fix: " in done.stderr


def test_removing_needs_a_person_or_a_flag(folder):
    run = folder / "runs" / "sums" / "seed-1"
    done = grpo("runs", "remove", "sums/seed-1", cwd=folder)
    assert done.returncode == 2
    assert "Fix: --yes removes without asking" in done.stderr
    done = grpo("runs", "remove", "sums/seed-1", "--dry-run", "--json", cwd=folder)
    assert json.loads(done.stdout)["freed"] is None
    assert run.is_dir()
    done = grpo("runs", "remove", "sums/seed-1", "--yes", cwd=folder)
    assert done.stdout.startswith("freed ")
    assert not run.exists()


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"y\n", 0)])
def test_a_person_is_asked(folder, answer, code):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "grpo_cli", "runs", "remove", "sums/seed-2"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        said = b""
        while b"for good?" not in said:
            said += os.read(ours, 1000)
        os.write(ours, answer)
        process.wait()
    assert process.returncode == code
    assert (folder / "runs" / "sums" / "seed-2").exists() == (code == 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "sums/seed-9"],
        ["path", "--runs", "elsewhere"],
        ["compare", "sums"],
        ["list", "--sort", "size"],
        ["remove", ".", "--yes"],
        ["path", "--model", "--checkpoint", "1"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_done_is_exit_code_2_with_a_fix(folder, arguments):
    done = grpo("runs", *arguments, cwd=folder)
    assert done.returncode == 2
    assert "Fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_machines_folder_leads_to_the_metrics(folder):
    run = RunFolder(folder / "runs" / "sums" / "seed-2")
    other = run.machine(1)
    other.path.mkdir(parents=True)
    other.checkpoints.symlink_to("../../checkpoints")
    other.resolved.write_bytes(run.resolved.read_bytes())
    done = grpo("watch", other.path, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "completed: 40/40 steps" in done.stdout
    assert str(run.path) in done.stdout


def test_a_damaged_status_is_told(folder):
    run = make_finished_run(folder / "runs", 3)
    run.status.write_text("{")
    for command in (["watch", "sums/seed-3"], ["runs", "show", "sums/seed-3"]):
        done = grpo(*command, cwd=folder)
        assert done.returncode == 2
        assert "status.json is damaged: it is cut off, or not JSON. Fix: delete it" in done.stderr
    listed = grpo("runs", "list", cwd=folder)
    assert "damaged" in listed.stdout
    assert "is damaged" in listed.stderr
