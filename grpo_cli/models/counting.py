"""The sizes of a model and of one training step, counted on a model without weights.

Owns the counting: a model of the right architecture on torch's `meta` device takes a forward pass
in which nothing is computed, and the tensors kept for the backward pass are added up. It loads no
weights and allocates nothing.
"""

import contextlib
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from grpo_cli.models.adapters import without_wrapper
from grpo_cli.models.loading import add_adapters, load_config, pick_dtype
from grpo_cli.models.shape import ModelShape
from grpo_cli.recipe.model import ModelConfig

_FUSED = "grpo_fused_attention"


def read_shape(
    model: ModelConfig,
    *,
    batch: int,
    length: int,
    activations: str | None = None,
    cuda: bool = False,
) -> ModelShape:
    """Counts the sizes of a model, with its adapters, and of one micro-step.

    Args:
        model: The recipe's section.
        batch: Sequences in a micro-step.
        length: Tokens of a sequence, prompt and completion.
        activations: Precision of activations where it is not that of the weights (autocast).
        cuda: Whether the model will run on CUDA.

    Raises:
        RecipeError: `model.path` names nothing.
        SetupError: The configuration of the model cannot be had.
    """
    config = load_config(model)
    dtype = _dtype(model, config, cuda=cuda)
    empty = _build_empty(model, config, dtype)
    computed = getattr(torch, activations) if activations else dtype
    counted = empty if computed == dtype else _build_empty(model, config, computed)
    tokens = batch * length
    try:
        saved = _count_saved(counted, batch, length)
        counted.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        if model.lora is not None:
            counted.enable_input_require_grads()
        checkpointed = _count_saved(counted, batch, length)
    except Exception:
        # Some architectures look into masks, or hold kernels that know no shapes without values.
        return _describe(model, empty, dtype, None, None)
    return _describe(model, empty, dtype, saved / tokens, checkpointed / tokens)


def _dtype(model: ModelConfig, config: Any, *, cuda: bool) -> torch.dtype:
    picked = pick_dtype(model, cuda=cuda)
    named = config.dtype or torch.float32 if picked == "auto" else picked
    return getattr(torch, named) if isinstance(named, str) else named


def _build_empty(model: ModelConfig, config: Any, dtype: torch.dtype) -> Any:
    """The model on the `meta` device, where tensors have shapes and no values."""
    AttentionInterface.register(_FUSED, _attend)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=model.trust_remote_code
        )
        if hasattr(empty, "set_experts_implementation"):
            # Grouped products of experts want bf16; one after the other they keep the same tensors.
            with contextlib.suppress(ValueError, KeyError):
                empty.set_experts_implementation("eager")
        empty.set_attn_implementation("eager" if model.attn_implementation == "eager" else _FUSED)
        if model.lora is not None:
            empty = add_adapters(empty, model.lora)
    return empty.train()


class _Fused(torch.autograd.Function):
    """Keeps what every fused attention keeps: queries, keys, values, the output, a sum a row."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1]).float())
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError


def _attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[Any, None]:
    """Attention as transformers calls it: heads of [batch, heads, tokens, head size] in, and
    [batch, tokens, heads, head size] out."""
    return _Fused.apply(query, key, value).transpose(1, 2), None


def _count_saved(model: Any, batch: int, length: int) -> int:
    """Bytes of the tensors kept by one forward pass of the backbone, each storage once."""
    known = {weight.untyped_storage()._cdata for weight in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            # The storage is held, or another could take its address.
            kept[storage._cdata] = storage
        return tensor

    base = without_wrapper(model)
    with torch.device("meta"):
        tokens = torch.zeros(batch, length, dtype=torch.long)
        # A mask of four dimensions is taken as it is; a smaller one would be looked into.
        mask = torch.ones(batch, 1, length, length, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        base.base_model(input_ids=tokens, attention_mask=mask, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def _describe(
    section: ModelConfig,
    model: Any,
    dtype: torch.dtype,
    saved: float | None,
    checkpointed: float | None,
) -> ModelShape:
    weights = list(model.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelShape(
        parameters=sum(weight.numel() for weight in weights),
        trainable=sum(weight.numel() for weight in trained),
        weight_bytes=sum(weight.nbytes for weight in weights)
        - _saved_by_quantizing(section, model),
        trainable_bytes=sum(weight.nbytes for weight in trained),
        value_bytes=dtype.itemsize,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        cache_bytes_per_token=2 * text.num_hidden_layers * heads * head_size * dtype.itemsize,
        context=getattr(text, "max_position_embeddings", None),
        head_trained=any(weight is model.get_output_embeddings().weight for weight in trained),
        saved_bytes_per_token=saved,
        checkpoint_bytes_per_token=checkpointed,
    )


def _saved_by_quantizing(section: ModelConfig, model: Any) -> int:
    """Bytes that bitsandbytes takes off the weights of linear layers, the output head excepted.

    Source: Dettmers et al. 2023 (arXiv:2305.14314), section 3: 4 bits and 0.127 for the constants.
    """
    if section.quantization is None:
        return 0
    each = 1.0 if section.quantization == "8bit" else (4 + 0.127) / 8
    head = model.get_output_embeddings()
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head and ".lora_" not in name
    ]
    return int(sum(layer.weight.nbytes - each * layer.weight.numel() for layer in layers))
