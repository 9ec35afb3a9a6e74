"""Plain attention in place of CUDA's kernels: `[…, heads, tokens, size]`, causal to the lower right."""

from collections.abc import Callable, Iterator
from typing import Any

import torch


def _weights(query: Any, key: Any, value: Any, bias: Any, causal: bool, scale: Any) -> Any:
    """Return float32 queries, keys and values of all heads, weights, their sums, and the scale."""
    times = query.shape[-3] // key.shape[-3]
    query = query.float()
    key, value = (each.float().repeat_interleave(times, -3) for each in (key, value))
    scale = scale or query.shape[-1] ** -0.5
    scores = query @ key.mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    sums = scores.logsumexp(-1, keepdim=True)
    # Padding may see nothing.
    weights = (scores - sums).exp().nan_to_num()
    return query, key, value, weights, sums.squeeze(-1), scale


def _forward(query: Any, key: Any, value: Any, *how: Any) -> tuple[Any, Any]:
    _, _, values, weights, sums, _ = _weights(query, key, value, *how)
    return (weights @ values).to(query.dtype), sums


def _backward(grad: Any, query: Any, key: Any, value: Any, *how: Any) -> tuple[Any, Any, Any]:
    queries, keys, values, weights, _, scale = _weights(query, key, value, *how)
    grad = grad.float()
    of_weights = grad @ values.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale

    def group(of_heads: Any, like: Any) -> Any:
        return of_heads.unflatten(-3, (like.shape[-3], -1)).sum(-3).to(like.dtype)

    of_keys, of_values = group(of_scores.mT @ queries, key), group(weights.mT @ grad, value)
    return (of_scores @ keys).to(query.dtype), of_keys, of_values


def _flash(query: Any, key: Any, value: Any, dropout_p: Any = 0.0, is_causal: Any = False,
           debug: Any = False, *, scale: Any = None) -> Any:  # fmt: skip
    output, sums = _forward(query, key, value, None, is_causal, scale)
    none = torch.empty(0, dtype=torch.int32)
    return output, sums, none, none, query.shape[-2], key.shape[-2], none, none, none


def _flash_backward(grad: Any, query: Any, key: Any, value: Any, output: Any, sums: Any, cum_q: Any,
                    cum_k: Any, max_q: Any, max_k: Any, dropout_p: Any, is_causal: Any,
                    *_: Any, scale: Any = None) -> Any:  # fmt: skip
    return _backward(grad, query, key, value, None, is_causal, scale)


def _efficient(query: Any, key: Any, value: Any, bias: Any, sums_wanted: Any, dropout_p: Any = 0.0,
               is_causal: Any = False, *, scale: Any = None) -> Any:  # fmt: skip
    output, sums = _forward(query, key, value, bias, is_causal, scale)
    return output, sums, torch.empty(0), torch.empty(0)


def _efficient_backward(grad: Any, query: Any, key: Any, value: Any, bias: Any, output: Any, sums: Any,
                        seed: Any, offset: Any, dropout_p: Any, inputs: Any,
                        is_causal: Any = False, *, scale: Any = None) -> Any:  # fmt: skip
    return (*_backward(grad, query, key, value, bias, is_causal, scale), None)


def _spans(cum_q: Any, cum_k: Any) -> Iterator[tuple[slice, slice]]:
    ends = zip(cum_q.tolist(), cum_k.tolist(), strict=True)
    first, begin = next(ends)
    for last, end in ends:
        yield slice(first, last), slice(begin, end)
        first, begin = last, end


def varlen(query: Any, key: Any, value: Any, cum_q: Any, cum_k: Any, *_: Any,
           scale: Any = None) -> Any:  # fmt: skip
    """Attention `[tokens, heads, size]` of each segment to its path, differentiable; of `varlen_attn`."""
    pieces = [
        _forward(
            *(each.transpose(0, 1) for each in (query[q], key[k], value[k])), None, True, scale
        )
        for q, k in _spans(cum_q, cum_k)
    ]
    return torch.cat([output.transpose(0, 1) for output, _ in pieces])


def _varlen(query: Any, key: Any, value: Any, cum_q: Any, cum_k: Any, max_q: Any, max_k: Any,
            is_causal: Any = False, scale: Any = None, *_: Any) -> Any:  # fmt: skip
    output = varlen(query, key, value, cum_q, cum_k, scale=scale)
    sums = torch.zeros(query.shape[1], len(query))
    return output, sums, torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(grad: Any, query: Any, key: Any, value: Any, output: Any, sums: Any, cum_q: Any,
                     cum_k: Any, max_q: Any, max_k: Any, is_causal: Any, rng_state: Any,
                     scale: Any = None, window_size: Any = None) -> Any:  # fmt: skip
    grads = tuple(torch.zeros_like(each) for each in (query, key, value))
    for q, k in _spans(cum_q, cum_k):
        heads_first = (each.transpose(0, 1) for each in (grad[q], query[q], key[k], value[k]))
        parts = _backward(*heads_first, None, True, scale)
        for whole, span, part in zip(grads, (q, k, k), parts, strict=True):
            whole[span] = part.transpose(0, 1)
    return grads


def _mm(first: Any, second: Any, out_dtype: Any) -> Any:
    """Products that CUDA adds up and returns in float32; a CPU has none of 16 bits."""
    return first.to(out_dtype) @ second.to(out_dtype)


def _addmm_out(total: Any, first: Any, second: Any, out_dtype: Any, *, out: Any) -> Any:
    return out.copy_(total + _mm(first, second, out_dtype))


PLAIN: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention.default": _flash,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_efficient_attention.default": _efficient,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
    "torch_attn._varlen_attn.default": _varlen,
    "torch_attn._varlen_attn_backward.default": _varlen_backward,
    "aten.mm.dtype": _mm,
    "aten.addmm.dtype_out": _addmm_out,
}
