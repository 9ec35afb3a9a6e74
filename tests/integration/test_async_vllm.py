"""Asynchronous trainings that sample with a real vLLM, on the CPU; skipped if it is not installed."""

import signal

import pytest

from tests.integration.vllm_runs import (
    MANAGED,
    NEEDS_VLLM,
    assert_ended,
    sets,
    start,
    train,
    workshop_of,
)

pytestmark = NEEDS_VLLM
ASYNC = ("--set", "training.mode=async", "--set", "training.asynchronous.max_staleness=2")


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
def test_a_server_samples_with_the_weights_as_they_move(tmp_path, wide_model, shared_server, lora):
    workshop = workshop_of(tmp_path, wide_model, shared_server.settings)
    more = ["--set", "model.lora={r: 8, target_modules: all-linear}"] if lora else []
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
