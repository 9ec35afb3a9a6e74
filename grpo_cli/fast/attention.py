"""Reads rows without padding: attention of segments with shared paths, and the log-probabilities that come of it.

Also attention of one new token, for sampling. A layout goes through the trained model's own forward, so that its
wrappers (DDP, FSDP, ZeRO, PEFT) take part, and through TRL's fused head, which never holds the logits of more than
a tile of tokens; on a CPU through the model's own head if all logits fit.


Source: `AttentionInterface`, public in transformers since 4.50; `add_fused_lm_head` of trl 1.16.0, whose forward
takes `fused_lm_head` and `shift_labels`.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.flash_attention import flash_attention_forward

from grpo_cli.fast.layout import (
    Block,
    Layout,
    Padded,
    Rectangles,
    Segments,
    group_rows,
    lay_out,
    read_padded,
    upload,
)
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
    # Before torch 2.12 it takes grouped heads by default.
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


class PackedModel:
    """A causal language model that reads layouts; it works as before for all other inputs."""

    def __init__(self, model: Any, plain_temperature: float | None = None) -> None:
        """Prepare a model.

        Args:
            model: A `PreTrainedModel` with TRL's fused head.
            plain_temperature: Divisor of logits that the model's own head computes; None allows only TRL's head.
        """
        self._plain_temperature = plain_temperature
        self._vocabulary = model.config.get_text_config().vocab_size
        self._model = model
        model.base_model.register_forward_hook(_select, with_kwargs=True)

    def read(
        self,
        wrapped: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        padded: Padded | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return log-probabilities and entropies of completions.

        Args:
            wrapped: The model as it is trained: with adapters, sharded.
            input_ids: `[rows, width of prompts and completions] int64`, padded on both sides.
            attention_mask: As wide; 1 at tokens.
            width: Columns of completions.
            padded: The batch on the host, where that is known; otherwise it is read from the device.

        Returns:
            `[rows, width] float32` each, 0 in padding; no entropies if the head computes none. None if the batch
            cannot be laid out.

        Raises:
            NotImplementedError: The model's attention takes no layouts.
        """
        padded = padded or read_padded(input_ids, attention_mask)
        layout = lay_out(padded, width, input_ids.device)
        if layout is None:
            return None
        # Each time, as `grouped_heads` and others replace attention functions too.
        accept_layouts(self._model)
        log_probs, entropy = self._score(wrapped, layout)

        def put_back(values: torch.Tensor) -> torch.Tensor:
            flat = values.new_zeros(len(input_ids) * width)
            return flat.index_put((layout.origins,), values).view(len(input_ids), width)

        return put_back(log_probs), None if entropy is None else put_back(entropy)

    def _score(self, wrapped: Any, layout: Layout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities and entropies `[N] float32` of the predicted tokens."""
        inputs = {
            "input_ids": layout.tokens,
            "attention_mask": layout.tokens.new_ones(NO_MASK, dtype=torch.bool),
            "position_ids": layout.positions,
            "layout": layout,
            "use_cache": False,
        }
        temperature = self._plain_temperature
        if temperature is None or not holds_logits(layout.targets.numel(), self._vocabulary):
            scored = wrapped(**inputs, shift_labels=layout.targets, fused_lm_head=True)
            return scored.log_probs[0], None if scored.entropy is None else scored.entropy[0]
        logits = wrapped(**inputs).logits[0].float() / temperature
        log_probs = torch.log_softmax(logits, -1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, layout.targets[0, :, None])[:, 0], entropy


def _select(module: Any, args: Any, named: dict[str, Any], output: Any) -> Any:
    """Keep, of the output of the model's body, the places that predict a completion's token."""
    layout = named.get("layout")
    if layout is not None:
        output.last_hidden_state = output.last_hidden_state.index_select(1, layout.scored)
    return output


def chunk_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int, size: int | None
) -> list[torch.Tensor]:
    """Return row numbers in chunks of a size, rows of equal prompts adjacent.

    The number of chunks depends on the number of rows alone, since processes that share a model read together.
    """
    if size is None or size >= len(input_ids):
        return [torch.arange(len(input_ids), device=input_ids.device)]
    edge = input_ids.shape[1] - width
    prompts = torch.stack([each[:, :edge].long() for each in (input_ids, attention_mask)]).cpu()
    groups = group_rows(prompts[0].numpy(), prompts[1].sum(1).tolist())
    (order,) = upload([[row for rows in groups for row in rows]], input_ids.device)
    return list(order.split(size))


def read_plainly(
    compute: Callable[..., Any],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    width: int,
    padded: Padded | None = None,
    *,
    trim: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities and entropies `[rows, width]` by TRL's own pass, `compute`.

    It reads rows with a completion and, to `trim`, columns with a token of one of them. `padded` is as for
    `PackedModel.read`.
    """
    edge, shape = input_ids.shape[1] - width, (len(input_ids), width)
    tokens = torch.from_numpy(padded[1]).bool() if padded else attention_mask.cpu().bool()
    # Processes that share the model read together, so none reads nothing.
    rows = tokens[:, edge:].any(1).nonzero().flatten().tolist() or [0]
    (answered,) = upload([rows], input_ids.device)
    ids, mask = input_ids[answered], attention_mask[answered]
    present = tokens[rows].any(0).nonzero().flatten()
    first = min(int(present[0]), edge - 1) if trim else 0
    end = max(int(present[-1]) + 1, edge + 1) if trim else edge + width
    log_probs, entropies, _ = compute(ids[:, first:end], mask[:, first:end], end - edge)

    def put_back(values: torch.Tensor) -> torch.Tensor:
        wide = pad(values, (0, edge + width - end))
        return wide.new_zeros(shape).index_copy(0, answered, wide)

    return put_back(log_probs), None if entropies is None else put_back(entropies)


TILE_TOKENS, TILE_WORDS = 4096, 32768
"""Rows and columns of the tiles of TRL's head (trl 1.16, `TOKEN_CHUNK_SIZE`, `_CHUNKED_LOGPROB_CHUNK_SIZE`)."""
TILE_BYTES = 52
"""Bytes for each value of a tile without Triton. Seven float32 tensors and a mask live at once (trl 1.16,
`_backward_tile`); measured are 13 float32 tensors, since blocks of other sizes leave holes in the heap that glibc
cannot give back."""
LOGIT_BYTES = 20
"""Bytes for each logit if all are kept: float32 logits, their softmax, its gradient and that of the logits, and
one more while the entropy is summed."""
_SMALL = 2**28
"""Bytes that whole logits may always take."""


def holds_logits(tokens: int, vocabulary: int) -> bool:
    """Return whether a CPU computes the logits of that many tokens at once.

    That is twice as fast as in tiles, which compute each product again for the backward pass; but it is done only
    if it takes no more memory than they do, or little.
    """
    tile = min(tokens, TILE_TOKENS) * min(vocabulary, TILE_WORDS) * TILE_BYTES
    return tokens * vocabulary * LOGIT_BYTES <= max(tile, _SMALL)
