"""Trainings that sample from one real vLLM server, on the CPU; skipped if vLLM is not installed."""

import os
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.launch.server_process import answers
from grpo_cli.machine import pick_free_port
from grpo_cli.models.teacher_server import TeacherServer
from grpo_cli.upstream.vllm import SERVER_MODULE
from tests.integration.vllm_runs import (
    AGREEMENT,
    ASYNC,
    ENVIRONMENT,
    LORA,
    NEEDS_VLLM,
    assert_dynamic_adapter_run,
    serving,
    sets,
    train,
    workshop_of,
)

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def server(tmp_path_factory, wide_model):
    """A server for several trainings; none may stop it or depend on its weights."""
    with serving(tmp_path_factory.mktemp("server"), wide_model) as server:
        yield server


def test_a_training_waits_for_a_server_that_is_loading_and_leaves_it_running(server):
    # The fixture starts this training before the server answers.
    assert_dynamic_adapter_run(server.first)
    assert server.process.poll() is None
    assert f"base_url={server.address}" in server.announcement


@pytest.fixture
def teaching(tmp_path, wide_model):
    """The address of a server as a user starts it for a teacher."""
    port = str(pick_free_port())
    flags = ["--max-model-len", "256", "--gpu-memory-utilization", "0.05", "--enforce-eager"]
    command = [sys.executable, "-m", SERVER_MODULE, "--model", str(wide_model), "--port", port]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *flags], env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log
        )
        while process.poll() is None and not answers(f"http://127.0.0.1:{port}/health"):
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        process.wait()


def test_a_server_tells_a_teachers_log_probabilities(wide_model, teaching):
    tokenizer = AutoTokenizer.from_pretrained(wide_model)
    model = AutoModelForCausalLM.from_pretrained(wide_model, dtype=torch.float32)
    teacher = TeacherServer(teaching)
    teacher.check_tokenizer(tokenizer)
    ids = torch.arange(60).view(3, 20) * 7 % 250 + 4
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, 15:] = mask[2, :2] = mask[2, 18:] = 0
    told, kept = teacher.read(ids, mask, 8), mask[:, -8:].bool()
    places = (mask.cumsum(1) - 1).clamp(0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=places).logits[:, :-1]
    own = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, -8:, 0]
    assert not told[~kept].any()
    assert (told - own)[kept].abs().mean() < AGREEMENT < own[kept].std() / 5


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
def test_a_server_samples_with_the_weights_as_they_move(tmp_path, wide_model, server, lora):
    workshop = workshop_of(tmp_path, wide_model, server.settings)
    more = ["--set", LORA] if lora else []
    train(workshop, *sets(12), *ASYNC, *more)
    assert workshop.status()["state"] == "completed"
    steps = workshop.records("train")
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert max(step["sample/staleness_max"] for step in steps) <= 2
    assert min(step["grad_norm"] for step in steps) > 0
    # bf16 on both sides, by different kernels.
    assert abs(steps[0]["ratio"] - 1) < 0.05
    # As the learning rate falls, weights two steps old are close to the end's: 0.07 of the largest distance at
    # most, where a server that was never sent any came to 0.38 at least.
    assert steps[-1]["kl"] < 0.2 * max(step["kl"] for step in steps)
