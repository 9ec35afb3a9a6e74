"""Trainings that sample from one real vLLM server, on the CPU; skipped if vLLM is not installed."""

import pytest

from tests.integration.vllm_runs import (
    ASYNC,
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
