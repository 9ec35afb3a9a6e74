"""From scored completions to metrics: one number a prompt, then a mean with its interval.

Owns the names of metrics and what they count. The formulas of uncertainty are `estimates.py`'s.

Names: `reward` (the weighted total), `rewards/NAME`, `accuracy/NAME` (share of right answers, for
rewards that judge them), `pass@K/NAME`, `maj@K/NAME`, `completion_length` (tokens), `clipped` (share).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from grpo_cli.analysis.estimates import (
    Interval,
    difference_interval,
    majority,
    mean_interval,
    pass_at_k,
    proportion_interval,
)
from grpo_cli.analysis.samples import ScoredCompletion

Group = Sequence[ScoredCompletion]
PerPrompt = dict[int, float]
"""Row of the data → the metric's value for its prompt; rows it does not apply to are left out."""

_SHARES = ("accuracy/", "pass@", "maj@", "clipped")


@dataclass(frozen=True)
class Metric:
    """A mean over prompts."""

    value: float | None
    """None where it applies to no prompt."""
    low: float | None
    high: float | None
    """95 % interval, clustered by prompt; None with a reason."""
    prompts: int
    """Prompts it is the mean of."""
    reason: str | None = None
    """Why there is no interval, or no value."""

    def as_json(self) -> dict[str, Any]:
        """The metric as plain values."""
        return asdict(self)


def per_prompt(groups: Sequence[Group], right: Mapping[str, float]) -> dict[str, PerPrompt]:
    """Every metric's value for every prompt.

    Args:
        groups: The completions of each prompt, equally many.
        right: For each reward that judges answers, the score of a right one.
    """
    size = min((len(group) for group in groups), default=0)
    names = list(groups[0][0].rewards) if size else []
    found = {
        "reward": _collect(groups, lambda group: fmean(each.total for each in group)),
        **{f"rewards/{name}": _collect(groups, _reward(name)) for name in names},
    }
    for name, value in right.items():
        found[f"accuracy/{name}"] = _collect(groups, _pass(name, value, 1))
        for k in _powers(size):
            found[f"pass@{k}/{name}"] = _collect(groups, _pass(name, value, k))
        if size > 2 and any(
            each.answers.get(name) is not None for group in groups for each in group
        ):
            found[f"maj@{size}/{name}"] = _collect(groups, _majority(name, value))
    found["completion_length"] = _collect(
        groups, lambda group: fmean(each.tokens for each in group)
    )
    found["clipped"] = _collect(groups, lambda group: fmean(each.clipped for each in group))
    return found


def metric_names(rewards: Sequence[str], right: Collection[str], size: int) -> list[str]:
    """The metrics that `per_prompt` gives; majority votes only where a reward can read answers.

    Args:
        rewards: Names of the rewards.
        right: Names of those that judge answers.
        size: Completions of each prompt.
    """
    judged = [
        f"{metric}/{name}"
        for name in right
        for metric in (
            "accuracy",
            *(f"pass@{k}" for k in _powers(size)),
            *([f"maj@{size}"] if size > 2 else []),
        )
    ]
    shared = ["reward", *(f"rewards/{name}" for name in rewards)]
    return [*shared, *judged, "completion_length", "clipped"]


def summarize(values: Mapping[str, PerPrompt], size: int, seed: int) -> dict[str, Metric]:
    """The mean of each metric over prompts.

    Args:
        values: What `per_prompt` gave.
        size: Completions a prompt.
        seed: Of the bootstrap.
    """
    return {name: _mean(name, list(found.values()), size, seed) for name, found in values.items()}


def compare(
    before: Mapping[str, PerPrompt], after: Mapping[str, PerPrompt], seed: int
) -> dict[str, Metric]:
    """The paired difference `after - before` of each metric that both have, over the same prompts."""
    found = {}
    for name in before.keys() & after.keys():
        rows = sorted(before[name].keys() & after[name].keys())
        pair = [before[name][row] for row in rows], [after[name][row] for row in rows]
        if not rows:
            found[name] = Metric(None, None, None, 0, "it applies to no prompt")
            continue
        found[name] = _metric(
            fmean(pair[1]) - fmean(pair[0]), difference_interval(*pair, seed=seed), len(rows)
        )
    return {name: found[name] for name in before if name in found}


def _collect(groups: Sequence[Group], value: Callable[[Group], float | None]) -> PerPrompt:
    found = {group[0].row: value(group) for group in groups}
    return {row: number for row, number in found.items() if number is not None}


def _reward(name: str) -> Callable[[Group], float | None]:
    def mean(group: Group) -> float | None:
        known = [value for each in group if (value := each.rewards[name]) is not None]
        return fmean(known) if known else None

    return mean


def _pass(name: str, right: float, k: int) -> Callable[[Group], float | None]:
    def estimate(group: Group) -> float | None:
        known = [value for each in group if (value := each.rewards[name]) is not None]
        if len(known) < k:
            return None
        return pass_at_k(len(known), sum(value == right for value in known), k)

    return estimate


def _majority(name: str, right: float) -> Callable[[Group], float | None]:
    def vote(group: Group) -> float | None:
        if all(each.rewards[name] is None for each in group):
            return None
        chosen = majority([each.answers.get(name) for each in group])
        return float(chosen is not None and group[chosen].rewards[name] == right)

    return vote


def _powers(size: int) -> list[int]:
    """2, 4, 8, … up to `size`, and `size` itself."""
    powers = {2**power for power in range(1, size.bit_length()) if 2**power <= size}
    return sorted({*powers, size} - {0, 1})


def _mean(name: str, values: list[float], size: int, seed: int) -> Metric:
    if not values:
        return Metric(None, None, None, 0, "it applies to no prompt")
    if name.startswith(_SHARES) or _are_shares(values, size):
        return _metric(fmean(values), proportion_interval(values, size), len(values))
    return _metric(fmean(values), mean_interval(values, seed), len(values))


def _are_shares(values: Sequence[float], size: int) -> bool:
    """Whether each prompt's value may be a share of its completions, as the mean of 0/1 scores is."""
    return all(
        0 <= value <= 1 and abs(value * size - round(value * size)) < 1e-9 for value in values
    )


def _metric(value: float, interval: Interval, prompts: int) -> Metric:
    return Metric(value, interval.low, interval.high, prompts, interval.reason)
