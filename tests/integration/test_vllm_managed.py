"""Trainings of which each starts a vLLM server of its own, on the CPU; skipped if vLLM is not installed."""

import contextlib
import json
import signal
import time

import psutil
import pytest

from tests.integration.vllm_runs import (
    AGREEMENT,
    ASYNC,
    ENVIRONMENT,
    MANAGED,
    NEEDS_VLLM,
    SPREAD,
    assert_ended,
    assert_episodes_run,
    descendants,
    differences,
    is_alive,
    sets,
    start,
    workshop_of,
)

pytestmark = NEEDS_VLLM
# Kills the server while it samples, the reaper of the next one between two steps, and the engine of the third
# while it takes weights. The first and the last are suspended first, so that a request is under way when they die.
DEATHS = """\
import json, os, signal, threading
from pathlib import Path

import psutil
from grpo_cli.training.vllm_client import RunClient

post, planned = RunClient._post, set()


def find(word):
    family = psutil.Process(os.getppid()).children(recursive=True)
    (process,) = [each for each in family if word in " ".join(each.cmdline())]
    return process


def suspend_and_kill(process):
    process.suspend()
    threading.Timer(1.0, process.kill).start()


def post_to_the_dying(self, url, *sizes, **kwargs):
    if "server" in planned and url.endswith("/completions"):
        planned.remove("server")
        suspend_and_kill(psutil.Process(find("EngineCore").ppid()))
    if "engine" in planned and url.endswith("/collective_rpc"):
        planned.remove("engine")
        suspend_and_kill(find("EngineCore"))
    return post(self, url, *sizes, **kwargs)


RunClient._post = post_to_the_dying


def spread(completion_ids, trainer_state, **kwargs):
    step = trainer_state.global_step
    if step == 1:
        planned.add("server")
    if step == 5:
        planned.add("engine")
    if step % 2:
        reaper = find("processes.py")
        family = [(each.pid, each.create_time()) for each in reaper.children(recursive=True)]
        Path(__file__).with_name(f"family_{step}.json").write_text(json.dumps(family))
        if step == 3:
            reaper.kill()
    return [sum(ids) / 1000 for ids in completion_ids]
"""


@pytest.fixture(scope="module", autouse=True)
def run_with_deaths(tmp_path_factory, wide_model):
    """A training in the background, whose managed vLLM server dies three times."""
    workshop = workshop_of(tmp_path_factory.mktemp("deaths"), wide_model, MANAGED)
    (workshop.folder / "spread.py").write_text(DEATHS)
    with start(workshop, *sets(8)) as training:
        yield training


def test_a_signal_ends_the_wait_for_the_server(tmp_path, wide_model):
    workshop = workshop_of(tmp_path, wide_model, MANAGED)
    with start(workshop, *sets(4)) as training:
        training.wait_for("waiting for vLLM")
        processes = training.descendants()
        training.process.send_signal(signal.SIGINT)
        assert training.process.wait(timeout=120) == 130
    assert workshop.status()["state"] == "stopped"
    # The command did not wait for the server to be ready.
    log = workshop.run / "logs" / "attempt_1" / "server.log"
    assert "startup complete" not in log.read_text()
    assert_ended(processes)


def test_a_managed_server_that_cannot_start_ends_the_run_with_its_output(tmp_path, wide_model):
    vllm = "mode: server, server_args: {{block-size: nonsense}}"
    workshop = workshop_of(tmp_path, wide_model, vllm)
    done = workshop.grpo("train", tmp_path / "recipe.yaml", *sets(2), **ENVIRONMENT)
    assert done.returncode == 1
    status = workshop.status()
    assert status["state"] == "failed"
    assert "before it answered" in status["reason"]
    assert "nonsense" in status["traceback"]
    assert "server.log" in status["fix"]
    assert descendants() == []


@pytest.fixture(scope="module")
def trainings(tmp_path_factory, wide_model):
    """Three trainings whose servers load side by side, by the name of what ends them."""
    with contextlib.ExitStack() as stack:
        started = {}
        for end in ("kill", "one signal", "two signals"):
            workshop = workshop_of(tmp_path_factory.mktemp("training"), wide_model, MANAGED)
            if end == "two signals":
                # The second step never ends: the first signal cannot stop the run, and nothing can be saved.
                hang = "    __import__('time').sleep(600 * kwargs['trainer_state'].global_step)\n"
                reward = SPREAD.replace("    return", f"{hang}    return")
                (workshop.folder / "spread.py").write_text(reward)
            started[end] = stack.enter_context(start(workshop, *sets(100_000)))
        yield started


def test_a_killed_command_leaves_no_server_behind(trainings):
    training = trainings["kill"]
    training.reach(1)
    processes = training.descendants()
    assert len(processes) >= 5
    training.process.kill()
    assert_ended(processes)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_run_with_a_server_stops_and_leaves_nothing_behind(trainings, signals):
    training = trainings["one signal" if signals == 1 else "two signals"]
    training.reach(1)
    processes = training.descendants()
    for _ in range(signals):
        training.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert training.process.wait(timeout=120) == 130
    status = training.workshop.status()
    assert status["state"] == "stopped"
    checkpoints = training.workshop.run / "checkpoints"
    saved = list(checkpoints.glob(f"checkpoint-{status['step']}"))
    assert bool(saved) == (signals == 1)
    assert_ended(processes)


def test_a_request_to_stop_saves_and_ends_the_managed_server(tmp_path, wide_model):
    workshop = workshop_of(tmp_path, wide_model, MANAGED)
    with start(workshop, *sets(500), *ASYNC) as training:
        training.reach(1)
        processes = training.descendants()
        training.process.send_signal(signal.SIGTERM)
        training.process.wait(timeout=180)
        assert workshop.status()["state"] == "stopped"
        step = workshop.status()["step"]
        assert (workshop.run / "checkpoints" / f"checkpoint-{step}").is_dir()
        assert_ended(processes)


def test_a_managed_server_that_dies_is_started_again_with_the_weights(run_with_deaths):
    workshop = run_with_deaths.workshop
    code = run_with_deaths.process.wait(timeout=400)
    output = run_with_deaths.output
    assert code == 0, output[-3000:]
    for number in (1, 2, 3):
        assert f"starting it again ({number} of 3 times)" in output
    assert output.count("is back, and gets the weights again") == 3
    assert len(workshop.records("server")) == 3
    assert len(differences(workshop)) == 8
    assert max(differences(workshop)) < AGREEMENT
    # No process of any of the four servers is left.
    living = [each for each in psutil.process_iter() if is_alive(each)]
    identities = {(each.pid, each.create_time()) for each in living}
    for step in (1, 3, 5, 7):
        family = json.loads((workshop.folder / f"family_{step}.json").read_text())
        assert len(family) >= 3
        assert not identities & {tuple(each) for each in family}
    assert not (workshop.run / "launch" / "weights").exists()


def test_a_managed_server_plays_episodes(tmp_path):
    assert_episodes_run(tmp_path, MANAGED)
