"""Where weights are read to, by strategy and device; and that it changes nothing but the place."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import deepspeed
from trl.trainer import grpo_trainer

from grpo_cli.models.loading import load_model
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.training.build import loading_device
from grpo_cli.training.trainer import reference_on
from tests.tiny_models import make_tiny_model
from tests.unit.launch.golden_plans import STRATEGIES, usual

REPORT = dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys"), ())
GPU = torch.device("cuda", 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", kind="llama")


@pytest.fixture
def environment(request, monkeypatch):
    """The environment of a strategy's workers, and what TRL's arguments make of it."""
    strategy = request.param
    for name, value in usual(strategy).environment.items():
        monkeypatch.setenv(name, value)
    # As `TrainingArguments` leaves it; DeepSpeed itself is not installed here.
    config = mock.Mock(is_zero3=lambda: os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3")
    if strategy.startswith("zero"):
        deepspeed.set_hf_deepspeed_config(config)
    yield strategy
    deepspeed.unset_hf_deepspeed_config()


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("environment", STRATEGIES[1:], indirect=True)
def test_whole_weights_are_read_to_the_gpu_and_shards_are_left_to_their_owners(
    environment, cpu, tiny
):
    device = torch.device("cpu") if cpu else GPU
    session = SimpleNamespace(cpu=cpu, processes=SimpleNamespace(device=device))
    expected = None if cpu or environment in ("fsdp2", "zero3") else GPU
    assert loading_device(session) == expected
    stub = mock.Mock(named_parameters=list, state_dict=dict)
    with mock.patch.object(
        AutoModelForCausalLM, "from_pretrained", return_value=(stub, REPORT)
    ) as read:
        load_model(
            ModelConfig(path=str(tiny)), device_is_cuda=not cpu, device=loading_device(session)
        )
    assert read.call_args.kwargs.get("device_map") == (expected and {"": GPU})


def test_a_model_that_is_read_to_a_device_is_the_same(tiny):
    config = ModelConfig(path=str(tiny))
    plain, placed = load_model(config), load_model(config, device=torch.device("cpu"))
    # With such a map transformers' trainer would leave the model where it is.
    assert not hasattr(placed, "hf_device_map")
    weights = dict(placed.named_parameters())
    assert all(torch.equal(weights[name], each) for name, each in plain.named_parameters())


def test_a_recipe_may_place_the_model_itself(tiny):
    stub = mock.Mock(named_parameters=list, state_dict=dict)
    config = ModelConfig(path=str(tiny), init_kwargs={"device_map": "auto"})
    with mock.patch.object(
        AutoModelForCausalLM, "from_pretrained", return_value=(stub, REPORT)
    ) as read:
        load_model(config, device_is_cuda=True, device=GPU)
    assert read.call_args.kwargs["device_map"] == "auto"


@pytest.mark.parametrize("device", [None, GPU])
def test_the_reference_model_is_read_to_the_same_place(monkeypatch, device):
    read = mock.Mock()
    monkeypatch.setattr(grpo_trainer, "create_model_from_path", read)
    with reference_on(device):
        # As TRL does with several processes.
        grpo_trainer.create_model_from_path("base", device_map=None)
    read.assert_called_once_with("base", device_map=device and {"": device})
    assert grpo_trainer.create_model_from_path is read
