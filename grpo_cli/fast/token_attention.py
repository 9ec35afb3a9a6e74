"""Attention of one new token, without copying the keys and values that several heads share.

Most models have fewer key heads than heads. To attend with a mask, transformers copies the keys and values of all
past tokens for each head, at every token and layer; here the heads of a key head stand as its queries, which
computes the same numbers from what is there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

_NAME = "sdpa"
"""The implementation that this stands in for: torch's attention, which models use unless told otherwise."""


@contextmanager
def grouped_heads() -> Iterator[None]:
    """Has models that attend with torch's attention do so by `attend` meanwhile."""
    usual = AttentionInterface()[_NAME]

    # Some models pass the mask by its name.
    def choose(
        module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any
    ) -> Any:
        if fits(query, key, attention_mask, more):
            return attend(query, key, value, attention_mask, more.get("scaling")), None
        return usual(module, query, key, value, attention_mask, **more)

    AttentionInterface.register(_NAME, choose)
    try:
        yield
    finally:
        AttentionInterface.register(_NAME, usual)


def fits(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, more: dict[str, Any]
) -> bool:
    """Whether this is one token's attention, the same mask for all of its heads, and nothing beside.

    Args:
        query: [sequences, heads, tokens, width].
        key: [sequences, key heads, past tokens and own, width].
        mask: [sequences or 1, heads or 1, tokens, past tokens and own], or None.
        more: What else the model says of its attention.
    """
    if query.shape[2] != 1 or query.shape[1] == key.shape[1]:
        return False
    if mask is not None and mask.shape[1] != 1:
        return False
    return not more.get("dropout") and more.get("position_bias") is None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """One token's attention to itself and all before it.

    Args:
        query: [sequences, heads, 1, width]; the heads of a key head stand side by side.
        key: [sequences, key heads, past tokens and own, width].
        value: As `key`; its width may be another.
        mask: [sequences or 1, 1, 1, past tokens and own]; None where all is seen.
        scaling: Of the products; 1/√width where it is None.

    Returns:
        [sequences, 1, heads, width], as transformers' attention functions.
    """
    sequences, heads, _, width = query.shape
    grouped = query.reshape(sequences, key.shape[1], -1, width)
    found = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return found.reshape(sequences, 1, heads, found.shape[-1])
