"""Adapters are merged into what vLLM gets, and the model keeps its weights to the bit."""

from contextlib import nullcontext
from types import SimpleNamespace

import peft
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from grpo_cli.errors import RunError
from grpo_cli.train.async_trainer import AsyncRunTrainer
from grpo_cli.train.merging import base_kept, merge_weights
from grpo_cli.train.vllm_generation import RunGeneration


def adapted(folder, **options):
    """A model in bfloat16 with adapters that change it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    settings = {"target_modules": "all-linear", "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings))


def by_rollouts(model):
    """What `GRPOTrainer` sends."""
    sender = object.__new__(RunGeneration)
    sender.model = model
    sender._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda weights: nullcontext())
    return sender._iter_named_params()


def by_async(model):
    """What `AsyncGRPOTrainer` sends."""
    trainer = object.__new__(AsyncRunTrainer)
    sent = []
    trainer.model, trainer.rollout_worker, trainer.model_version = model, None, 0
    trainer.weight_transfer = SimpleNamespace(
        pause=lambda: None, resume=lambda: None, send_weights=sent.extend
    )
    trainer.accelerator = Accelerator(cpu=True)
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
