"""`grpo watch` beside real processes: one that writes a run's records, and a real training."""

import fcntl
import json
import os
import platform
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import StatusFile
from grpo_cli.runs.metrics import append_record
from tests.integration.conftest import RECIPE
from tests.run_folders import make_finished_run, make_run

ROOT = Path(__file__).parents[2]
WRITER = """
import sys, time
from pathlib import Path
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.folder import StatusFile
run = RunFolder(Path(sys.argv[1]))
run.worker_pid(0).write_text(str(__import__("os").getpid()))
print("up", flush=True)
for step in range(4, int(sys.argv[2]) + 1):
    time.sleep(0.2)
    record = {"event": "train", "step": step, "total_steps": 10, "reward": step / 10}
    append_record(run.metrics, record)
    StatusFile(run.status).update(step=step)
if step < 10:
    time.sleep(60)
StatusFile(run.status).update(state=sys.argv[3], reason="as it was told")
"""


def make_begun(tmp_path):
    """A run of this machine that has done three of ten steps."""
    run = make_run(tmp_path / "runs")
    run.write_recipe(make_finished_run(tmp_path / "other").read_recipe())
    for folder in (run.launch, run.attempt(1)):
        folder.mkdir(parents=True)
    run.log.touch()
    write_json(run.manifest, {"hardware": {"host": platform.node()}})
    return run


def start(command, **more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    return subprocess.Popen([sys.executable, *map(str, command)], env=environment, **more)


def start_writing(run, steps=10, state="completed"):
    writer = start(["-c", WRITER, run.path, steps, state], stdout=subprocess.PIPE)
    writer.stdout.readline()
    return writer


def start_watching(cwd, *arguments, **more):
    return start(["-m", "grpo_cli", "watch", *arguments], cwd=cwd, **more)


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("failed", 1), ("stopped", 1)])
def test_a_run_is_watched_to_its_end_from_another_process(tmp_path, state, code):
    run = make_begun(tmp_path)
    with start_writing(run, state=state), start_watching(tmp_path, **PIPES) as watching:
        said, errors = watching.communicate(timeout=60)
    assert watching.returncode == code, errors
    steps = [line.split()[1] for line in said.splitlines() if line.startswith("step ")]
    assert steps == [f"{step}/10" for step in range(1, 11)]
    assert f"{state}: 10/10 steps" in said
    assert "\x1b" not in said


def test_records_come_as_lines_of_json_with_the_summary_last(tmp_path):
    run = make_begun(tmp_path)
    with start_writing(run), start_watching(tmp_path, "name", "--json", **PIPES) as watching:
        said, errors = watching.communicate(timeout=60)
    told = [json.loads(line) for line in said.splitlines()]
    assert [each.get("step") for each in told[:-1]] == list(range(1, 11))
    assert (told[-1]["event"], told[-1]["state"]) == ("summary", "completed"), errors


@pytest.mark.slow
def test_a_run_whose_process_was_killed_is_told_of(tmp_path):
    run = make_begun(tmp_path)
    with start_writing(run, steps=4) as writer, start_watching(tmp_path, **PIPES) as watching:
        while "step 4/10" not in watching.stdout.readline():
            assert watching.poll() is None
        writer.kill()
        said, errors = watching.communicate(timeout=60)
    assert watching.returncode == 1
    assert "interrupted: 4/10 steps" in said
    assert "interrupted while training: none of its processes is left" in errors


def test_a_pending_run_is_waited_for_and_one_that_goes_on_is_taken_up(tmp_path):
    run = make_begun(tmp_path)
    run.log.unlink()
    StatusFile(run.status).update(state="pending", phase="starting")
    with start_watching(tmp_path, **PIPES) as watching:
        while "waiting" not in watching.stdout.readline():
            assert watching.poll() is None
        lines = run.metrics.read_bytes().splitlines(True)
        run.metrics.write_bytes(b"".join(lines[:2]))
        append_record(run.metrics, {"event": "resume", "step": 2, "attempt": 2})
        append_record(run.metrics, {"event": "train", "step": 3, "reward": 0.9})
        StatusFile(run.status).update(state="completed", step=3)
        said, errors = watching.communicate(timeout=60)
    assert watching.returncode == 0, errors
    assert said.splitlines()[0] == "going on from step 2 (attempt 2)"
    assert said.splitlines()[1].startswith("step 3  reward 0.900")


def test_whoever_stops_reading_ends_the_watching(tmp_path):
    run = make_begun(tmp_path)
    with start_writing(run, steps=5) as writer:
        with start_watching(tmp_path, **PIPES) as watching:
            watching.stdout.readline()
            watching.stdout.close()
            # All that was written may have been told before.
            append_record(run.metrics, {"event": "train", "step": 6, "reward": 0.6})
            assert watching.wait(timeout=60) == 0
        assert writer.poll() is None
        writer.kill()


def read_screen(ours, until, process):
    """What a terminal was sent until some text came."""
    said = ""
    deadline = time.monotonic() + 60
    while until not in said:
        assert time.monotonic() < deadline, said
        assert process.poll() is None, said
        said += os.read(ours, 65536).decode(errors="replace")
    return said


def open_terminal(columns=80, lines=24):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    return ours, {"stdin": theirs, "stdout": theirs, "stderr": theirs}


def test_a_terminal_gets_a_panel_and_ctrl_c_leaves_the_run_alone(tmp_path):
    run = make_begun(tmp_path)
    ours, terminal = open_terminal()
    with start_writing(run, steps=5) as writer:
        with start_watching(tmp_path, **terminal) as watching:
            shown = read_screen(ours, "step 5/10", watching)
            watching.send_signal(signal.SIGINT)
            shown = read_end(ours, "the run continues")
            assert watching.wait(timeout=60) == 130
        assert writer.poll() is None
        writer.kill()
    assert "stopped watching" in shown


def read_end(ours, until):
    said = ""
    while until not in said:
        said += os.read(ours, 65536).decode(errors="replace")
    return said


@pytest.mark.slow
def test_a_training_of_two_processes_is_watched_from_another_terminal(workshop):
    text = RECIPE.replace("use_cpu: true", "use_cpu: true, num_processes: 2")
    text = text.replace("max_steps: 2", "max_steps: 4")
    ours, terminal = open_terminal(100, 40)
    with subprocess.Popen(
        **workshop.command("train", workshop.write(text), "--quiet"), stdout=subprocess.PIPE
    ) as training:
        deadline = time.monotonic() + 120
        while not list(workshop.folder.glob("runs/*/*/status.json")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with (
            start_watching(workshop.folder, **terminal) as drawn,
            start_watching(workshop.folder, **PIPES) as plain,
        ):
            screen = read_screen(ours, "newest sample", drawn)
            said, errors = plain.communicate(timeout=120)
            screen += read_end(ours, "completed: 4/4 steps")
            assert drawn.wait(timeout=60) == 0
        trained = training.communicate(timeout=120)[0]
    assert plain.returncode == 0, errors
    assert [line.split()[1] for line in said.splitlines() if line.startswith("step ")] == [
        "1/4",
        "2/4",
        "3/4",
        "4/4",
    ]
    assert "· measuring before training" in said
    # The end is what `grpo train` says of it, which waits for its report besides.
    told = [line for line in trained.splitlines() if not line.startswith("  report ")]
    assert [line for line in said.splitlines() if not line.startswith("  report ")][
        -len(told) :
    ] == told
