"""Attention over packed completions that share their prompts, without a kernel of its own.

`AsyncGRPOTrainer` packs the completions of a micro-step into one row, in which what they share stands once,
and has a kernel for recent GPUs attend along each one's own path (trl 1.16.0, `packing.py`). Here is the
same with what torch brings along, where that kernel does not run: segment by segment, so slower, and equal.
"""

import importlib.util
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from trl.experimental.async_grpo.packing import TREE_ATTENTION

_HOPPER = (9, 0)
"""CUDA capability of the first GPUs that the kernel was written for."""


def is_needed() -> bool:
    """Whether TRL's kernel does not run here: it is FlashAttention 3's, fetched by `kernels`."""
    if not torch.cuda.is_available() or importlib.util.find_spec("kernels") is None:
        return True
    return torch.cuda.get_device_capability() < _HOPPER


def register() -> None:
    """Has models with TRL's tree attention compute it here, from now on."""
    AttentionInterface.register(TREE_ATTENTION, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each segment to itself and to what leads to it.

    Args:
        module: Not read.
        query: [1, heads, tokens, width]; the segments lie end to end.
        key: [1, key heads, tokens, width].
        value: As `key`.
        attention_mask: Not read: the segments say who sees whom.
        tree_kv_index: [sum of paths] int64; the tokens on each segment's path, its own last.
        tree_cu_seqlens_q: [segments + 1] int32; where segments begin among the tokens.
        tree_cu_seqlens_k: [segments + 1] int32; where paths begin in `tree_kv_index`.
        scaling: Of the products; 1/√width where it is None.
        sliding_window: How many tokens back one sees; None is all.

    Returns:
        [1, tokens, heads, width], and no weights.

    Source: trl 1.16.0, `packing.tree_attention`, whose kernel aligns a causal mask to the path's end.
    """
    pieces = []
    spans = zip(_spans(tree_cu_seqlens_q), _spans(tree_cu_seqlens_k), strict=True)
    for (first, last), (begin, end) in spans:
        path = tree_kv_index[begin:end]
        pieces.append(
            scaled_dot_product_attention(
                query[:, :, first:last],
                key.index_select(2, path),
                value.index_select(2, path),
                attn_mask=_sight(last - first, end - begin, sliding_window, query.device),
                scale=scaling,
                enable_gqa=key.shape[1] != query.shape[1],
            )
        )
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def _spans(edges: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise(edges.tolist()))


def _sight(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[queries, keys] bool: which tokens of its path each token of a segment sees."""
    own = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    others = torch.arange(keys, device=device).unsqueeze(0)
    seen = others <= own
    return seen if window is None else seen & (others > own - window)
