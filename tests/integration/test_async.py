"""Asynchronous trainings: TRL's own trainer, a tiny model, and a server in the test that samples from it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from grpo_cli.recipe.loading import load_recipe
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import StatusFile, create_run
from tests.integration.conftest import RECIPE
from tests.sampling_server import SamplingServer

pytestmark = pytest.mark.slow
LENGTHS = """\
def short(completions, completion_ids, trainer_state, **kwargs):
    assert trainer_state.global_step >= 0
    return [-len(ids) + ids[0] / 1000 for ids in completion_ids]
"""


@pytest.fixture
def server(chat_model):
    serving = SamplingServer(chat_model)
    yield serving
    serving.close()


def prepare(workshop, server, *, sets=(), **training):
    """A run folder as `grpo train` makes it, less the checks: they want vLLM to be installed."""
    (workshop.folder / "own.py").write_text(LENGTHS)
    plain = yaml.safe_load(
        workshop.write(
            RECIPE.replace(
                'kind: regex, pattern: "a", name: has_a', "kind: python, path: ./own.py:short"
            )
        ).read_text()
    )
    plain["generation"] |= {"backend": "vllm", "vllm": {"mode": "server", "base_url": server.url}}
    plain["training"] |= {"mode": "async", "save_steps": 2, "max_steps": 4, **training}
    text = yaml.safe_dump(plain)
    path = workshop.folder / "recipe.yaml"
    path.write_text(text)
    return create_run(workshop.folder / "runs", load_recipe(path, list(sets)), text)


def launch(workshop, folder):
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_cli.training.worker", folder.path],
        cwd=workshop.folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_training_learns_from_what_a_server_samples_meanwhile(workshop, server):
    folder = prepare(workshop, server)
    process = launch(workshop, folder)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said[-4000:]
    status = StatusFile(folder.status).read()
    assert (status.state, status.step) == ("completed", 4)
    steps = workshop.records("train")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for key in ("reward", "reward_std", "rewards/short/mean", "completions/mean_length"):
        assert all(step[key] is not None for step in steps), key
    for key in ("time/sampling", "time/learning", "num_tokens"):
        assert all(step[key] >= 0 for step in steps), key
    # The server sampled with weights that moved, and never far behind.
    assert server.loaded == 5
    assert all(0 <= step["sample/staleness_max"] <= 4 for step in steps)
    assert abs(steps[0]["ratio"] - 1) < 1e-3
    # What was trained is what the server has, and what was saved.
    trained, base = weights_of(folder.model), weights_of(workshop.model)
    assert any(not torch.equal(trained[name], base[name]) for name in base)
    served = server.model.state_dict()
    assert all(torch.allclose(served[name], trained[name], atol=1e-6) for name in trained)
    groups = [json.loads(line) for line in (folder.completions / "rank_0.jsonl").open()]
    assert len(groups) >= 8
    assert {*groups[0]["rewards"]} == {"length", "short"}
    saved = {path.name for path in folder.checkpoints.glob("checkpoint-*")}
    assert saved == {"checkpoint-2", "checkpoint-4"}
    own = torch.load(folder.checkpoints / "checkpoint-4" / "process_0.pt")
    assert own["learned"] == sum(step["batch/samples_per_step"] for step in steps)
    measured = {path.name for path in folder.evaluations.glob("*.json")}
    assert measured == {"before.json", "after.json"}


def test_a_stopped_training_goes_on_behind_what_it_learned_from(workshop, server):
    lora = "model.lora={r: 4, lora_alpha: 8, target_modules: all-linear}"
    folder = prepare(workshop, server, sets=[lora], max_steps=300, save_steps=1000)
    process = launch(workshop, folder)
    wait_for(lambda: folder.metrics.is_file() and len(workshop.records("train")) >= 2, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    status = StatusFile(folder.status).read()
    assert status.state == "stopped", said[-4000:]
    (checkpoint,) = folder.checkpoints.glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{status.step}"
    done = len(workshop.records("train"))
    write_json(folder.resumption, {"checkpoint": checkpoint.name, "step": status.step})
    recipe = folder.read_recipe()
    training = recipe.training.model_copy(update={"max_steps": status.step + 2})
    folder.write_recipe(recipe.model_copy(update={"training": training}))
    server.asked.clear()
    process = launch(workshop, folder)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said[-4000:]
    steps = workshop.records("train")
    assert [step["step"] for step in steps[done:]] == [status.step + 1, status.step + 2]
    assert steps[-1]["num_tokens"] > steps[done - 1]["num_tokens"]
    # The server was given what the checkpoint has before it sampled anything.
    assert server.asked.index("/collective_rpc") < server.asked.index("/v1/completions")
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(workshop.model), folder.model
    ).merge_and_unload()
    served = server.model.state_dict()
    assert all(
        torch.allclose(served[name], value, atol=1e-5)
        for name, value in adapted.state_dict().items()
    )


def wait_for(holds, process, limit_s=240):
    deadline = time.monotonic() + limit_s
    while not holds():
        assert process.poll() is None, process.communicate()[1][-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
