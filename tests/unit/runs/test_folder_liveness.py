"""Whether a run is still at work: by its processes here, by the age of its signs elsewhere."""

import json
import os
import platform
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from grpo_cli.runs import folder as folder_module
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import BeatWatch, StatusFile, live_workers, look_at_life, was_started
from tests.run_folders import make_finished_run

WORK = "import sys, time; print('up', flush=True); time.sleep(60)"


def make_running(root, host=None):
    run = make_finished_run(root, state="running")
    run.launch.mkdir()
    if host is not None:
        write_json(run.manifest, {"hardware": {"host": host}})
    return run


def look(run):
    return look_at_life(run, StatusFile(run.status).read())


def grow_old(run, seconds):
    """Makes every sign of life so old."""
    then = time.time() - seconds
    told = run.status.read_text()
    values = {**json.loads(told), "updated_at": then}
    write_json(run.status, values)
    for path in (run.metrics, *run.launch.glob("*.beat")):
        os.utime(path, (then, then))


@pytest.fixture
def worker(tmp_path):
    run = make_running(tmp_path, platform.node())
    command = [sys.executable, "-c", WORK, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        run.worker_pid(0).write_text(str(process.pid))
        yield run, process
        process.kill()


def test_a_run_whose_worker_lives_is_running_however_long_it_says_nothing(worker):
    run, process = worker
    grow_old(run, 90_000)
    assert live_workers(run) == [process.pid]
    assert look(run).state == "running"


def test_a_run_of_this_machine_without_a_worker_is_interrupted(worker):
    run, process = worker
    process.kill()
    process.wait()
    life = look(run)
    assert (life.state, life.here) == ("interrupted", True)


def test_a_number_that_another_program_has_now_is_no_worker(tmp_path):
    run = make_running(tmp_path, platform.node())
    run.worker_pid(0).write_text(str(os.getpid()))
    assert look(run).state == "interrupted"


@pytest.mark.parametrize("host", ["another-machine", None])
def test_elsewhere_the_age_of_the_signs_decides(tmp_path, host):
    run = make_running(tmp_path, host)
    assert look(run).state == "running"
    grow_old(run, 4000)
    assert look(run).state == "interrupted"
    run.launch.joinpath("rank_1.beat").touch()
    assert look(run).state == "running"


def test_elsewhere_it_is_waited_for_as_long_as_its_own_supervisor_would(tmp_path):
    run = make_running(tmp_path, "another-machine")
    write_json(run.plan, {"stall_timeout_s": 90_000})
    grow_old(run, 4000)
    assert look(run).state == "running"


def test_a_state_that_is_final_stands(tmp_path):
    run = make_finished_run(tmp_path, state="failed")
    assert look(run).state == "failed"


def test_a_folder_that_a_dry_run_left_was_never_started(tmp_path):
    run = make_finished_run(tmp_path, state="pending")
    status = StatusFile(run.status).read()
    assert not was_started(run, status)
    run.attempt(1).mkdir(parents=True)
    run.log.write_text("")
    assert was_started(run, status)


def test_only_time_awake_without_a_sign_is_a_stall(tmp_path, monkeypatch):
    run = make_running(tmp_path)
    clock = iter([0, 1, 2, 3, 90_000, 90_001, 90_002])
    # Other threads read the real clock, so only this module's is replaced.
    monkeypatch.setattr(folder_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    watch = BeatWatch(run)
    assert watch.look() == 0
    beat = run.launch / "rank_0.beat"
    # The wall clock was set back meanwhile: what counts is that the sign is another one.
    for age in (0, 5_000):
        beat.touch()
        os.utime(beat, (time.time() - age,) * 2)
        assert watch.look() == 0
    # The machine slept for a day.
    assert watch.look() == 5
    assert watch.look() == 6
    beat.touch()
    assert watch.look() == 0
