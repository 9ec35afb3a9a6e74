"""Several processes share one training, in every way that a CPU can: DDP, and DeepSpeed's ZeRO."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from grpo_cli.errors import install_extra
from grpo_cli.launch.plan import build_config
from grpo_cli.recipe.launch import LaunchConfig
from tests.forking import ForkedPopen
from tests.integration.conftest import RECIPE, Workshop
from tests.integration.test_resuming import sets
from tests.nightly import nightly

DEEPSPEED = Path(sys.prefix) / "deepspeed"


# The members of a group take the likeliest token and the next one, whatever the process: what is drawn
# at random depends on how many processes draw. So they are sampled in TRL's own way, where torch draws.
REWARD = """\
import torch

def choose(probabilities, num_samples, **kwargs):
    order = probabilities.argsort(dim=-1, descending=True, stable=True)
    member = torch.arange(len(probabilities)) % 2
    return order.gather(1, member[:, None])

torch.multinomial = choose

def spread(completion_ids, **kwargs):
    return [sum(ids) / 1000 for ids in completion_ids]
"""
RECIPE_OF_IT = RECIPE.replace(
    "rewards:\n", "rewards:\n  - {{kind: python, path: ./spread.py:spread, name: spread}}\n"
).replace("training:\n", "training:\n  fast: {{sampling: false}}\n")


def train(workshop, *flags, more="", code=0):
    (workshop.folder / "spread.py").write_text(REWARD + more)
    recipe, environment = workshop.write(RECIPE_OF_IT), {}
    if any("strategy=zero" in flag for flag in flags):
        modules = os.pathsep.join(filter(None, (str(DEEPSPEED), os.environ.get("PYTHONPATH"))))
        path = os.pathsep.join((str(DEEPSPEED / "bin"), os.environ["PATH"]))
        environment = {"PYTHONPATH": modules, "PATH": path}
    # A process of its own: the reward changes torch.
    done = workshop.process("train", recipe, *flags, **environment)
    assert done.returncode == code, done.stderr
    workshop.said = done.stderr
    return workshop


def logged(workshop, name):
    return pytest.approx([each[name] for each in workshop.records("train")], rel=1e-4, abs=1e-6)


def assert_same(several, alone, what, adapters=False):
    """The same rewards and steps, and to rounding the same weights."""
    for name in ("step", "reward", "loss", "grad_norm", "learning_rate"):
        assert [each[name] for each in several.records("train")] == logged(alone, name)
    places = [each.run / "model" for each in (alone, several)]
    if adapters:
        first, second = (load_file(place / "adapter_model.safetensors") for place in places)
        before = {name: weight for name, weight in first.items() if ".lora_A." in name}
        before |= {name: 0 * weight for name, weight in first.items() if ".lora_B." in name}
    else:
        places.append(alone.model)
        first, second, before = (load_file(place / "model.safetensors") for place in places)
    assert first.keys() == second.keys()
    apart = max((first[name].float() - second[name].float()).abs().max() for name in first)
    moved = max((first[name].float() - before[name].float()).abs().max() for name in first)
    print(what, float(apart), float(moved))
    assert apart < 1e-6 < moved


@pytest.fixture(scope="module")
def alone(tmp_path_factory, chat_model):
    """Three steps of four completions in one process."""
    workshop = Workshop(tmp_path_factory.mktemp("alone"), chat_model)
    return train(workshop, *sets(max_steps=3, optim="sgd"))


# accelerate (1.15) makes an FSDP run of several GPUs alone; of several CPUs it makes DDP, in silence.
FSDP_ON_CPU = """
from accelerate import DistributedType, state

plain = state.AcceleratorState.__init__

def promoted(self, *args, fsdp_plugin=None, **kwargs):
    plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin

state.AcceleratorState.__init__ = promoted
"""


def shared_by(strategy, folder):
    """Flags for two processes, and code that the reward file needs for it."""
    if strategy.startswith("zero") and not DEEPSPEED.is_dir():
        pytest.skip("DeepSpeed is not installed")
    flags = ["--set", "launch.num_processes=2", "--set"]
    if strategy != "fsdp2":
        return [*flags, f"launch.strategy={strategy}"], ""
    config = build_config(LaunchConfig(), "fsdp2", 2, mixed_precision="no")
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(config))
    return [*flags, f"launch.accelerate_config={folder / 'fsdp2.yaml'}"], FSDP_ON_CPU


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", *map(nightly, ("zero1", "zero2", "zero3"))])
def test_two_processes_learn_what_one_does(tmp_path, chat_model, alone, strategy):
    flags, more = shared_by(strategy, tmp_path)
    settings = sets(max_steps=3, optim="sgd", per_device_train_batch_size=2, save_steps=2)
    both = train(Workshop(tmp_path, chat_model), *flags, *settings, more=more)
    assert (both.run / "launch" / "accelerate.yaml").is_file() == (strategy != "fsdp2")
    assert_same(both, alone, strategy)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_processes_with_whole_weights_sample_for_themselves(tmp_path, chat_model, strategy):
    places = []
    for name in ("ddp", strategy):
        (tmp_path / name).mkdir()
        flags, _ = shared_by(name, tmp_path)
        settings = [*sets(max_steps=3, optim="sgd", per_device_train_batch_size=2), "--set"]
        settings += ["training.fast.sampling=true", "--set", "training.fast.no_signal=true"]
        places.append(train(Workshop(tmp_path / name, chat_model), *flags, *settings))
        fast = json.loads((places[-1].run / "manifest.json").read_text())["fast"]
        assert (fast["sampling"], fast["left_off"]) == (True, {})
        # What is sampled so tells its entropy.
        assert all(step["entropy"] > 0 for step in places[-1].records("train"))
    assert_same(places[1], places[0], strategy)


DEADLY = """
import os, signal
from pathlib import Path

calm = spread

def spread(completion_ids, trainer_state=None, **kwargs):
    if os.environ["RANK"] == "1" and trainer_state.global_step == 3 and Path("die").exists():
        Path("die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return calm(completion_ids)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "lora"),
    [
        nightly("fsdp2", False),
        ("fsdp2", True),
        nightly("zero2", False),
        nightly("zero2", True),
        nightly("zero3", False),
        nightly("zero3", True),
    ],
)
def test_a_shared_training_that_was_killed_goes_on(tmp_path, chat_model, strategy, lora):
    places = []
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
        places.append(Workshop(tmp_path / name, chat_model))
    unbroken, broken = places
    settings = sets(max_steps=5, per_device_train_batch_size=2, save_steps=2)
    if lora:
        settings += ["--set", "model.lora={r: 4, target_modules: all-linear}"]
    flags, more = shared_by(strategy, tmp_path)
    train(unbroken, *flags, *settings, more=more + DEADLY)
    (broken.folder / "die").touch()
    train(broken, *flags, *settings, more=more + DEADLY, code=1)
    assert not (broken.folder / "die").exists()
    done = train(broken, *flags, *settings, "--resume", more=more + DEADLY)
    assert "from step 2" in done.said
    for name in ("step", "reward", "loss", "grad_norm", "learning_rate"):
        assert [each[name] for each in broken.records("train")] == logged(unbroken, name)
    kind = "adapter_model" if lora else "model"
    first, second = (load_file(each.run / "model" / f"{kind}.safetensors") for each in places)
    assert first.keys() == second.keys()
    assert max((first[name] - second[name]).abs().max() for name in first) < 1e-6


@pytest.mark.slow
def test_two_machines_learn_what_one_does(tmp_path, chat_model, alone):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"num_machines": 2, "num_processes": 2, "main_process_ip": "127.0.0.1"}
    world["main_process_port"] = port
    settings = sets(max_steps=3, optim="sgd", per_device_train_batch_size=2)
    machines, started = [], []
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        machine = Workshop(tmp_path / str(rank), chat_model)
        (machine.folder / "spread.py").write_text(REWARD)
        recipe = machine.write(RECIPE_OF_IT)
        named = {**world, "machine_rank": rank}
        flags = [
            part for key, value in named.items() for part in ("--set", f"launch.{key}={value}")
        ]
        command = machine.command("train", recipe, *settings, *flags)
        started.append(ForkedPopen(**command, stderr=subprocess.PIPE))
        machines.append(machine)
    for process in started:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    assert_same(machines[0], alone, "two machines")


def test_a_strategy_that_cannot_be_had_is_refused(workshop):
    flags = ["--set", "launch.num_processes=2", "--set"]
    done = workshop.grpo("train", workshop.write(), *flags, "launch.strategy=fsdp2")
    assert done.returncode == 2
    assert "fsdp2 shares a model among GPUs" in done.stderr
    done = workshop.grpo("train", workshop.write(), *flags, "launch.strategy=zero3")
    assert done.returncode == 3
    assert install_extra("deepspeed") in done.stderr


UNEVEN = """
import os

calm = spread

def spread(completion_ids, trainer_state=None, **kwargs):
    rewards = calm(completion_ids)
    # Step 1: process 1 learns nothing. Step 2: nobody does. Step 3: process 0 learns from one group of two.
    step, rank = trainer_state.global_step, os.environ["RANK"]
    if step == 1 or (step == 0 and rank == "1"):
        return [0.5] * len(rewards)
    return [0.5] * 2 + rewards[2:] if step == 2 and rank == "0" else rewards
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", *map(nightly, ("fsdp2", "zero2", "zero3"))])
def test_processes_leave_out_different_numbers_of_rows(tmp_path, chat_model, strategy):
    flags, more = shared_by(strategy, tmp_path)
    flags += ["--set", "rewards.1.weight=0", "--set", "rewards.2.weight=0"]
    settings = sets(
        max_steps=4, optim="sgd", per_device_train_batch_size=2, gradient_accumulation_steps=2
    )
    if strategy == "ddp":
        # One row in each micro-batch: the processes have different numbers of them.
        settings += ["--set", "training.fast.max_tokens_per_micro_batch=1"]
    off = [f"training.fast.{part}=false" for part in ("no_signal", "shared_prompts")]
    done = []
    for fast in ("true", "false"):
        (tmp_path / fast).mkdir()
        workshop = Workshop(tmp_path / fast, chat_model)
        switches = [] if fast == "true" else ["--set", off[0], "--set", off[1]]
        done.append(train(workshop, *flags, *settings, *switches, more=more + UNEVEN))
    assert [each["frac_reward_zero_std"] for each in done[0].records("train")] == [0.5, 1, 0.25, 0]
    assert_same(*done, strategy)
