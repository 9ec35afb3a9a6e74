"""What CPUs cannot show: training on GPUs, vLLM beside it, weights handed over by NCCL, FSDP2.

`make test-gpu` runs these where there are GPUs; those that need two, or vLLM, are skipped elsewhere.
"""

import importlib.util
import signal

import pytest
import torch

from tests.integration.conftest import Workshop
from tests.integration.test_strategies import assert_same, train
from tests.integration.vllm_runs import (
    AGREEMENT,
    descendants,
    differences,
    sets,
    start,
    workshop_of,
)
from tests.integration.vllm_runs import train as train_with_vllm
from tests.tiny_models import make_tiny_model

GPUS = torch.cuda.device_count()
ON_GPU = ("--set", "launch.use_cpu=false")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="there is no GPU")]
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "wide", hidden_size=256)


def plain(steps):
    values = {"max_steps": steps, "optim": "sgd", "bf16": "false"}
    return [part for each in values.items() for part in ("--set", f"training.{each[0]}={each[1]}")]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@needs_two
def test_two_gpus_learn_what_one_does(tmp_path, model, strategy):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = Workshop(tmp_path / "one", model)
    train(one, *ON_GPU, "--set", "launch.num_processes=1", *plain(3))
    flags = ["launch.num_processes=2", f"launch.strategy={strategy}"]
    flags += ["training.per_device_train_batch_size=2"]
    named = [part for text in flags for part in ("--set", text)]
    two = train(Workshop(tmp_path / "two", model), *ON_GPU, *named, *plain(3))
    assert_same(two, one, strategy)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
@needs_vllm
def test_colocated_vllm_has_the_weights_of_the_step(tmp_path, model, lora):
    workshop = workshop_of(tmp_path, model, "mode: colocate")
    more = ["--set", "model.lora={r: 8, target_modules: all-linear}"] if lora else []
    train_with_vllm(workshop, *ON_GPU, *sets(6), *more, "--set", "launch.num_processes=1")
    assert len(differences(workshop)) == 6
    assert max(differences(workshop)) < AGREEMENT


@needs_two
@needs_vllm
def test_a_managed_server_that_dies_is_started_again_with_the_weights(tmp_path, model):
    workshop = workshop_of(tmp_path, model, "mode: server")
    with start(workshop, *ON_GPU, *sets(24)) as training:
        training.reach(4)
        started = training.descendants()
        (server,) = [each for each in started if "serve" in each.cmdline()[2:4]]
        server.send_signal(signal.SIGKILL)
        assert training.process.wait(timeout=300) == 0, training.output[-3000:]
    assert "is back, and gets the weights again" in training.output
    assert max(differences(workshop)) < AGREEMENT
    assert descendants() == []


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
@needs_two
@needs_vllm
def test_an_asynchronous_training_hands_weights_to_the_server_by_nccl(tmp_path, model, lora):
    workshop = workshop_of(tmp_path, model, "mode: server")
    more = ["--set", "model.lora={r: 8, target_modules: all-linear}"] if lora else []
    train_with_vllm(workshop, *ON_GPU, *sets(6), *more, "--set", "training.mode=async")
    steps = workshop.records("train")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert min(step["grad_norm"] for step in steps) > 0
    assert min(step["time/sync"] for step in steps[1:]) > 0
    assert max(abs(step["ratio"] - 1) for step in steps) < 0.5
    assert descendants() == []
