"""Counts the sizes of a model and of one training step, by a forward pass on the `meta` device without weights."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from transformers import AttentionInterface

from grpo_cli.fast.decoding import without_wrapper
from grpo_cli.models.loading import (
    add_adapters,
    load_config,
    pick_class,
    pick_dtype,
    refused_config,
)
from grpo_cli.recipe.model import ModelConfig

_FUSED = "grpo_fused_attention"


@dataclass(frozen=True)
class ImageCost:
    """Bytes that the images of one prompt take."""

    pixels: int
    """What the processor makes of them."""
    saved: int
    """Kept of the vision part for the backward pass, without gradient checkpointing."""
    checkpointed: int
    """The same with gradient checkpointing, without the one layer that is recomputed."""
    layer: int
    """What one layer of the vision part computes."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, with its adapters, and of what one token of a training step leaves behind."""

    parameters: int
    trainable: int
    weight_bytes: int
    """All weights, adapters included."""
    trainable_bytes: int
    value_bytes: int
    """Bytes of one value of the model's precision."""
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    cache_bytes_per_token: int
    """Keys and values of all layers for one token."""
    context: int | None
    """Positions the model was made for; None if it names none."""
    head_trained: bool
    """Whether the output head, which may be the embedding too, is among the trained weights."""
    saved_bytes_per_token: float | None
    """Kept of one token for the backward pass, without gradient checkpointing; None if this architecture cannot be
    counted."""
    checkpoint_bytes_per_token: float | None
    """The same with gradient checkpointing, without the one layer that is recomputed."""
    adapted_bytes: int = 0
    """Weights of the layers that have adapters, without these."""
    images: ImageCost | None = None
    """Of a prompt with images; None if there are none, or this architecture cannot be counted."""


def read_shape(
    model: ModelConfig,
    *,
    batch: int,
    length: int,
    activations: str | None = None,
    cuda: bool = False,
    images: Mapping[str, torch.Tensor] | None = None,
) -> ModelShape:
    """Count the sizes of a model with its adapters, and of one micro-step of `batch` × `length` tokens.

    `activations` is their precision if it is not that of the weights (autocast); `images` is what an image
    processor makes of those of one prompt.

    Raises `RecipeError` if `model.path` names nothing, or transformers cannot build a model from its
    config.json, and `SetupError` if the configuration of the model cannot be loaded.
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
        # Some architectures read values of masks, or have kernels without a meta implementation.
        return _describe(model, empty, dtype, None, None)
    shape = _describe(model, empty, dtype, saved / tokens, checkpointed / tokens)
    if images is None:
        return shape
    with contextlib.suppress(Exception):  # as above
        shape = replace(shape, images=_count_images(counted, images))
    return shape


def count_weight_bytes(model: ModelConfig, *, cuda: bool) -> int:
    """Return the bytes of a model's weights; `read_shape` tells of the arguments and errors."""
    config = load_config(model)
    empty = _build_empty(model, config, _dtype(model, config, cuda=cuda))
    return sum(weight.nbytes for weight in empty.parameters())


def _dtype(model: ModelConfig, config: Any, *, cuda: bool) -> torch.dtype:
    picked = pick_dtype(model, cuda=cuda)
    named = config.dtype or torch.float32 if picked == "auto" else picked
    return getattr(torch, named) if isinstance(named, str) else named


def _build_empty(model: ModelConfig, config: Any, dtype: torch.dtype) -> Any:
    """Return the model on the `meta` device, where tensors have shapes and no values."""
    AttentionInterface.register(_FUSED, _attend)
    with torch.device("meta"):
        try:
            empty = pick_class(config).from_config(
                config, dtype=dtype, trust_remote_code=model.trust_remote_code
            )
        except Exception as error:  # whatever transformers makes of a wrong config.json
            raise refused_config(model, error) from error
        if hasattr(empty, "set_experts_implementation"):
            # Grouped products of experts need bf16; one after the other they keep the same tensors.
            with contextlib.suppress(ValueError, KeyError):
                empty.set_experts_implementation("eager")
        empty.set_attn_implementation("eager" if model.attn_implementation == "eager" else _FUSED)
        if model.lora is not None:
            empty = add_adapters(empty, model.lora)
    return empty.train()


class _Fused(torch.autograd.Function):
    """Keeps what every fused attention keeps: queries, keys, values, the output, one sum a row."""

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
    """Attend as transformers asks: `[batch, heads, tokens, size]` in, `[batch, tokens, heads, size]` out."""
    return _Fused.apply(query, key, value).transpose(1, 2), None


def _count_saved(model: Any, batch: int, length: int) -> int:
    """Return the bytes of the tensors kept by one forward pass of the backbone."""
    with torch.device("meta"):
        tokens = torch.zeros(batch, length, dtype=torch.long)
        # transformers takes a mask of four dimensions as it is; it would read values of a smaller one.
        mask = torch.ones(batch, 1, length, length, dtype=torch.bool)
    backbone = without_wrapper(model).base_model
    return _count_kept(
        model, lambda: backbone(input_ids=tokens, attention_mask=mask, use_cache=False)
    )


def _count_images(model: Any, images: Mapping[str, torch.Tensor]) -> ImageCost:
    """Count what the images of a prompt take in a model on `meta`, and mark all weights as trained."""
    bare = without_wrapper(model)
    fields = {
        name: value.to("meta", bare.dtype) if value.is_floating_point() else value
        for name, value in images.items()
    }

    def count() -> int:
        return _count_kept(model, lambda: bare.get_image_features(**fields))

    checkpointed = count()
    model.gradient_checkpointing_disable()
    for hook in getattr(bare, "_require_grads_hooks", ()):
        hook.remove()
    saved = count()
    model.requires_grad_(True)
    vision = bare.config.vision_config
    layers = getattr(vision, "num_hidden_layers", None) or vision.depth
    pixels = sum(value.nbytes for value in images.values())
    return ImageCost(pixels, saved, checkpointed, count() // layers)


def _count_kept(model: Any, forward: Callable[[], Any]) -> int:
    """Return the bytes of the tensors that a forward pass keeps, each storage once."""
    known = {weight.untyped_storage()._cdata for weight in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            # Keep the storage, or another could take its address.
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
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
        adapted_bytes=sum(
            weight.nbytes
            for layer in model.modules()
            if isinstance(layer, LoraLayer)
            for weight in layer.get_base_layer().parameters()
        ),
    )


def _saved_by_quantizing(section: ModelConfig, model: Any) -> int:
    """Return the bytes that bitsandbytes saves on the weights of linear layers except the output head.

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
