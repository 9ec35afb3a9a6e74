"""Checkpoints in shards, written by real FSDP2 and DeepSpeed ZeRO-3 in two processes, made whole again.

DeepSpeed's are skipped where it is not installed (`make setup` puts it into the environment's
`deepspeed`: beside the other packages it would be imported in every run).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_cli.errors import RunError, UsageError, install_extra
from grpo_cli.models.shards import merge_shards
from grpo_cli.models.source import is_sharded, refuse_sharded
from grpo_cli.recipe.model import LoraConfig, ModelConfig
from tests.integration.conftest import Workshop
from tests.tiny_models import make_tiny_model

DEEPSPEED = Path(sys.prefix) / "deepspeed"
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ROOT = Path(__file__).parents[2]
LORA = LoraConfig(r=4, target_modules="all-linear")


def shard(kind, whole, base, target):
    path = os.pathsep.join(map(str, (ROOT, DEEPSPEED)))
    executables = os.pathsep.join((str(DEEPSPEED / "bin"), os.environ["PATH"]))
    done = subprocess.run(
        [sys.executable, *LAUNCHER, "-m", "tests.sharding", kind, whole, base, target],
        env={**os.environ, "PYTHONPATH": path, "PATH": executables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def models(tmp_path_factory, chat_model):
    """The weights of a model that was trained whole, and those of an adapter on the chat model."""
    folder = tmp_path_factory.mktemp("trained")
    make_tiny_model(folder / "all", kind="llama", chat=True, seed=3)
    base = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        init_lora_weights=False,
    )
    peft.get_peft_model(base, settings).save_pretrained(folder / "adapter")
    return folder


@pytest.mark.slow
def test_sharded_base_weights_are_the_same_after_they_were_sent_to_vllm(
    models, chat_model, tmp_path
):
    found = torch.load(shard("send", models / "adapter", chat_model, tmp_path / "sent") / "sent.pt")
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, models / "adapter").bfloat16()
    before = dict(model.named_parameters())
    assert found["base"].keys() == before.keys()
    assert all(torch.equal(found["base"][name], before[name]) for name in before)
    adapter = {
        name: weight * 2 if ".lora_B." in name else weight
        for name, weight in peft.get_peft_model_state_dict(model).items()
    }
    assert found["adapter"].keys() == adapter.keys()
    assert all(torch.equal(found["adapter"][name], adapter[name]) for name in adapter)
    whole = model.float().merge_and_unload().state_dict()
    sent = found["sent"]
    assert sent.keys() >= whole.keys() - {"lm_head.weight"}
    # Rounded once.
    assert all(torch.equal(sent[name], whole[name].bfloat16()) for name in sent)


@pytest.fixture(scope="module")
def fsdp(models, chat_model):
    return {
        name: shard("fsdp", models / name, chat_model, models / f"fsdp-{name}" / "checkpoint-2")
        for name in ("all", "adapter")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "lora"),
    [("all", "model.safetensors", None), ("adapter", "adapter_model.safetensors", LORA)],
)
def test_fsdp_shards_become_what_one_process_saves(
    models, fsdp, chat_model, tmp_path, name, file, lora
):
    assert is_sharded(fsdp[name])
    assert not is_sharded(models / name)
    config = ModelConfig(path=str(chat_model), dtype="float32", lora=lora)
    merge_shards(fsdp[name], config, tmp_path)
    found, saved = load_file(tmp_path / file), load_file(models / name / file)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[key], saved[key]) for key in saved)
    if lora is not None:
        base = AutoModelForCausalLM.from_pretrained(chat_model)
        peft.PeftModel.from_pretrained(base, tmp_path)


@pytest.mark.slow
def test_shards_that_are_torn_or_of_another_model_are_told(models, fsdp, chat_model, tmp_path):
    config = ModelConfig(path=str(chat_model), dtype="float32")
    torn = tmp_path / "checkpoint-2"
    shutil.copytree(fsdp["all"], torn)
    (torn / "pytorch_model_fsdp_0" / "__1_0.distcp").unlink()
    with pytest.raises(RunError, match=r"cannot be read: .*__1_0\.distcp"):
        merge_shards(torn, config, tmp_path)
    (torn / "pytorch_model_fsdp_0" / ".metadata").unlink()
    with pytest.raises(RunError, match="which is written last, is missing"):
        merge_shards(torn, config, tmp_path)
    with pytest.raises(RunError, match="49 tensors are missing or unknown"):
        merge_shards(fsdp["adapter"], config, tmp_path)
    adapted = config.model_copy(update={"lora": LORA.model_copy(update={"r": 8})})
    with pytest.raises(RunError, match="size mismatch"):
        merge_shards(fsdp["adapter"], adapted, tmp_path)
    with pytest.raises(UsageError, match=r"export .* --checkpoint 2 --to DIR"):
        refuse_sharded(torn)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, lora_run, chat_model):
    """Two steps of LoRA."""
    return Workshop.copy(lora_run, tmp_path_factory.mktemp("adapted"), chat_model)


def sharded_run(workshop, kind, target):
    """A copy of a run whose checkpoint lies in shards."""
    shutil.copytree(workshop.run, target)
    checkpoint = target / "checkpoints" / "checkpoint-2"
    shard(kind, checkpoint, workshop.model, checkpoint)
    for path in checkpoint.glob("adapter_*"):
        path.unlink()
    return target


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("fsdp", marks=pytest.mark.slow),
        pytest.param(
            "zero3",
            marks=[
                pytest.mark.slow,
                pytest.mark.nightly,
                pytest.mark.skipif(not DEEPSPEED.is_dir(), reason="DeepSpeed is not installed"),
            ],
        ),
    ],
)
def test_a_checkpoint_in_shards_is_exported(adapted, tmp_path, kind):
    run = sharded_run(adapted, kind, tmp_path / "run")
    flags = ["--checkpoint", "2", "--format", "adapter", "--json"]
    if kind == "zero3":
        done = adapted.grpo("export", run, "--to", tmp_path / "out", *flags)
        assert done.returncode == 3
        assert install_extra("deepspeed") in done.stderr
    done = adapted.grpo("export", run, "--to", tmp_path / "out", *flags, PYTHONPATH=str(DEEPSPEED))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verification"]["difference"]["largest"] == 0
    name = "adapter_model.safetensors"
    found = load_file(tmp_path / "out" / name)
    saved = load_file(adapted.run / "checkpoints" / "checkpoint-2" / name)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[key], saved[key]) for key in saved)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_checkpoint_in_shards_is_not_measured_as_it_is(adapted, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(adapted.run, run)
    checkpoint = run / "checkpoints" / "checkpoint-2"
    (checkpoint / "adapter_model.safetensors").unlink()
    (checkpoint / "pytorch_model_fsdp_0").mkdir()
    for command in (["eval"], ["serve", "--dry-run"]):
        done = adapted.grpo(*command, run, "--checkpoint", "2")
        assert done.returncode == 2
        assert "holds its weights in shards" in done.stderr
