"""Kernels and host reads of a sampled token, on a CUDA device that is not there."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from grpo_cli.fast import graph_decoding
from grpo_cli.fast.decoding import decode, read_decoding, without_wrapper
from tests.fake_cuda.device import FakeCuda

_LOOPS = {"decode": decode, "graphs": graph_decoding.decode_with_graphs}
_PROMPTS = [[5, 6, 7, 8, 9, 10]] * 2 + [[11, 12, 13, 14, 15, 16]] * 2
_TOKENS = 4


def count() -> dict[str, Any]:
    """Return kernels of a layer and of the rest, and host reads, per token: of both loops, plain and with LoRA."""
    # Otherwise `torch.tensor` puts numbers on a device without telling anyone.
    torch._C._set_only_lift_cpu_tensors(True)
    # A graph replays these very operators.
    graph_decoding.capture = lambda step, device: step
    graph_decoding._CHECK_EVERY = _TOKENS
    return {
        f"{name}{' with LoRA' if lora else ''}": _count(loop, lora)
        for name, loop in _LOOPS.items()
        for lora in (False, True)
    }


def _count(loop: Any, lora: bool) -> dict[str, float]:
    (one, reads), (two, _) = (_count_token(loop, layers, lora) for layers in (1, 2))
    layer = two - one
    return {"layer": layer, "rest": one - layer, "reads": reads}


def _count_token(loop: Any, layers: int, lora: bool) -> tuple[float, float]:
    """Return kernels and host reads of a token, without those of a batch."""
    with FakeCuda() as cuda:
        model = cuda.put_model(_make_model(layers, lora))
        counts = []
        for tokens in (1, 1 + _TOKENS):
            cuda.reset()
            settings = GenerationConfig(
                max_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=[99]
            )
            decoding = read_decoding(settings, GenerationConfig())
            assert decoding is not None
            loop(without_wrapper(model), _PROMPTS, decoding)
            counts.append((cuda.kernels.total(), cuda.reads.total()))
        (kernels, reads), (more_kernels, more_reads) = counts
        return (more_kernels - kernels) / _TOKENS, (more_reads - reads) / _TOKENS


def _make_model(layers: int, lora: bool) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=28,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=256,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    if not lora:
        return model
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters).eval()
