"""What vLLM gets of a model with adapters, merged or as they are; the model keeps its weights to the bit."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from grpo_cli.errors import RunError
from grpo_cli.training.asynchronous.trainer import AsyncRunTrainer
from grpo_cli.training.vllm_client import VLLMLink
from grpo_cli.training.vllm_generation import RunGeneration
from grpo_cli.training.vllm_weights import (
    SyncWatch,
    base_kept,
    merge_weights,
    read_adapter,
    write_adapter,
)


def adapted(folder, **options):
    """A model in bfloat16 with adapters that change it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    settings = {"target_modules": "all-linear", "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings))


def by_rollouts(model):
    """What `GRPOTrainer` sends."""
    sender = object.__new__(RunGeneration)
    sender.link = VLLMLink(Path(), SyncWatch(), print, print)
    sender.model = model
    sender._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda weights: nullcontext())
    return sender._iter_named_params()


def by_async(model):
    """What `AsyncGRPOTrainer` sends."""
    trainer = object.__new__(AsyncRunTrainer)
    sent = []
    trainer.watch = SyncWatch()
    trainer.model, trainer.rollout_worker, trainer.model_version = model, None, 0
    trainer.weight_transfer = SimpleNamespace(
        pause=lambda: None, resume=lambda: None, send_weights=sent.extend
    )
    trainer.accelerator = Accelerator(cpu=True)
    trainer.args = SimpleNamespace(vllm_server_base_url="http://server")
    trainer._sync_weight_merged(0.0)
    return sent


@pytest.mark.parametrize("send", [by_rollouts, by_async])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_the_base_is_the_same_after_fifty_hand_overs(chat_model, send, options):
    model = adapted(chat_model, **options)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        sent = dict(send(model))
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data += 1e-2 * torch.randn(weight.shape, generator=generator)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if "lora_" not in name)
    last = dict(send(model))
    whole = model.float().merge_and_unload().state_dict()
    assert last.keys() >= whole.keys() - {"lm_head.weight"}
    assert all(torch.equal(last[name], whole[name].bfloat16()) for name in last)
    assert any(not torch.equal(last[name], sent[name]) for name in last)


def test_a_weight_that_is_not_sent_is_an_error(chat_model):
    model = adapted(chat_model)
    some = [(name, weight) for name, weight in model.named_parameters() if "q_proj" not in name]
    with base_kept(model), pytest.raises(RunError, match="were not sent"):
        list(merge_weights(model, iter(some)))


@pytest.mark.parametrize("options", [{"lora_alpha": 8}, {"lora_alpha": 6, "use_rslora": True}])
def test_an_adapter_is_written_with_its_scale(chat_model, tmp_path, options):
    model = adapted(chat_model, **options).float()
    write_adapter(tmp_path / "adapter", read_adapter(model, lambda weights: nullcontext()))
    ids = torch.arange(1, 9)[None]
    expected = model(ids).logits
    base = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.bfloat16).float()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)
    with loaded.disable_adapter():
        assert not torch.allclose(loaded(ids).logits, expected, atol=1e-2)
