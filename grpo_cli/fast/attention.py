"""Attention backends, registered with transformers: of segments with shared paths, and of one new token.

Source: `AttentionInterface`, public in transformers since 4.50.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.flash_attention import flash_attention_forward

from grpo_cli.fast.layout import Block, Rectangles, Segments
from grpo_cli.upstream.transformers import EAGER, attention_name, eager_namespaces

_SDPA = "sdpa"
"""Torch's attention, which models use by default."""
_UNSUPPORTED = ("position_bias", "s_aux", "sliding_window", "softcap")
"""What some models request of attention, and attention within a layout does not do."""
NO_MASK = (1, 1, 1, 0)
"""Shape of the mask of a layout, which says what is visible itself: transformers passes on one of four dimensions,
and an attention function that takes no layout fails on it."""
_AMPERE = (8, 0)
"""CUDA capability of the first GPUs with flash attention."""

Kernel = Callable[..., torch.Tensor]
"""Takes arguments as `torch.nn.attention.varlen.varlen_attn` does, and `scale`; causal to the lower right."""


@dataclass(frozen=True)
class _LayoutAttention:
    """An attention function of transformers that takes a `layout`; without one it computes what it always has."""

    usual: Callable[..., Any]
    flash: bool

    # Some models pass the mask by its name.
    def __call__(
        self,
        module: torch.nn.Module,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        *,
        layout: Any = None,
        **requested: Any,
    ) -> Any:
        if layout is None:
            return self.usual(module, query, key, value, attention_mask, **requested)
        names = [name for name in _UNSUPPORTED if requested.get(name) is not None]
        names += ["dropout"] * bool(requested.get("dropout"))
        names += ["a mask"] * (attention_mask is not None and attention_mask.shape != NO_MASK)
        if names:
            raise NotImplementedError(f"its attention asks for {', '.join(names)}")
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        kernel = partial(_call_flash, self.usual, module) if self.flash else None
        scale = requested.get("scaling")
        output = attend_segments(query, key, value, layout.segments, scale=scale, kernel=kernel)
        return output[None], None


def accept_layouts(model: torch.nn.Module) -> None:
    """Let a model's attention function take a `layout`, unless it does so already.

    Models hand the keyword arguments of their forward on to it. The mask of a layout is `NO_MASK`.

    Raises:
        NotImplementedError: The function is one that takes no segments.
    """
    name = attention_name(model)
    if name == "eager":
        for names in eager_namespaces(model):
            if not isinstance(names[EAGER], _LayoutAttention):
                names[EAGER] = _LayoutAttention(names[EAGER], flash=False)
        return
    usual = AttentionInterface().get(name)
    if isinstance(usual, _LayoutAttention):
        return
    flash = usual is flash_attention_forward
    if not flash and name != _SDPA:
        raise NotImplementedError(f"its attention is {name}")
    AttentionInterface.register(name, _LayoutAttention(usual, flash))


def attend_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    *,
    scale: float | None = None,
    window: int | None = None,
    kernel: Kernel | None = None,
) -> torch.Tensor:
    """Return attention of each token to its segment's path up to itself.

    Args:
        query: `[T, heads, size]`.
        key: `[T, key heads, size]`.
        value: `[T, key heads, value size]`.
        scale: Factor of the scores; 1/√size if None.
        window: How many tokens back are visible; None is all.
        kernel: What computes it; by default what is fastest here.

    Returns:
        `[T, heads, value size]`.
    """
    dtype = query.dtype
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        # Rotary positions make float32 of queries and keys there.
        dtype = torch.get_autocast_dtype("cuda")
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    kernel = kernel or pick_kernel(query, value)
    if window is not None and window >= segments.max_seqlen_k:
        window = None
    if kernel is None:
        return _attend_rectangles(query, key, value, segments.rectangles, scale, window)
    return kernel(
        query,
        segments.keys(key),
        segments.keys(value),
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_seqlen_q,
        segments.max_seqlen_k,
        scale=scale,
        **({} if window is None else {"window_size": (window - 1, 0)}),
    )


def pick_kernel(query: torch.Tensor, value: torch.Tensor) -> Kernel | None:
    """Return the kernel for segments of any length that takes these; None if there is none."""
    size = query.shape[-1]
    fits = size == value.shape[-1] and size <= 256 and size % 8 == 0
    half = query.is_cuda and query.dtype.itemsize == 2
    return _find_varlen() if half and fits else None


@cache
def _find_varlen() -> Kernel | None:
    """Return torch's attention over segments if it runs here: torch 2.11, on NVIDIA's GPUs from Ampere on."""
    if torch.version.cuda is None or torch.cuda.get_device_capability() < _AMPERE:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known:
        return None
    # Before torch 2.12 it takes grouped heads without being told.
    told = {"enable_gqa": True} if "enable_gqa" in known else {}
    return partial(varlen_attn, window_size=(-1, 0), **told)


def _call_flash(
    usual: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
) -> torch.Tensor:
    """Compute by transformers' flash attention, with the kernel that the model was loaded with."""
    rows = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    output, _ = usual(
        module,
        *rows,
        None,
        is_causal=True,
        scaling=scale,
        cu_seq_lens_q=cu_seqlens_q,
        cu_seq_lens_k=cu_seqlens_k,
        max_length_q=max_seqlen_q,
        max_length_k=max_seqlen_k,
    )
    return output[0]


def _attend_rectangles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rectangles: Rectangles,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention as `attend_segments`, by torch's attention over blocks of segments."""
    dtype, heads = query.dtype, query.shape[1]
    if query.device.type == "cpu":
        # In 16 bits torch's kernel takes three times as long there, and rounds more.
        query, key, value = query.float(), key.float(), value.float()
    queries, keys, values = (
        gather(tensor)
        for gather, tensor in (
            (rectangles.queries, query),
            (rectangles.keys, key),
            (rectangles.keys, value),
        )
    )
    times = heads // key.shape[1]
    if query.is_cuda:
        # Of the kernels there, only flash takes grouped heads.
        keys, values = (each.repeat_interleave(times, dim=1) for each in (keys, values))
        times = 1
    blocks = rectangles.blocks
    cells = queries.split([block.segments * block.width for block in blocks])
    paths = [block.segments * (block.before + block.width) for block in blocks]
    outputs = []
    for block, *parts in zip(blocks, cells, keys.split(paths), values.split(paths), strict=True):
        q, k, v = (part.unflatten(0, (block.segments, -1)).transpose(1, 2) for part in parts)
        mask = block.mask if window is None else _window_mask(block, window, query.device)
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=times > 1
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return rectangles.outputs(torch.cat(outputs)).to(dtype)


def _window_mask(block: Block, window: int, device: torch.device) -> torch.Tensor:
    """Return `[width, before + width] bool`: the last tokens of its path that a token sees."""
    columns = torch.arange(block.before + block.width, device=device)
    own = columns[block.before :, None]
    return (columns <= own) & (columns > own - window)


@contextmanager
def grouped_heads() -> Iterator[None]:
    """Let models with torch's attention compute a new token's by `attend_one_token` inside.

    Most models have fewer key heads than heads. To attend with a mask, transformers copies the keys and values of
    all past tokens for each head, at every token and layer.
    """
    usual = AttentionInterface()[_SDPA]

    # Some models pass the mask by its name.
    def choose(
        module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any
    ) -> Any:
        if is_one_token(query, key, attention_mask, more):
            scaling = more.get("scaling")
            return attend_one_token(query, key, value, attention_mask, scaling), None
        return usual(module, query, key, value, attention_mask, **more)

    AttentionInterface.register(_SDPA, choose)
    try:
        yield
    finally:
        AttentionInterface.register(_SDPA, usual)


def is_one_token(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, more: dict[str, Any]
) -> bool:
    """Return whether `attend_one_token` computes this: grouped heads, one mask for all of them, nothing else."""
    if query.shape[2] != 1 or query.shape[1] == key.shape[1]:
        return False
    if mask is not None and mask.shape[1] != 1:
        return False
    return not more.get("dropout") and more.get("position_bias") is None


def attend_one_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one token: the heads of a key head become its queries, without copies.

    Args:
        query: `[sequences, heads, 1, width]`; the heads of a key head are adjacent.
        key: `[sequences, key heads, tokens, width]`.
        value: As `key`; its width may differ.
        mask: `[sequences or 1, 1, 1, tokens]`; None if all is visible.
        scaling: Factor of the scores; 1/√width if None.

    Returns:
        `[sequences, 1, heads, width]`, as transformers' attention functions.
    """
    sequences, heads, _, width = query.shape
    grouped = query.reshape(sequences, key.shape[1], -1, width)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(sequences, 1, heads, output.shape[-1])
