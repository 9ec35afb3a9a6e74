"""From the values that runs gave to the band that one more normal run lies in.

Owns the choice of the method and what has to be said of it. The formulas are `estimates.py`'s.

Several runs: the 95 % prediction interval of one more run, from the spread between their values. One
run: what its own noise allows, which is no more than a guess, since other seeds take other ways:

- of logged records, from their spread within the window, as if they were independent: the interval of
  the mean of another window;
- of a held-out accuracy, from the number of prompts, as if both runs had drawn their own: the interval
  of the share in another measurement;
- of other held-out metrics, from the spread between prompts.

A band of accuracies is never narrower than what the number of prompts leaves open, and stays in [0, 1].
"""

import math
from collections.abc import Sequence
from statistics import fmean

from grpo_cli.analysis.estimates import predict_mean, predict_share
from grpo_cli.analysis.expectations.run_metrics import ACCURACY, RunMetrics
from grpo_cli.errors import UsageError

Band = tuple[float, float]
_DIGITS = 2
"""Digits of a band's width that are kept, beside the first."""


def band_of_series(metric: str, windows: Sequence[Sequence[float]]) -> Band:
    """The band of a logged metric.

    Args:
        metric: Its name.
        windows: For each run, the records of its window.

    Raises:
        UsageError: There is one run and one record: nothing has a spread.
    """
    if len(windows) > 1:
        return widen(predict_mean([fmean(window) for window in windows]))
    (records,) = windows
    if len(records) < 2:
        raise UsageError(
            f"one record of `{metric}` in one run says nothing about its noise. "
            "Fix: a window of several records (--window 4), or give runs of other seeds too"
        )
    return widen(predict_mean(records, future=len(records)))


def band_of_held_out(metric: str, values: Sequence[float], runs: Sequence[RunMetrics]) -> Band:
    """The band of a metric of the measurement after training.

    Args:
        metric: Its name.
        values: For each run, the metric's value.
        runs: The runs, in the same order.

    Raises:
        UsageError: There is one run, and its samples do not say how the metric varies.
    """
    if metric.startswith(ACCURACY):
        return _band_of_accuracy(values, min(int(run.after.get("prompts") or 1) for run in runs))
    if len(values) > 1:
        return widen(predict_mean(values))
    prompts = runs[0].held_out_samples(metric)
    if len(prompts) < 2:
        raise UsageError(
            f"one run alone does not say how `{metric}` varies: its samples (eval/after.jsonl) are not "
            "there. Fix: give runs of other seeds too, or leave it out with --metric"
        )
    return widen(predict_mean(prompts, future=len(prompts)))


def _band_of_accuracy(values: Sequence[float], prompts: int) -> Band:
    low, high = predict_share(fmean(values), prompts)
    if len(values) > 1:
        least, most = predict_mean(values)
        low, high = min(low, least), max(high, most)
    low, high = widen((low, high))
    return max(low, 0.0), min(high, 1.0)


def widen(band: Band) -> Band:
    """The same band with few digits, rounded outwards; one without width as it is."""
    low, high = band
    if high <= low:
        return low, high
    digits = max(_DIGITS - math.floor(math.log10(high - low)), 0)
    scale = 10**digits
    return math.floor(low * scale) / scale, math.ceil(high * scale) / scale
