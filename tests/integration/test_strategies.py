"""Several processes share one training, in every way that a CPU can: DDP, and DeepSpeed's ZeRO."""

import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.conftest import RECIPE, Workshop
from tests.integration.test_resuming import sets

DEEPSPEED = Path(sys.prefix) / "deepspeed"


def train(workshop, *flags):
    path = os.pathsep.join((str(DEEPSPEED / "bin"), os.environ["PATH"]))
    recipe = workshop.write(RECIPE)
    done = workshop.grpo("train", recipe, *flags, PYTHONPATH=str(DEEPSPEED), PATH=path)
    assert done.returncode == 0, done.stderr
    return workshop


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_two_processes_learn_what_one_does(tmp_path, chat_model, strategy):
    if strategy.startswith("zero") and not DEEPSPEED.is_dir():
        pytest.skip("DeepSpeed is not installed")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone = train(Workshop(tmp_path / "one", chat_model), *sets(max_steps=2, optim="sgd"))
    flags = ["--set", "launch.num_processes=2", "--set", f"launch.strategy={strategy}"]
    settings = sets(max_steps=2, optim="sgd", per_device_train_batch_size=2, save_steps=2)
    both = train(Workshop(tmp_path / "two", chat_model), *flags, *settings)
    assert (both.run / "launch" / "accelerate.yaml").is_file()
    first, second = (load_file(each.run / "model" / "model.safetensors") for each in (alone, both))
    assert first.keys() == second.keys()
    assert all(first[name].shape == second[name].shape for name in first)
    assert [each["step"] for each in both.records("train")] == [1, 2]


def test_a_strategy_that_cannot_be_had_is_refused(workshop):
    flags = ["--set", "launch.num_processes=2", "--set"]
    done = workshop.grpo("train", workshop.write(), *flags, "launch.strategy=fsdp2")
    assert done.returncode == 2
    assert "fsdp2 shares a model among GPUs" in done.stderr
    done = workshop.grpo("train", workshop.write(), *flags, "launch.strategy=zero3")
    assert done.returncode == 2
    assert 'pip install "grpo-cli[deepspeed]"' in done.stderr
