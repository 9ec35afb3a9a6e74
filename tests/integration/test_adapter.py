"""Training that goes on from an adapter: from where it was, exactly, and to one adapter of the same base."""

import json
import math
import shutil
from types import SimpleNamespace

import peft
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from trl import SyncRefModelCallback

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.errors import RecipeError
from grpo_cli.launch.server_plan import find_served
from grpo_cli.machine import Hardware
from grpo_cli.serve.chat import SamplingParams, open_model
from grpo_cli.training.trainer import SyncAdapterCallback
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
    resume = ("train", recipe, "--set", "training.save_steps=1", "--resume")
    save_file({name: each + 1 for name, each in begun.items()}, start / "model" / WEIGHTS)
    refused = workshop.grpo(*resume)
    assert refused.returncode == 1
    assert "`model.adapter` is not what this run began with" in refused.stderr
    save_file(begun, start / "model" / WEIGHTS, metadata={"format": "pt"})
    resumed = workshop.grpo(*resume)
    assert resumed.returncode == 0, resumed.stderr
    again = load_file(run / "model" / WEIGHTS)
    assert all(torch.equal(again[name], end[name]) for name in end)

    measured = workshop.grpo("eval", run, "--json")
    assert measured.returncode == 0, measured.stderr
    assert json.loads(measured.stdout)["baseline"] == "start"
    checked = workshop.grpo("check", recipe)
    assert str(start / "model") in checked.stdout.replace("\n", "")

    served = find_served(run, None)
    assert (served.model, served.adapter) == (str(workshop.model), run / "model")
    talk = open_model(served, SamplingParams(temperature=0, max_tokens=4))
    assert isinstance("".join(talk([{"role": "user", "content": "count 1"}])), str)


def test_the_reference_is_the_base_by_choice(workshop, start):
    text = text_of(start).replace("max_steps: 2", "max_steps: 1\n  beta: 0.1")
    named = f"adapter: {{{{path: {start}, reference: base}}}}"
    done = workshop.grpo("train", workshop.write(text.replace(f"adapter: {start}", named)))
    assert done.returncode == 0, done.stderr
    (record,) = workshop.records("train")
    assert record["kl"] > 1e-3
    assert not [*workshop.run.rglob("ref")]


@pytest.mark.parametrize("began", ["fresh", "trained"])
def test_an_adapter_is_the_reference_that_follows_it(workshop, start, began):
    text = text_of(start)
    if began == "fresh":
        text = text.replace(f"adapter: {start}", "path: {model}\n  lora: {{r: 4, lora_alpha: 8}}")
    text = text.replace("max_steps: 2", "max_steps: 4\n  beta: 0.1\n  sync_ref_model: true")
    flags = [f"training.{name}" for name in ("ref_model_sync_steps=2", "ref_model_mixup_alpha=1.0",
             "learning_rate=0.01", "save_steps=3")]  # fmt: skip
    flags = [part for flag in flags for part in ("--set", flag)]
    recipe = workshop.write(text)
    done = workshop.grpo("train", recipe, *flags)
    assert done.returncode == 0, done.stderr
    # After every other step the reference is the trained adapter.
    kl = [record["kl"] for record in workshop.records("train")]
    assert max(kl[0], kl[2]) < 1e-6 < 1e-5 < max(kl[1], kl[3])
    run, end = workshop.run, load_file(workshop.run / "model" / WEIGHTS)
    assert not [*run.rglob("ref")]

    for left in (run / "checkpoints/checkpoint-4", run / "model"):
        shutil.rmtree(left)
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "stopped"}))
    resumed = workshop.grpo("train", recipe, *flags, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    again = load_file(run / "model" / WEIGHTS)
    assert all(torch.equal(again[name], end[name]) for name in end)


def test_adapters_are_mixed_as_trl_mixes_models(start, chat_model):
    def load():
        model = AutoModelForCausalLM.from_pretrained(chat_model)
        return peft.PeftModel.from_pretrained(model, start / "model")

    both, trained, reference = load(), load(), load()
    both.load_adapter(start / "model", "ref")
    for model in (both, trained):
        torch.manual_seed(0)
        for name, weight in model.named_parameters():
            if ".default." in name:
                weight.data += torch.randn_like(weight)
    Accelerator(cpu=True)  # TRL asks its state for DeepSpeed.
    SyncAdapterCallback(both).on_step_end(
        SimpleNamespace(ref_model_sync_steps=1, ref_model_mixup_alpha=0.3),
        SimpleNamespace(global_step=1),
        None,
        model=both,
    )
    SyncRefModelCallback._sync_target_model(trained, reference, 0.3)
    weights = dict(both.named_parameters())
    for name, expected in reference.named_parameters():
        if ".default." in name:
            mixed = weights[name.replace(".default.", ".ref.")]
            assert torch.equal(mixed, expected)
            assert not torch.equal(mixed, weights[name])


def rewrite(start, file, **changes):
    path = start / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def config(**changes):
    return lambda start: rewrite(start, "model/adapter_config.json", **changes)


def tensors(change):
    """Change the adapter's tensors."""

    def damage(start):
        file = start / "model" / WEIGHTS
        save_file({name: change(name, each) for name, each in load_file(file).items()}, file)

    return damage


def cut_short(start):
    file = start / "model" / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def pickled(start):
    (start / "model" / WEIGHTS).rename(start / "model/adapter_model.bin")


def base_gone(start):
    rewrite(start, "model/adapter_config.json", base_model_name_or_path="/gone")
    (start / "resolved.json").unlink()


def of_several(start):
    """Leave a folder of two runs, of which the second has not ended."""
    (start / "1").mkdir()
    for each in ("resolved.json", "model"):
        shutil.move(start / each, start / "1" / each)
    (start / "2").mkdir()
    shutil.copy(start / "1/resolved.json", start / "2")


def not_ended(start):
    shutil.rmtree(start / "model")


def nothing(start):
    pass


@pytest.mark.parametrize(
    ("damage", "adapter", "lora", "path", "seen", "fix"),
    [
        (cut_short, "{}", "", "", "is cut short", "download it again"),
        (pickled, "{}", "", "", "holds adapter_model.bin, a pickle", "write it as safetensors"),
        (config(task_type="SEQ_CLS"), "{}", "", "", "another kind: LORA for SEQ_CLS", "CAUSAL_LM"),
        (
            config(bias="lora_only"),
            "{}",
            "",
            ".bias",
            "so that no reference is left",
            "`training.beta: 0`",
        ),
        (
            lambda start: rewrite(start, "manifest.json", model="0" * 32),
            "{}",
            "",
            "",
            "`model.path` is another model",
            "leave out `model.path`",
        ),
        (base_gone, "{}/model", "", "", "was trained on /gone, which is not on", "as `model.path`"),
        (nothing, "{}", "{{r: 8}}", ".r", "is 8, and the adapter has 4", "write `r: 4`"),
        (
            config(target_modules=["q_proj"]),
            "{}/model/../model",
            "{{target_modules: [v_proj]}}",
            ".target_modules",
            'is ["v_proj"], and the adapter has "all-linear"',
            "leave out `lora`",
        ),
        (not_ended, "{}", "", "", "has no final adapter", "checkpoints/checkpoint-2`"),
        (of_several, "{}", "", "", "holds runs, and is none itself", "/start/1`"),
        (nothing, "{model}", "", "", "holds a whole model", "instead of `adapter`"),
        (nothing, "3", "", "", "names no adapter (got 3)", "runs/NAME/TIME"),
        (nothing, '""', "", "", 'names no adapter (got "")', "runs/NAME/TIME"),
        (nothing, "a/b", "", "", "there is no adapter at a/b", "hf download a/b"),
        (nothing, "{{path: a/b, revision: v1}}", "", "", "a/b at v1", "a/b --revision v1"),
        (nothing, "{{path: {}, revision: v1}}", "", "", "has no revisions", "remove `revision`"),
        (nothing, "./nowhere", "", "", "there is no adapter at", "name a finished run"),
    ],
)
def test_an_adapter_that_cannot_be_trained_on(
    workshop, start, damage, adapter, lora, path, seen, fix
):
    damage(start)
    written = adapter.replace("{}", str(start))
    text = with_held_out_rows(RECIPE).replace("  path: {model}", f"  adapter: {written}")
    text = text.replace("max_steps: 2", "max_steps: 2\n  beta: 0.1")
    more = f"\n  lora: {lora}" if lora else ""
    recipe = workshop.write(text.replace("dtype: float32", f"dtype: float32{more}"))
    try:
        problems = check_recipe(recipe, hardware=Hardware(gpus=0, cpus=2)).errors
    except RecipeError as error:
        problems = error.problems
    (problem,) = problems
    expected = "model.adapter" if not path else f"model.lora{path}"
    assert problem.path == expected
    assert problem.location.line == (6 if lora else 4)
    assert seen in problem.seen
    assert fix in problem.fix


def test_values_that_are_not_finite(workshop, start):
    tensors(lambda name, each: each * math.nan)(start)
    recipe = workshop.write(text_of(start))
    probed = workshop.grpo("probe", "--quick", recipe)
    done = workshop.grpo("train", recipe)
    for each in (probed, done):
        assert each.returncode != 0
        assert "has NaN or infinite values in base_model.model." in each.stderr + each.stdout


def test_trained_weights_are_never_left_out_in_silence(workshop, start):
    file = start / "model/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["q_proj"]}))
    done = workshop.grpo("train", workshop.write(text_of(start)), "--no-probe")
    assert done.returncode == 1
    assert "belong to no module that adapter_config.json names" in done.stderr
