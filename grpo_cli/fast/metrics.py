"""How what TRL logs of batches becomes one number: of an optimizer step, or of an evaluation.

TRL (1.16) takes the mean of all batches, however many tokens or rows they have. Here a number is what it would be
if all rows had been in one batch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from grpo_cli.fast.batches import MEAN_OF_ROWS, Counts, Logged
from grpo_cli.upstream import trl

_OF_TOKENS = {trl.ENTROPY, trl.KL}
_SHARES = {trl.CLIP_LOW, trl.CLIP_HIGH, trl.CLIP_REGION, trl.CISPO_CLIP}
_LEAST = {trl.CLIP_LOW_MIN, trl.IS_RATIO_MIN}
_MOST = {trl.CLIP_HIGH_MAX, trl.IS_RATIO_MAX, trl.LOGP_DIFFERENCE_MAX}
_NEWEST = {trl.ENTROPY_COEF, trl.NUM_TOKENS}
_TOKENS, _ROWS = 0, 1


def merge_step(
    logged: Sequence[Logged],
    accelerator: Any,
    *,
    loss_type: str,
    by_token: bool,
    window: Counts | None = None,
    leave_out: bool = False,
) -> dict[str, float]:
    """Return the metrics of an optimizer step from those of its micro-batches.

    A row that is left out is never clipped, so shares of clipped tokens stay exact; its entropy is the one it was
    sampled with, if known.

    Args:
        logged: Of each micro-batch; equally many on all processes.
        loss_type: TRL's name of the loss.
        by_token: Whether shares are of tokens; otherwise of rows.
        window: What the step holds of this process, if rows may have been left out.
        leave_out: Whether they were.
    """
    counts = _read([[each.tokens, each.rows] for each in logged])
    if window is None:
        window = Counts(sum(tokens for tokens, _ in counts), sum(rows for _, rows in counts))
    extra = [[window.tokens, window.rows], [window.known_tokens, window.known_entropy]]
    if accelerator.num_processes > 1:
        local = torch.tensor([*counts, *extra], device=accelerator.device)
        *counts, whole, known = accelerator.reduce(local, "sum").tolist()
        extra = [whole, known]
    whole, known = Counts(*extra[0]), extra[1]
    metrics = [each.metrics for each in logged]
    merged = merge_metrics(metrics, counts, whole, by_token=by_token, leave_out=leave_out)
    if trl.ENTROPY in merged and known[0]:
        total, weight = _weigh(_parts(trl.ENTROPY, metrics, counts), _TOKENS)
        merged[trl.ENTROPY] = (total + known[1]) / (weight + known[0])
    if trl.POLICY_LOSS in merged and loss_type not in (*MEAN_OF_ROWS, "bnpo"):
        # Each is a part of the step's loss, as `loss` is.
        merged[trl.POLICY_LOSS] = sum(value for each in metrics for value in each[trl.POLICY_LOSS])
    return merged


def merge_evaluation(
    logged: Sequence[Logged], rows: int, *, loss_type: str, by_token: bool
) -> dict[str, float]:
    """Return the loss of an evaluation, and what TRL logged with it, from those of its batches.

    Args:
        logged: Of each batch; equally many on all processes.
        rows: Different completions of all processes; others repeat them, and count nothing.
        loss_type: TRL's name of the loss.
        by_token: Whether shares are of tokens; otherwise of rows.
    """
    if not logged:
        return {}
    local = _read([[each.tokens, each.rows, each.loss] for each in logged])
    # [processes, batches, 3]
    shares = np.array(gather_object([local]))
    counts = shares[:, :, :2].sum(0)
    whole = Counts(float(counts[:, _TOKENS].sum()), rows)
    metrics = [each.metrics for each in logged]
    merged = merge_metrics(metrics, counts.tolist(), whole, by_token=by_token)
    of_rows = loss_type in MEAN_OF_ROWS
    # Of the other losses, `bnpo` is a mean over a process's tokens; the sums are divided by all of the batch.
    weights = shares[:, :, _ROWS if of_rows else _TOKENS]
    if not of_rows and loss_type != "bnpo":
        weights = np.broadcast_to(counts[:, _TOKENS] / len(shares), weights.shape)
    total = max(whole.rows if of_rows else whole.tokens, 1.0)
    merged["loss"] = float((shares[:, :, 2] * weights).sum() / total)
    if trl.POLICY_LOSS in merged:
        unit = counts[:, _ROWS if of_rows else _TOKENS]
        values = np.array([each[trl.POLICY_LOSS][0] for each in metrics])
        merged[trl.POLICY_LOSS] = float((values * unit).sum() / total)
    return merged


def merge_metrics(
    metrics: Sequence[Mapping[str, Sequence[float]]],
    counts: Sequence[Sequence[float]],
    whole: Counts,
    *,
    by_token: bool = True,
    leave_out: bool = False,
) -> dict[str, float]:
    """Return each metric over all batches; NaN if none of them has a value.

    Args:
        metrics: What was logged of each batch.
        counts: Its tokens and rows, over all processes.
        whole: What shares are of.
        by_token: Whether that is tokens; otherwise rows.
        leave_out: Whether rows were left out, none of which is clipped.
    """
    unit = _TOKENS if by_token else _ROWS
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for each in metrics for name in each):
        parts = _parts(name, metrics, counts)
        if name in _LEAST | _MOST:
            numbers = [value for value, _ in parts if not math.isnan(value)]
            numbers += [0.0] if leave_out else []
            merged[name] = (min if name in _LEAST else max)(numbers, default=math.nan)
        elif name in _NEWEST:
            merged[name] = parts[-1][0]
        elif name in _SHARES:
            merged[name] = _weigh(parts, unit)[0] / max((whole.tokens, whole.rows)[unit], 1.0)
        else:
            total, weight = _weigh(parts, _TOKENS if name in _OF_TOKENS else _ROWS)
            merged[name] = total / weight if weight else math.nan
    return merged


def _read(values: Sequence[Sequence[Any]]) -> list[list[float]]:
    """Return numbers, of which some may be on a device, read from it in one copy."""
    tensors = [each for row in values for each in row if isinstance(each, torch.Tensor)]
    read = iter(torch.stack([each.double() for each in tensors]).tolist() if tensors else ())
    return [
        [next(read) if isinstance(each, torch.Tensor) else float(each) for each in row]
        for row in values
    ]


def _parts(
    name: str, metrics: Sequence[Mapping[str, Sequence[float]]], counts: Sequence[Sequence[float]]
) -> list[tuple[float, Sequence[float]]]:
    return [
        (sum(each[name]) / len(each[name]), count)
        for each, count in zip(metrics, counts, strict=True)
        if each.get(name)
    ]


def _weigh(parts: Sequence[tuple[float, Sequence[float]]], unit: int) -> tuple[float, float]:
    """Sum of means times their counts, and the sum of the counts; a mean over nothing may be NaN."""
    counted = [
        (value, count[unit]) for value, count in parts if count[unit] and not math.isnan(value)
    ]
    return sum(value * count for value, count in counted), sum(count for _, count in counted)
