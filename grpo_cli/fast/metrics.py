"""What TRL would have logged of a step, from what it logs of micro-batches that were made anew.

Owns the weights. A row that is left out is never clipped, so that shares of clipped tokens stay exact; its
entropy is the one it was sampled with, where that is known.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo_cli.fast.batches import MicroBatch, Rows, has_signal, loss_mask

ENTROPY = "row_entropy"
"""Key of a batch: the sum over a row's tokens of the entropy they were sampled with; NaN where unknown."""

_SHARES = (
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
)
_OF_ROWS = ("vespo/phi_seq_mean",)
_EXTREMES: dict[str, Any] = {"clip_ratio/low_min": min, "clip_ratio/high_max": max}


def merge(
    found: Sequence[tuple[MicroBatch, Mapping[str, Sequence[float]]]],
    window: Sequence[Rows],
    accelerator: Any,
    *,
    leave_out: bool,
    by_token: bool,
) -> dict[str, float]:
    """Metrics of one optimizer step.

    Args:
        found: The micro-batches of this process, and what TRL logged of each, equal on all processes.
        window: TRL's micro-batches of the step, before rows were left out.
        accelerator: Adds up over processes; all of them call.
        leave_out: Whether rows without signal were.
        by_token: Whether shares are of tokens; otherwise of rows.

    Returns:
        A value a metric; as TRL's, but over all tokens of the step where TRL takes the mean over its
        micro-batches.
    """
    local = [_count(batch) for batch, _ in found] + _count_window(window, leave_out)
    totals = accelerator.reduce(torch.tensor(local, device=accelerator.device), reduction="sum")
    *counts, whole, known = totals.tolist()
    kind = 0 if by_token else 1
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for _, logged in found for name in logged):
        values = [
            (_mean(logged[name]), count)
            for (_, logged), count in zip(found, counts, strict=True)
            if name in logged
        ]
        if name in _EXTREMES:
            seen = [value for value, _ in values if not math.isnan(value)]
            merged[name] = _EXTREMES[name]([*seen, 0.0] if leave_out else seen, default=math.nan)
        elif name in _SHARES:
            merged[name] = _weigh(values, kind)[0] / max(whole[kind], 1.0)
        else:
            total, weight = _weigh(values, 1 if name in _OF_ROWS else 0)
            if name == "entropy":
                total, weight = total + known[1], weight + known[0]
            merged[name] = total / weight if weight else math.nan
    return merged


def _count(batch: MicroBatch) -> list[float]:
    """Tokens and rows that TRL's means of a micro-batch are over."""
    return [batch.tokens, float(batch.size)]


def _count_window(window: Sequence[Rows], leave_out: bool) -> list[list[float]]:
    """Tokens and rows of the step; and of rows left out, tokens and entropy where it is known."""
    tokens = rows = known = entropy = 0.0
    for batch in window:
        lengths = loss_mask(batch).sum(1)
        tokens, rows = tokens + float(lengths.sum()), rows + len(lengths)
        if leave_out and ENTROPY in batch:
            told = ~has_signal(batch) & ~batch[ENTROPY].isnan()
            known += float(lengths[told].sum())
            entropy += float(batch[ENTROPY][told].sum())
    return [[tokens, rows], [known, entropy]]


def _weigh(values: Sequence[tuple[float, Sequence[float]]], kind: int) -> tuple[float, float]:
    """The sum of means times what they are over, and the sum of the latter."""
    heavy = [(value, count[kind]) for value, count in values if count[kind]]
    return sum(value * weight for value, weight in heavy), sum(weight for _, weight in heavy)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
