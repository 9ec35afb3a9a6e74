"""Weighted totals of rewards, and whether the totals of a group differ."""

import math
from collections.abc import Sequence

ROUNDING = 2.0**-22
"""Relative difference of two totals up to which rounding alone may explain it.

TRL keeps rewards and weights in float32, each up to 2⁻²⁴ off: a product is up to 2⁻²³ off, and the
difference of two sums of products up to 2⁻²².
"""


def add_up(weights: Sequence[float], scores: Sequence[float | None]) -> float:
    """Return the weighted sum of the scores that are not None; NaN if all are."""
    known = [w * score for w, score in zip(weights, scores, strict=True) if score is not None]
    return sum(known) if known else math.nan


def are_equal(totals: Sequence[float], scale: float | None = None) -> bool:
    """Return whether the totals of a group are equal up to rounding, so that no advantage differs from 0.

    Args:
        totals: One for each completion; NaN for one that no reward scored, which is ignored.
        scale: The largest sum of the absolute weighted scores of a completion. By default the largest
            absolute total, which is too small only if positive and negative rewards cancel.
    """
    known = [total for total in totals if not math.isnan(total)]
    if len(known) < 2:
        return True
    largest = max(map(abs, known)) if scale is None else scale
    return max(known) - min(known) <= ROUNDING * largest
