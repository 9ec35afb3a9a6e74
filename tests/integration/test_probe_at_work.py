"""`grpo probe`, and `grpo train` with its probe: what is printed, kept and left behind."""

import json
import os
import signal
import subprocess
import time

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_cli.probing.counting import read_shape
from grpo_cli.recipe.model import ModelConfig
from tests.forking import ForkedPopen
from tests.in_process import run_command
from tests.integration.conftest import RECIPE
from tests.tiny_models import make_tiny_model

OWN = RECIPE.replace(
    '  - {{kind: regex, pattern: "a", name: has_a}}\n',
    "  - {{kind: python, path: ./own.py:own}}\n",
)


def own_reward(workshop, body, text=OWN):
    """Writes a reward of one's own and the recipe that names it."""
    (workshop.folder / "own.py").write_text(body)
    return workshop.write(text)


def probe(workshop, path, *flags):
    done = workshop.grpo("probe", path, "--json", *flags)
    return done, json.loads(done.stdout)


def train(workshop, *arguments):
    """`grpo train` as a user types it, with the probe."""
    return run_command(["train", *map(str, arguments)], workshop.folder)


def test_what_a_reward_prints_does_not_get_into_the_json(workshop):
    path = own_reward(
        workshop,
        "print('{on import')\n"
        "def own(completions, **kwargs):\n"
        "    print('{not json')\n"
        "    return [float(len(c)) for c in completions]\n",
    )
    done, told = probe(workshop, path, "--quick")
    assert done.returncode == 0
    assert "{not json" in done.stderr
    assert told["quick"] is True
    assert told["reward_test"]["rows"] == 8


@pytest.mark.parametrize(
    "body",
    [
        "def own(completions, trainer_state, **kwargs):\n"
        "    return [float(trainer_state.global_step)] * len(completions)\n",
        "def own(completions, prompts, **kwargs):\n"
        "    assert len(set(map(str, prompts))) < len(prompts), 'not whole groups'\n"
        "    return [float(len(c[0]['content'])) for c in completions]\n",
        "def own(completions, **kwargs):\n"
        "    return [float(len(ids)) for ids in kwargs['completion_ids']]\n",
    ],
    ids=["trainer_state", "whole groups", "token ids"],
)
def test_a_reward_that_works_in_training_does_not_stop_it(workshop, body):
    path = own_reward(workshop, body)
    done = train(workshop, path, "--set", "evaluation.limit=0", "--set", "training.max_steps=1")
    assert done.returncode == 0, done.stderr
    assert workshop.status()["state"] == "completed"


def test_training_is_not_started_where_the_probe_finds_an_error(workshop):
    path = own_reward(
        workshop, "def own(completions, **kwargs):\n    raise ValueError('broken here')\n"
    )
    done = train(workshop, path)
    assert done.returncode == 1
    assert "broken here" in done.stderr
    assert "nothing was trained. --no-probe skips this probe" in done.stderr
    assert not (workshop.folder / "runs").exists()


@pytest.mark.slow
def test_a_probe_that_breaks_is_not_passed_over(workshop):
    path = own_reward(workshop, "import os\ndef own(completions, **kwargs):\n    os._exit(0)\n")
    done = workshop.process("train", path, probe=True)
    assert done.returncode != 0
    assert "the probe ended without a result" in done.stderr
    assert not (workshop.folder / "runs").exists()


def test_a_reward_that_ends_the_process_is_an_error_of_the_probe(workshop):
    path = own_reward(workshop, "import os\ndef own(completions, **kwargs):\n    os._exit(0)\n")
    done = workshop.grpo("probe", path, "--quick")
    assert done.returncode == 1
    assert "exited with code 0 before it had a result" in done.stderr


@pytest.mark.parametrize(
    "sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_the_probe_ends_with_its_training(workshop, sent):
    path = own_reward(
        workshop,
        "import pathlib, time\n"
        "def own(completions, **kwargs):\n"
        "    pathlib.Path('asked').touch()\n"
        "    time.sleep(600)\n",
    )
    process = ForkedPopen(
        **workshop.command("train", path, probe=True),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 240
        while not (workshop.folder / "asked").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        os.kill(process.pid, sent)
        process.communicate(timeout=120)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
    finally:
        process.kill()


def test_the_whole_probe_of_a_tiny_model(workshop):
    text = RECIPE.replace(
        "  num_generations: 2\n", "  num_generations: 4\n  generation_kwargs: {{do_sample: true}}\n"
    )
    done, told = probe(workshop, workshop.write(text), "--prompts", "4")
    assert done.returncode == 0, done.stderr
    assert (told["signal"]["prompts"], told["signal"]["completions"]) == (4, 16)
    assert len(told["samples"]) == 16
    assert told["completion_lengths"]["limit"] == 8
    assert told["time"]["total_s"] > 0
    assert told["memory"]["peak_bytes"] > 2**28
    mean = sum(sample["total"] for sample in told["samples"]) / 16
    assert told["signal"]["total"]["mean"] == pytest.approx(mean)
    shown = workshop.grpo("probe", workshop.folder / "recipe.yaml", "--prompts", "2")
    for section in ("prompt", "rewards", "samples", "signal", "length", "cost"):
        assert f"\n{section}\n" in f"\n{shown.stdout}"
    assert not (workshop.folder / "runs").exists()


def test_rows_that_are_all_too_long_are_an_error(workshop):
    text = RECIPE.replace("  kind: inline\n", "  kind: inline\n  max_prompt_length: 3\n")
    done = workshop.grpo("probe", workshop.write(text))
    assert done.returncode == 2
    assert "max_prompt_length: no training row is left" in done.stderr


def test_what_is_counted_without_weights_is_what_a_real_forward_pass_keeps(tmp_path):
    folder = make_tiny_model(tmp_path / "tiny", kind="llama", hidden_size=64)
    shape = read_shape(ModelConfig(path=str(folder), dtype="float32"), batch=2, length=40)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    known = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(input_ids=torch.ones(2, 40, dtype=torch.long), use_cache=False)
    real = sum(storage.nbytes() for storage in kept.values()) / 80
    assert output.last_hidden_state.shape == (2, 40, 64)
    assert shape.saved_bytes_per_token == pytest.approx(real, rel=0.05)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.weight_bytes == 4 * shape.parameters


def test_adapters_and_quantized_weights_are_counted(tmp_path):
    folder = str(make_tiny_model(tmp_path / "tiny", kind="llama", hidden_size=64))
    lora = {"r": 4, "target_modules": ["q_proj"]}
    full = read_shape(ModelConfig(path=folder, dtype="bfloat16"), batch=1, length=8)
    adapted = read_shape(ModelConfig(path=folder, dtype="bfloat16", lora=lora), batch=1, length=8)
    four = read_shape(
        ModelConfig(path=folder, dtype="bfloat16", lora=lora, quantization="4bit"),
        batch=1,
        length=8,
    )
    # Two layers of q_proj, 64 to 64: two matrices of 64 × 4 each, in float32.
    assert adapted.trainable == 2 * 2 * 64 * 4
    assert adapted.trainable_bytes == 4 * adapted.trainable
    assert adapted.weight_bytes == full.weight_bytes + adapted.trainable_bytes
    assert (full.adapted_bytes, adapted.adapted_bytes) == (0, 2 * 2 * 64 * 64)
    assert four.weight_bytes < adapted.weight_bytes
    assert not adapted.head_trained
    assert full.head_trained
