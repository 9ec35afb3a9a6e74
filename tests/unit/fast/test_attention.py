"""Attention within a layout: what separate rows compute, whichever kernel computes it."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    Qwen2Config,
    Qwen2ForCausalLM,
    modeling_flash_attention_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2 import modeling_qwen2
from trl.trainer import add_fused_lm_head

from grpo_cli.fast import attention
from grpo_cli.fast.attention import PackedModel
from grpo_cli.fast.layout import Gather
from tests.fake_cuda import kernels

BATCHES = {
    "several prompts": [(7, [5, 3, 1]), (4, [6, 2]), (7, [4, 1, 1, 9])],
    "one prompt": [(6, [3, 8, 8, 2])],
    "single tokens": [(3, [1, 1]), (1, [1])],
    "one row": [(2, [3])],
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def make_rows(groups):
    """Ids and mask, padded on both sides, and the columns of completions."""
    draw = torch.Generator().manual_seed(0)
    edge, width = max(prompt for prompt, _ in groups), max(max(each) for _, each in groups)
    ids, mask = [], []
    for prompt, lengths in groups:
        first = torch.randint(1, 64, (edge,), generator=draw)
        for length in lengths:
            ids.append(torch.cat([first, torch.randint(1, 64, (width,), generator=draw)]))
            columns = torch.arange(edge + width)
            mask.append((columns >= edge - prompt) & (columns < edge + length))
    return torch.stack(ids), torch.stack(mask).long(), width


def make_model(implementation="sdpa"):
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    # Set by name, as the kernels of some are not installed.
    model.config._attn_implementation = implementation
    return model


def score(model, ids, mask, width):
    """Log-probabilities of each row by itself, without padding."""
    scores = torch.zeros(len(ids), width)
    for row, (tokens, present) in enumerate(zip(ids, mask.bool(), strict=True)):
        length = int(present[-width:].sum())
        logits = model(tokens[present][None]).logits[0, -length - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, tokens[present][-length:, None])[:, 0]
        scores = scores.index_put((torch.tensor(row), torch.arange(length)), chosen)
    return scores


def learn(model, scores):
    """A loss with a weight for each token; returns the gradients."""
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    loss = (scores * weights).mean()
    model.zero_grad()
    loss.backward()
    return loss, {name: weight.grad.clone() for name, weight in model.named_parameters()}


def flash_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
                 causal=False):  # fmt: skip
    """Takes its arguments as flash_attn's `flash_attn_varlen_func` does."""
    assert causal
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    return kernels.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale)


@pytest.fixture(params=["rectangles", "varlen", "flash_attention_2", "eager"])
def kernel(request, monkeypatch):
    """What computes attention; the name of the implementation that the model asks for."""
    if request.param == "varlen":
        monkeypatch.setattr(attention, "pick_kernel", lambda query, value: kernels.varlen)
    if request.param == "flash_attention_2":
        process = modeling_flash_attention_utils._lazy_define_process_function(flash_varlen)
        # Newer versions have a second function, for kernels with a cache.
        is_newer = hasattr(modeling_flash_attention_utils, "_process_with_kvcache_kwargs_fn")
        found = (None, flash_varlen, None, None, None), (process, process) if is_newer else process
        monkeypatch.setattr(
            modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *_, **__: found
        )
    return request.param if request.param in ("flash_attention_2", "eager") else "sdpa"


@pytest.mark.parametrize("groups", BATCHES.values(), ids=BATCHES)
def test_a_layout_scores_and_learns_as_separate_rows(kernel, groups):
    rows = make_rows(groups)
    plain = make_model()
    expected = score(plain, *rows)
    expected_loss, expected_grads = learn(plain, expected)
    model = make_model(kernel)
    packed = PackedModel(model, 1.0)
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        found, _ = packed.read(model, *rows)
        loss, grads = learn(model, found)
        assert torch.allclose(found, expected, atol=1e-6, rtol=1e-6)
        assert torch.allclose(loss, expected_loss, atol=1e-6)
        for name, grad in expected_grads.items():
            assert torch.allclose(grads[name], grad, atol=1e-6), name


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_without_a_layout_attention_is_what_it_was(implementation):
    ids, mask, width = make_rows(BATCHES["several prompts"])
    model = make_model(implementation)
    before = model(ids, attention_mask=mask).logits
    assert PackedModel(model, 1.0).read(model, ids, mask, width)
    assert torch.equal(model(ids, attention_mask=mask).logits, before)


def test_eager_attention_of_classes_in_other_files():
    rows = make_rows(BATCHES["several prompts"])
    expected = score(make_model(), *rows)
    model = make_model("eager")
    for layer in model.model.layers:
        # FSDP's, and a user's, are made so.
        layer.self_attn.__class__ = type("Own", (type(layer.self_attn),), {"__module__": __name__})
    assert torch.allclose(PackedModel(model, 1.0).read(model, *rows)[0], expected, atol=1e-6)
    # Other models with the attention of their own files, whatever its name.
    assert "eager" not in AttentionInterface()


def test_layouts_meet_attention_functions_that_others_replaced(monkeypatch):
    rows = make_rows(BATCHES["several prompts"])
    expected = score(make_model(), *rows)
    models = make_model(), make_model("eager")
    packed = [PackedModel(model, 1.0) for model in models]
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    with attention.grouped_heads():
        assert torch.allclose(packed[0].read(models[0], *rows)[0], expected, atol=1e-6)
    for each, model in zip(packed, models, strict=True):
        assert torch.allclose(each.read(model, *rows)[0], expected, atol=1e-6)
    monkeypatch.setattr(attention, "accept_layouts", lambda model: None)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    eager = modeling_qwen2.eager_attention_forward
    monkeypatch.setattr(modeling_qwen2, "eager_attention_forward", eager.usual)
    for each, model in zip(packed, models, strict=True):
        with pytest.raises(RuntimeError, match="size"):
            each.read(model, *rows)


def test_gradients_of_copies_are_added_up_in_float32():
    index = torch.tensor([1] * 300 + [3])
    values = torch.zeros(5, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    copies = Gather.of(index, 5)(values)
    assert copies.shape == (301, 2, 3)
    copies.backward(torch.full_like(copies, 1.0))
    # Added up in bfloat16, they would stay at 256.
    assert values.grad[:, 0, 0].tolist() == [0, 300, 0, 1, 0]
