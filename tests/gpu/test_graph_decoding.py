"""Sampling by replayed CUDA graphs on a GPU: the tokens of `decode`, and torch's random numbers."""

import pytest
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from grpo_cli.fast import graph_decoding
from grpo_cli.fast.decoding import decode, read_decoding
from grpo_cli.fast.graph_decoding import decode_with_graphs, graph_unsupported_reason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [5, 6, 7], [14]]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(graph_decoding, "_ROOM", 16)
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        initializer_range=0.5,
    )
    model = Qwen2ForCausalLM(config).cuda().eval()
    assert graph_unsupported_reason(model) is None
    return model


def read(**changes):
    config = {"max_new_tokens": 100, "pad_token_id": 0, "eos_token_id": [1], "top_k": 0, **changes}
    return read_decoding(GenerationConfig(**config), GenerationConfig())


def test_the_likeliest_tokens_are_those_of_decode(model):
    decoding = read(do_sample=False)
    expected = decode(model, PROMPTS, decoding).completion_ids
    assert decode_with_graphs(model, PROMPTS, decoding).completion_ids == expected


def test_a_replay_draws_on_torchs_generator(model):
    decoding = read(do_sample=True, top_p=0.9, repetition_penalty=1.1)
    state = torch.cuda.get_rng_state()
    first = decode_with_graphs(model, PROMPTS * 8, decoding)
    second = decode_with_graphs(model, PROMPTS * 8, decoding)
    assert first != second
    torch.cuda.set_rng_state(state)
    assert decode_with_graphs(model, PROMPTS * 8, decoding) == first
    assert decode_with_graphs(model, PROMPTS * 8, decoding) == second
