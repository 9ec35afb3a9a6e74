"""Attention within a layout: a completion's token sees its prompt and its own completion, nothing else.

Owns what attends to what, registered with transformers under a name of its own. It leaves all that works
token by token to the model, and how the row came to be to `layout.py`.

Source: `AttentionInterface` and `AttentionMaskInterface`, public in transformers since 4.50.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from grpo_cli.fast.layout import Layout

NAME = "grpo_shared_prompts"
"""The name under which a model finds it."""

_KNOWN = {"sliding_window", "softcap", "s_aux", "position_bias"}
"""What some models ask of attention, and this one does not do."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: Layout,
    dropout: float = 0.0,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one row of tokens.

    Args:
        module: The attention layer.
        query: `[1, heads, T, head size]`.
        key: `[1, key heads, T, head size]`.
        value: `[1, key heads, T, value size]`.
        attention_mask: None; the layout says what is seen.
        layout: Of the row.
        dropout: Share of attention weights dropped.
        scaling: Factor of the scores; one over the root of the head size where it is None.
        asked: What else the model asks for.

    Returns:
        `[1, T, heads, value size]`, and no weights.

    Raises:
        NotImplementedError: The model asks for what this attention does not do.
    """
    wanted = sorted(name for name in _KNOWN if asked.get(name) is not None)
    if attention_mask is not None or wanted:
        raise NotImplementedError(f"its attention asks for {', '.join(wanted) or 'a mask'}")
    given = query.dtype
    if query.device.type == "cpu":
        # In 16 bits torch's kernel takes three times as long there, and rounds more.
        query, key, value = query.float(), key.float(), value.float()
    query, key, value = (
        _Spread.apply(tensor[0].transpose(0, 1), layout) for tensor in (query, key, value)
    )
    options = {"dropout_p": dropout, "scale": scaling}
    asking, shared_keys, shared_values = (
        _cut(tensor, 0, layout.prompts) for tensor in (query, key, value)
    )
    found = [_weigh(asking, shared_keys, shared_values, None, options)]
    start = layout.prompts[0] * layout.prompts[1]
    for block in layout.blocks:
        queries, own_keys, own_values = (
            _cut(tensor, start, block.shape) for tensor in (query, key, value)
        )
        keys, values = (
            torch.cat([_Share.apply(shared, block.prompt_of), own], 2)
            for shared, own in ((shared_keys, own_keys), (shared_values, own_values))
        )
        found.append(_weigh(queries, keys, values, block.visible, options))
        start += block.shape[0] * block.shape[1]
    flat = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in found])
    return _Collect.apply(flat, layout)[None].to(given), None


def _weigh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention `[rows, heads, width, size]`, to what is visible; to what came before where that is None."""
    times = query.shape[1] // key.shape[1]
    if visible is not None and query.device.type != "cpu":
        # Of the kernels there that save memory, the one that takes a mask takes no grouped heads.
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
        times = 1
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        is_causal=visible is None,
        enable_gqa=times > 1,
        **options,
    )


def _cut(cells: torch.Tensor, start: int, shape: tuple[int, int]) -> torch.Tensor:
    """One rectangle `[rows, heads, width, size]` of the cells `[S, heads, size]`."""
    return cells.narrow(0, start, shape[0] * shape[1]).unflatten(0, shape).transpose(1, 2)


def _spread(row: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`[T, …]` of the row as `[S, …]` cells, 0 in padding."""
    return row.index_select(0, layout.places).index_fill_(0, layout.padding, 0)


# What indexing learns of its own gradient is a sum over repeated indices, slow on a CPU and not reproducible on
# a GPU. Here every token has one cell, so that each way is the other's gradient.


class _Spread(torch.autograd.Function):
    """From the row to the cells."""

    @staticmethod
    def forward(ctx: Any, row: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        return _spread(row, layout)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.layout.cells), None


class _Collect(torch.autograd.Function):
    """From the cells to the row."""

    @staticmethod
    def forward(ctx: Any, cells: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        return cells.index_select(0, layout.cells)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _spread(grad, ctx.layout), None


class _Share(torch.autograd.Function):
    """Gives every completion its prompt: `[U, …]` to `[R, …]`."""

    @staticmethod
    def forward(ctx: Any, prompts: torch.Tensor, prompt_of: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(prompt_of)
        ctx.prompts = len(prompts)
        return prompts.index_select(0, prompt_of)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (prompt_of,) = ctx.saved_tensors
        belongs = torch.arange(ctx.prompts, device=grad.device)[:, None] == prompt_of
        summed = belongs.to(grad.dtype) @ grad.flatten(1)
        return summed.unflatten(1, grad.shape[1:]), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda **_: None)
