"""The fast step on a GPU: TRL's weights there too, with the kernels that GPUs have."""

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOTrainer

from grpo_cli.fast.attention import attend_segments, pick_kernel
from grpo_cli.fast.layout import lay_out
from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.recipe.training import FastConfig
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


def test_segments_of_any_length_attend_as_blocks_do():
    """The kernel of 16 bits, forward and backward, against float32; its keys' gradient is the same each time."""
    lengths = torch.tensor([[30], [7], [1], [18], [30], [2], [25], [11]])
    ids = torch.arange(2).repeat_interleave(4)[:, None].repeat(1, 50)
    mask = torch.arange(50) < 20 + lengths
    layout = lay_out((ids.numpy(), mask.long().numpy()), 30, torch.device("cuda"))
    draw = torch.Generator("cuda").manual_seed(0)

    def make(heads):
        return torch.randn(layout.segments.tokens, heads, 64, device="cuda", generator=draw)

    sides, direction = [make(heads).bfloat16() for heads in (8, 2, 2)], make(8)
    assert pick_kernel(sides[0], sides[2]) is not None

    def compute(dtype):
        inputs = [side.to(dtype).requires_grad_() for side in sides]
        output = attend_segments(*inputs, layout.segments).float()
        (output * direction).sum().backward()
        return [output, *(each.grad.float() for each in inputs)]

    first, again, exact = compute(torch.bfloat16), compute(torch.bfloat16), compute(torch.float32)
    for ours, expected in zip(first, exact, strict=True):
        assert (ours - expected).abs().max() < 0.02 * expected.abs().max()
    assert all(torch.equal(first[place], again[place]) for place in (0, 2, 3))
