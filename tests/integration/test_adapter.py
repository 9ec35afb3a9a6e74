"""Training that goes on from an adapter: from where it was, exactly, and to one adapter of the same base."""

import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_cli.checks.recipe_checks import check_recipe
from grpo_cli.errors import RecipeError
from grpo_cli.machine import Hardware
from tests.integration.conftest import RECIPE, with_held_out_rows

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def start(lora_run, tmp_path):
    """A finished run with LoRA whose adapter was then changed by much, so that base and start differ."""
    (run,) = (lora_run / "runs").glob("*/*")
    shutil.copytree(run, tmp_path / "start")
    base = AutoModelForCausalLM.from_pretrained(
        json.loads((run / "model/adapter_config.json").read_text())["base_model_name_or_path"]
    )
    model = peft.PeftModel.from_pretrained(base, run / "model")
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(tmp_path / "start/model")
    return tmp_path / "start"


def text_of(start):
    return with_held_out_rows(RECIPE).replace("  path: {model}", f"  adapter: {start}")


def logits_of(base, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.arange(3, 12)[None]).logits


def test_training_goes_on_from_an_adapter(workshop, start):
    recipe = workshop.write(text_of(start).replace("max_steps: 2", "max_steps: 3\n  beta: 0.1"))
    done = workshop.grpo("train", recipe, "--set", "training.save_steps=1")
    assert done.returncode == 0, done.stderr
    kl = [record["kl"] for record in workshop.records("train")]
    assert abs(kl[0]) <= 1e-6 < kl[-1]
    run, end = workshop.run, load_file(workshop.run / "model" / WEIGHTS)
    begun = load_file(start / "model" / WEIGHTS)
    assert begun.keys() == end.keys()
    moved = max(float((end[name] - begun[name]).abs().max()) for name in end)
    assert 0 < moved < 0.02
    assert not [*run.rglob("ref")]

    exported = workshop.grpo("export", run, "--to", workshop.folder / "whole")
    assert exported.returncode == 0, exported.stderr
    card = (workshop.folder / "whole/README.md").read_text()
    assert "began from the adapter" in card
    merged, chain = (
        logits_of(workshop.folder / "whole"),
        logits_of(workshop.model, run / "model"),
    )
    assert torch.allclose(merged, chain, atol=1e-4)
    assert not torch.allclose(chain, logits_of(workshop.model), atol=1e-2)

    # Resumed after a step, it ends in the same weights.
    for step in (2, 3):
        shutil.rmtree(run / "checkpoints" / f"checkpoint-{step}")
    shutil.rmtree(run / "model")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "stopped"}))
    resumed = workshop.grpo("train", recipe, "--set", "training.save_steps=1", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    again = load_file(run / "model" / WEIGHTS)
    assert all(torch.equal(again[name], end[name]) for name in end)

    measured = workshop.grpo("eval", run, "--json")
    assert measured.returncode == 0, measured.stderr
    assert json.loads(measured.stdout)["baseline"] == "start"


def cut_short(start):
    file = start / "model" / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def of_another_kind(start):
    file = start / "model/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task_type": "SEQ_CLS"}))


def with_bias(start):
    file = start / "model/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bias": "lora_only"}))


def of_another_base(start):
    file = start / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": "0" * 32}))


@pytest.mark.parametrize(
    ("damage", "more", "path", "seen"),
    [
        (cut_short, "", "model.adapter", "is cut short"),
        (of_another_kind, "", "model.adapter", "another kind: LORA for SEQ_CLS"),
        (of_another_base, "", "model.adapter", "`model.path` is another model"),
        (with_bias, "", "model.adapter", "of which peft makes no copy"),
        (lambda start: None, "\n  lora: {{r: 8}}", "model.lora.r", "is 8, and the adapter has 4"),
        (lambda start: shutil.rmtree(start / "model"), "", "model.adapter", "there is no adapter"),
    ],
)
def test_an_adapter_that_cannot_be_trained_on(workshop, start, damage, more, path, seen):
    damage(start)
    text = text_of(start).replace("max_steps: 2", "max_steps: 2\n  beta: 0.1")
    recipe = workshop.write(text.replace("dtype: float32", f"dtype: float32{more}"))
    try:
        problems = check_recipe(recipe, hardware=Hardware(gpus=0, cpus=2)).errors
    except RecipeError as error:
        problems = error.problems
    (problem,) = problems
    assert problem.path == path
    assert seen in problem.seen


def test_trained_weights_are_never_left_out_in_silence(workshop, start):
    file = start / "model/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["q_proj"]}))
    done = workshop.grpo("train", workshop.write(text_of(start)), "--no-probe")
    assert done.returncode == 1
    assert "belong to no module that adapter_config.json names" in done.stderr
