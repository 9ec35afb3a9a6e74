"""Whether numbers have changed by more than their noise, and whether a reward is as good as it can be."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from statistics import fmean

from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig

SURE = 4.0
"""Standard errors that a change must exceed: a rule looks hundreds of times, so two would err often."""
LIKELY = 2.0
"""Standard errors that are enough not to blame a run."""
START, NOW = 5, 10
"""Records that the beginning and the present are means of; learning may begin with the first ones."""
NEAR = 0.1
"""Share of all weights by which a reward may miss its most and still be near it."""
_FIRST, _LEVEL = 3, 0.05
_UP_TO_ONE = frozenset(
    """math exact choice contains json code reasoning_gym regex think_format answer_format tag_count
    reasoning_steps language judge""".split()
)
_UP_TO_ZERO = frozenset({"length", "soft_overlong", "repetition"})


@dataclass(frozen=True)
class Change:
    """Two means and what noise alone would make between them."""

    before: float
    now: float
    error: float
    """The standard error of their difference."""

    @property
    def difference(self) -> float:
        """Of the means; above 0 for a rise."""
        return self.now - self.before

    def exceeds(self, least: float = 0.0, errors: float = SURE) -> bool:
        """Whether it has risen, by more than so many standard errors and by more than `least`."""
        return self.difference > max(errors * self.error, least)

    def reversed(self) -> "Change":
        """The same from its end: a fall is a rise."""
        return Change(self.now, self.before, self.error)


def compare(earlier: Sequence[float], later: Sequence[float]) -> Change | None:
    """The change from some records to others; None where either are fewer than two."""
    if min(len(earlier), len(later)) < 2:
        return None
    return Change(fmean(earlier), fmean(later), sqrt(_error(earlier) + _error(later)))


def _error(values: Sequence[float]) -> float:
    """The variance of a mean. That of `statistics` is exact, and too slow for every step of a training."""
    middle = fmean(values)
    return fsum((value - middle) ** 2 for value in values) / (len(values) - 1) / len(values)


def change_of(history: History, metric: str, start: int = START, now: int = NOW) -> Change | None:
    """How a metric has changed from its first records to its last."""
    return compare(history.first(metric, start), history.last(metric, now))


def most_reward(recipe: Recipe) -> float | None:
    """The highest total a completion can get; None where a reward has no known bound."""
    tops = [_weighted_top(entry) for entry in recipe.rewards]
    known = [top for top in tops if top is not None]
    return sum(known) if tops and len(known) == len(tops) else None


def is_bounded(entry: RewardConfig) -> bool:
    """Whether a reward's scores are known to lie between 0 and 1."""
    return entry.kind in _UP_TO_ONE or (entry.clip is not None and max(map(abs, entry.clip)) <= 1)


def top_score(entry: RewardConfig) -> float | None:
    """The best a reward gives, before its weight; None where it has no known bound."""
    if entry.clip is not None:
        return entry.clip[1]
    if entry.kind in _UP_TO_ONE:
        return 1.0
    return 0.0 if entry.kind in _UP_TO_ZERO else None


def _weighted_top(entry: RewardConfig) -> float | None:
    if entry.clip is not None:
        return max(entry.weight * bound for bound in entry.clip)
    if entry.kind in _UP_TO_ONE:
        return max(entry.weight, 0.0)
    return 0.0 if entry.kind in _UP_TO_ZERO and entry.weight >= 0 else None


def has_risen(history: History, errors: float = SURE) -> bool:
    """Whether the reward is higher than it began, by more than so many standard errors.

    A reward that rises within its first records has no noise to speak of there: it has risen too where
    every record of now is above those it began with.
    """
    change, first = change_of(history, "reward"), history.first("reward", _FIRST)
    now = history.last("reward", NOW)
    above = len(first) == _FIRST and len(now) == NOW and min(now) > max(first)
    return change is not None and (above or change.exceeds(errors=errors))


def is_near_most(history: History) -> bool:
    """Whether the reward is about as high as it can get.

    Where its most is not known, that is taken of a reward that rose until all completions scored the same.
    """
    most, now = most_reward(history.recipe), history.last("reward", NOW)
    if not now:
        return False
    if most is None:
        return has_risen(history) and _is_level(history)
    return fmean(now) >= most - NEAR * sum(abs(entry.weight) for entry in history.recipe.rewards)


def _is_level(history: History) -> bool:
    """Whether the spread of scores is small beside what the reward has gained."""
    change, spread = change_of(history, "reward"), history.last("reward_std", NOW)
    return change is not None and bool(spread) and fmean(spread) <= _LEVEL * change.difference
