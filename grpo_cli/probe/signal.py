"""What the scores of sampled completions say about learning: is there a difference to learn from?

Owns the statistics of scores and lengths; what is wrong with them is `judgement.py`'s to say.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

from grpo_cli.analysis.estimates import proportion_interval
from grpo_cli.analysis.samples import ScoredCompletion
from grpo_cli.rewards.totals import are_equal

FLAT = 1e-9
"""Differences that are none."""


@dataclass(frozen=True)
class Spread:
    """Mean and spread of one reward, or of the weighted total."""

    mean: float | None
    """None where it gave no score at all."""
    std: float
    """Over all completions."""
    within: float
    """Mean over the groups of the standard deviation within a group: what advantages are made of."""


@dataclass(frozen=True)
class PassRate:
    """How often answers are right, for a reward that judges them."""

    reward: str
    rate: float
    low: float
    high: float
    """95 % interval, clustered by prompt."""
    too_hard: int
    """Prompts with no right answer."""
    learnable: int
    """Prompts with some right answers and some wrong ones."""
    too_easy: int
    """Prompts with right answers only."""
    by_prompt: tuple[float, ...]
    """Share of right answers of each prompt, in the order probed."""


@dataclass(frozen=True)
class Signal:
    """What a step would have to learn from."""

    prompts: int
    completions: int
    rewards: dict[str, Spread]
    total: Spread
    frac_reward_zero_std: float
    """Share of groups whose completions all have the same total; TRL logs it under this name."""
    cancelled_groups: float
    """Share of groups in which rewards differ, and the totals do not."""
    alike_groups: float
    """Share of groups whose completions are the same text."""
    pass_rates: tuple[PassRate, ...]

    def as_json(self) -> dict[str, Any]:
        """The signal as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Lengths:
    """How long completions are; nearest-rank percentiles, in tokens."""

    median: int
    p95: int
    max: int
    clipped: float
    """Share cut off at the limit."""
    limit: int


def read_signal(scored: Sequence[ScoredCompletion], right: dict[str, float]) -> Signal:
    """Sums up scores.

    Args:
        scored: At least one completion.
        right: For each reward that judges answers, the score of a right one.
    """
    groups = _groups(scored)
    names = list(scored[0].rewards)
    return Signal(
        prompts=len(groups),
        completions=len(scored),
        rewards={
            name: _spread([[c.rewards[name] for c in group] for group in groups]) for name in names
        },
        total=_spread([[c.total for c in group] for group in groups]),
        frac_reward_zero_std=fmean(float(are_equal([c.total for c in group])) for group in groups),
        cancelled_groups=fmean(float(_is_cancelled(group)) for group in groups),
        alike_groups=fmean(float(len({c.text for c in group}) == 1) for group in groups),
        pass_rates=tuple(
            rate for name, value in right.items() if (rate := _pass_rate(groups, name, value))
        ),
    )


def read_lengths(scored: Sequence[ScoredCompletion], limit: int) -> Lengths:
    """Sums up lengths; `limit` is `max_completion_length`."""
    ordered = sorted(completion.tokens for completion in scored)
    median, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95))
    clipped = fmean(float(completion.clipped) for completion in scored)
    return Lengths(median, p95, ordered[-1], clipped, limit)


def _groups(scored: Sequence[ScoredCompletion]) -> list[list[ScoredCompletion]]:
    groups: dict[int, list[ScoredCompletion]] = {}
    for completion in scored:
        groups.setdefault(completion.group, []).append(completion)
    return list(groups.values())


def _is_cancelled(group: Sequence[ScoredCompletion]) -> bool:
    known = (
        [value for c in group if (value := c.rewards[name]) is not None]
        for name in group[0].rewards
    )
    return are_equal([c.total for c in group]) and not all(are_equal(values) for values in known)


def _spread(groups: Sequence[Sequence[float | None]]) -> Spread:
    known = [[value for value in group if value is not None] for group in groups]
    values = [value for group in known for value in group]
    if not values:
        return Spread(None, 0.0, 0.0)
    within = fmean(pstdev(group) for group in known if group)
    return Spread(fmean(values), pstdev(values), within)


def _pass_rate(
    groups: Sequence[Sequence[ScoredCompletion]], name: str, right: float
) -> PassRate | None:
    judged = [
        [completion.rewards[name] == right for completion in group]
        for group in groups
        if all(completion.rewards[name] is not None for completion in group)
    ]
    if not judged:
        return None
    rates = [fmean(map(float, group)) for group in judged]
    interval = proportion_interval(rates, len(judged[0]))
    return PassRate(
        reward=name,
        rate=fmean(rates),
        low=interval.low or 0.0,
        high=interval.high or 0.0,
        too_hard=sum(rate == 0 for rate in rates),
        learnable=sum(0 < rate < 1 for rate in rates),
        too_easy=sum(rate == 1 for rate in rates),
        by_prompt=tuple(rates),
    )
