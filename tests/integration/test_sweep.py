"""Sweeps at work: killed and resumed, with a cell that fails, with a search; numbers from the runs' files."""

import json
import os
import signal
import time
from pathlib import Path

import numpy
import pytest

from tests.chromium import Page, find_chromium
from tests.forking import ForkedPopen
from tests.integration.conftest import RECIPE

SLOW = """\
import time

def brief(completions, **kwargs):
    time.sleep(0.3)
    return [-0.01 * len(str(completion)) for completion in completions]

def broken(completions, **kwargs):
    raise RuntimeError("no score today")
"""
REWARDS = "rewards:\n  - {{kind: python, path: ./slow.py:brief, name: brief}}\n"
T_OF_TWO, T_OF_TWELVE = 12.7062, 2.2010
"""Student's t at 97.5 % with 1 and 11 degrees of freedom, from a table."""


@pytest.fixture
def recipe(workshop):
    """A recipe of slow steps with 12 held-out prompts, which a mean of scores is measured on."""
    rows = "".join(f'    - {{{{question: "held out {n}", answer: "{n}"}}}}\n' for n in range(12))
    head, _, rest = RECIPE.partition("  eval_rows:\n")
    text = f"{head}  eval_rows:\n{rows}{rest[rest.index('rewards:') :]}"
    (workshop.folder / "slow.py").write_text(SLOW)
    sampled = "evaluation: {{temperature: 1.0}}\n"
    return workshop.write(text.replace("rewards:\n", REWARDS) + sampled)


def sweep(workshop, *arguments):
    return workshop.process("sweep", *arguments)


def read_folder(workshop):
    (folder,) = workshop.folder.glob("runs/tiny/sweeps/*")
    return folder, json.loads((folder / "sweep.json").read_text())


def wait_for_second_run(workshop, process):
    """Wait until the second run has trained two steps."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        runs = list(workshop.folder.glob("runs/tiny/*-2-seed-1/metrics.jsonl"))
        if runs and runs[0].read_text().count('"train"') >= 2:
            return
        time.sleep(0.05)
    pytest.fail("the second run never trained")


def read_rewards(run):
    """The weighted total of each held-out prompt after training, from the run's own file."""
    lines = (Path(run) / "eval" / "after.jsonl").read_text().splitlines()
    return numpy.array([json.loads(line)["total"] for line in lines])


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_its_numbers_are_those_of_its_runs(workshop, recipe):
    flags = ["--grid", "training.learning_rate=1e-3,1e-2", "--seeds", "1,2", "--no-probe"]
    steps = ["--set", "training.max_steps=8", "--set", "training.save_steps=1"]
    command = workshop.command("sweep", recipe, *flags, *steps)
    with ForkedPopen(**command, start_new_session=True) as process:
        wait_for_second_run(workshop, process)
        os.kill(process.pid, signal.SIGKILL)
    folder, written = read_folder(workshop)
    states = [run["state"] for cell in written["cells"] for run in cell["runs"]]
    assert states == ["completed", "waiting", "running", "waiting"]

    done = sweep(workshop, "--resume", "latest", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    runs = {(cell["cell"], run["seed"]): run for cell in told["cells"] for run in cell["runs"]}
    assert {run["state"] for run in runs.values()} == {"completed"}
    attempts = {
        key: len(list(Path(run["run"]).glob("logs/attempt_*"))) for key, run in runs.items()
    }
    assert attempts == {(1, 1): 1, (1, 2): 1, (2, 1): 2, (2, 2): 1}
    resumed = [
        record
        for line in (Path(runs[2, 1]["run"]) / "metrics.jsonl").read_text().splitlines()
        if (record := json.loads(line))["event"] == "resume"
    ]
    assert resumed[0]["step"] >= 1
    check_numbers(told, {key: read_rewards(run["run"]) for key, run in runs.items()})
    # `grpo expect` takes the runs of a cell as they are.
    done = workshop.grpo("expect", *(runs[1, seed]["run"] for seed in (1, 2)))
    assert "metric: reward" in done.stdout, done.stderr
    look_at_page(folder / "sweep.html")
    again = workshop.grpo("sweep", "--resume", str(folder))
    assert again.returncode == 0, again.stderr
    best = told["cells"][told["best"] - 1]
    assert f"{best['mean']['value']:.3f}".replace("-", "−") in again.stdout
    # Another recipe would be another sweep.
    recipe.write_text(recipe.read_text().replace("scale: 0.1", "scale: 0.2"))
    done = workshop.grpo("sweep", "--resume", "latest")
    assert done.returncode == 2
    assert "rewards[1].params.scale" in done.stderr or "scale" in done.stderr


def look_at_page(path):
    """The page draws its charts, without an error and without the network."""
    if find_chromium() is None:
        return
    with Page() as page:
        page.open(path)
        page.wait_for("document.querySelectorAll('#result .main-svg').length >= 2")
        assert page.ask("document.querySelectorAll('table.ranking tbody tr').length") == 2
        assert page.problems == []
        assert all(address.startswith(("file:", "data:", "blob:")) for address in page.requests)


def check_numbers(told, rewards):
    """Compute the table from the totals of each cell, seed and prompt."""
    assert told["metric"] == "reward"
    for cell in told["cells"]:
        means = numpy.array([rewards[cell["cell"], seed].mean() for seed in (1, 2)])
        half = T_OF_TWO * means.std(ddof=1) / numpy.sqrt(2)
        expected = [means.mean(), means.mean() - half, means.mean() + half]
        found = [cell["mean"][name] for name in ("value", "low", "high")]
        assert found == pytest.approx(expected, rel=1e-4)
        assert [run["value"] for run in cell["runs"]] == pytest.approx(list(means))
    best, other = told["best"], 3 - told["best"]
    difference = numpy.array([rewards[best, seed] - rewards[other, seed] for seed in (1, 2)])
    rows, columns, mean = difference.mean(1), difference.mean(0), difference.mean()
    residual = difference - rows[:, None] - columns[None] + mean
    noise = (residual**2).sum() / 11 / 24
    prompts = max(columns.var(ddof=1) / 12 - noise, 0)
    half = numpy.sqrt(T_OF_TWO**2 * rows.var(ddof=1) / 2 + T_OF_TWELVE**2 * prompts)
    found = [told["cells"][other - 1]["difference"][name] for name in ("value", "low", "high")]
    assert found == pytest.approx([mean, mean - half, mean + half], rel=1e-4)


def test_a_cell_that_fails_is_a_result(workshop, recipe):
    grid = "rewards.0.path=./slow.py:brief,./slow.py:broken"
    done = sweep(workshop, recipe, "--grid", grid, "--seeds", "1,", "--no-probe", "--quiet")
    assert done.returncode == 0, done.stderr
    assert "1/1" in done.stdout
    assert "0/1" in done.stdout
    assert "cell 2, seed 1: failed: " in done.stdout
    assert "no score today" in done.stdout
    folder, written = read_folder(workshop)
    assert [cell["runs"][0]["state"] for cell in written["cells"]] == ["completed", "failed"]
    page = (folder / "sweep.html").read_text()
    assert "no score today" in page


def test_ctrl_c_lets_the_run_save_and_says_how_to_resume(workshop, recipe):
    flags = ["--grid", "training.learning_rate=1e-3,1e-2", "--seeds", "1,", "--no-probe"]
    command = workshop.command("sweep", recipe, *flags, "--set", "training.max_steps=8")
    log = workshop.folder / "stderr"
    with log.open("w") as stderr, ForkedPopen(**command, stderr=stderr) as process:
        wait_for_second_run(workshop, process)
        process.send_signal(signal.SIGINT)
    folder, written = read_folder(workshop)
    assert process.returncode == 130, log.read_text()
    assert f"To resume: grpo sweep --resume {folder}" in log.read_text()
    assert [cell["runs"][0]["state"] for cell in written["cells"]] == ["completed", "stopped"]
    (stopped,) = workshop.folder.glob("runs/tiny/*-2-seed-1")
    assert list(stopped.glob("checkpoints/checkpoint-*"))
