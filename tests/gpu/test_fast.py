"""The fast step on a GPU: TRL's weights there too, with the kernels that GPUs have."""

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOTrainer

from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.recipe.fast import FastConfig
from tests.integration.test_fast import train
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch):
    """This process trains on one, however many there are."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def make(tokenizer, dtype):
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
    )
    return Qwen2ForCausalLM(config).to(dtype)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("budget", [None, 64])
def test_the_weights_are_trls(tmp_path, budget, checkpointing):
    folder = make_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    settings = {"use_cpu": False, "tf32": False, "gradient_checkpointing": checkpointing}
    fast = FastConfig(max_tokens_per_micro_batch=budget)
    start = dict(make(tokenizer, torch.float32).named_parameters())
    plain, _, _ = train(
        GRPOTrainer, make(tokenizer, torch.float32), tokenizer, tmp_path, **settings
    )
    ours, _, left_off = train(
        FastTrainer, make(tokenizer, torch.float32), tokenizer, tmp_path, fast=fast, **settings
    )
    assert not left_off
    first, second = (dict(trainer.model.named_parameters()) for trainer in (plain, ours))
    apart = max((first[name] - second[name]).abs().max().item() for name in first)
    moved = max((first[name].cpu() - start[name]).abs().max().item() for name in first)
    assert apart < 1e-5 < moved
