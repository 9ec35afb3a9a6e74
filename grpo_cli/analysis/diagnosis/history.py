"""A run as rules read it: its recipe, its metrics, and its held-out answers before and after training."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from math import inf, isinf, sqrt
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

from grpo_cli.analysis.diagnosis.advice import Advice
from grpo_cli.analysis.estimates import variance_of_mean
from grpo_cli.analysis.metrics import PerPrompt, per_prompt
from grpo_cli.errors import RewardError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.registry import find_kind
from grpo_cli.runs.metrics import (
    ERROR_SHARE,
    PHASES,
    Metrics,
    Point,
    When,
    numbers_of,
    read_rewards,
)
from grpo_cli.runs.run import Run

if TYPE_CHECKING:
    from grpo_cli.analysis.samples import ScoredCompletion

SURE = 4.0
"""Standard errors that a change must exceed: a rule is checked hundreds of times, so two would err often."""
LIKELY = 2.0
"""Standard errors that are enough not to blame a run."""
START, NOW = 5, 10
"""Records that the beginning and the present are means of; learning may begin with the first ones."""
PEAK_WIDTH = 10
"""Records that the mean of a peak is over."""
_FIRST = 3
_ALIKE = 1 / 3
"""Share of its rise by which a reward may deviate and still be near an unknown highest value: that of nine right
answers in ten, sqrt(0.9 * 0.1) / 0.9."""
FEWEST_PROMPTS = 5
ALIKE, _APART = 0.9, 0.7
"""Shares of the commonest answer: answers are all the same above the first, and differ below the second."""
_SHOWN = 30
_FALLING = 0.05
"""A share that falls by this much from one half of the window to the other is getting better by itself."""
_NEAR = 0.1
"""Share of all weights by which a reward may miss its highest value and still be near it."""


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

    def rises(self, least: float = 0.0, errors: float = SURE) -> bool:
        """Return whether it has risen by more than `least` and by more than these standard errors."""
        return self.difference > max(errors * self.error, least)

    def falls(self, least: float = 0.0, errors: float = SURE) -> bool:
        """Return whether it has fallen by more than `least` and by more than these standard errors."""
        return -self.difference > max(errors * self.error, least)


def change_between(earlier: Sequence[float], later: Sequence[float]) -> Change | None:
    """Return the change from some records to others; None if either are fewer than two."""
    if min(len(earlier), len(later)) < 2:
        return None
    error = sqrt(variance_of_mean(earlier) + variance_of_mean(later))
    return Change(fmean(earlier), fmean(later), error)


def slope_in_errors(values: Sequence[float]) -> float:
    """Return the slope of values over their places, by least squares, in its standard errors; 0 of a constant."""
    places = [place - (len(values) - 1) / 2 for place in range(len(values))]
    mean, squares = fmean(values), sum(place * place for place in places)
    slope = sum(place * value for place, value in zip(places, values, strict=True)) / squares
    rest = sum(
        (value - mean - slope * place) ** 2 for place, value in zip(places, values, strict=True)
    )
    error = sqrt(rest / (len(values) - 2) / squares)
    return slope / error if error > 0 else 0.0


def lasting_share(shares: Sequence[float], most: float) -> float | None:
    """Return the mean of a share over a window if it is above `most` and does not fall meanwhile; else None."""
    half = len(shares) // 2
    falls = half and fmean(shares[half:]) < fmean(shares[:half]) - _FALLING
    return fmean(shares) if shares and fmean(shares) > most and not falls else None


@dataclass(frozen=True)
class Answers:
    """The answers of one held-out measurement: how alike they are, and how they were scored."""

    prompts: int
    commonest: str
    share: float
    """Of the commonest text among all answers."""
    values: dict[str, PerPrompt]
    """`reward`, the total, and `rewards/NAME` in the recipe's order → the mean score of each prompt's answers."""

    def mean(self, metric: str = "reward") -> float:
        """Return the mean score over prompts."""
        values = self.values.get(metric)
        return fmean(values.values()) if values else 0.0


def read_answers(run: Run, when: When) -> Answers | None:
    """Return the answers of a measurement; None if there are none."""
    # It imports what scores completions.
    from grpo_cli.analysis.samples import as_scored, group_by_row

    groups = group_by_row(map(as_scored, run.samples(when)))
    return find_answers(groups, run.recipe) if groups else None


def find_answers(groups: "Sequence[Sequence[ScoredCompletion]]", recipe: Recipe) -> Answers:
    """Return the answers of a measurement, by prompt."""
    from grpo_cli.rewards.building import right_scores

    texts = Counter(_own_text(each) for group in groups for each in group)
    commonest, count = texts.most_common(1)[0]
    # Samples may be of other rewards than the recipe has now.
    scores = right_scores(recipe.rewards).items()
    right = {name: score for name, score in scores if name in groups[0][0].rewards}
    values = per_prompt(groups, right)
    return Answers(len(groups), commonest, count / texts.total(), values)


def describe_collapse(
    recipe: Recipe, after: Answers | None, *earlier: Answers | None
) -> str | None:
    """Return in words that a model's answers became the same for all prompts, and are not right; None if not.

    `earlier` are the answers of the stages before; unknown ones are ignored.
    """
    measured = [each for each in (*earlier, after) if each is not None]
    if after is None or len(measured) < 2 or after.share < ALIKE:
        return None
    differing = min(measured[:-1], key=lambda each: each.share)
    if differing.share > _APART or min(each.prompts for each in measured) < FEWEST_PROMPTS:
        return None
    accuracies = [name for name in after.values if name.startswith("accuracy/")]
    if any(after.mean(name) >= ALIKE for name in accuracies) or after.mean() >= near_best(recipe):
        return None
    text = after.commonest
    shown = repr(f"{text[:_SHOWN]}…" if len(text) > _SHOWN else text) if text else "empty"
    return (
        f"{after.share:.0%} of the held-out answers to {after.prompts} prompts are {shown} (should be "
        f"below {ALIKE:.0%}); earlier, {differing.share:.0%} were the same"
    )


def _own_text(answer: "ScoredCompletion") -> str:
    """Return what the model wrote; of an episode all answers and calls, since many end with the same words."""
    own = [each for each in answer.messages if each.get("role") == "assistant"]
    if len(own) < 2:
        return answer.text.strip()
    parts = [part for each in own for part in (each.get("content"), each.get("tool_calls")) if part]
    return "\n".join(part if isinstance(part, str) else json.dumps(part) for part in parts)


class Peak(NamedTuple):
    """The best a metric has been, as a mean of consecutive records."""

    step: int
    values: list[float]


@dataclass
class History:
    """What has been logged of a run so far."""

    recipe: Recipe
    metrics: Metrics = field(default_factory=Metrics)
    answers_before: Answers | None = None
    answers_after: Answers | None = None
    answers_warmed: Answers | None = None
    """Those after the warm-up; None if there was none."""
    source: str = "RECIPE"
    """The recipe as commands take it: the path of `resolved.json`, if that is known."""
    run: str = "RUN"
    checkpoints: tuple[int, ...] | None = None
    """Steps of the checkpoints that exist; None if that is not known."""
    lost_at: int | None = None
    """The step whose loss was NaN or infinite, and which ended the run before it was logged."""
    failed: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """On how many recorded completions each reward failed, and the first reason; empty if that is not known."""
    advice: Advice = field(default_factory=Advice)
    """How fixes are put, and which settings are not known."""

    def points(self, metric: str) -> Sequence[Point]:
        """Return the steps and values at which a metric was logged."""
        return self.metrics.series.get(metric, ())

    def first(self, metric: str, width: int) -> list[float]:
        """Return the numbers among the first `width` values of a metric."""
        return numbers_of(self.points(metric)[:width])

    def last(self, metric: str, width: int = NOW) -> list[float]:
        """Return the numbers among the last `width` values of a metric."""
        return numbers_of(self.points(metric)[-width:])

    def up_to(self, metric: str, step: int, width: int) -> list[float]:
        """Return the numbers among the last `width` values of a metric at or before a step."""
        return numbers_of(self.metrics.window(metric, step, width))

    def mean(self, metric: str) -> float | None:
        """Return the mean of the last 10 records of a metric; None if they hold no number."""
        values = self.last(metric)
        return fmean(values) if values else None

    def change(self, metric: str, start: int = START) -> Change | None:
        """Return how a metric has changed from its first `start` records to its last 10."""
        return change_between(self.first(metric, start), self.last(metric))

    def time_in(self, phase: str) -> tuple[float, float]:
        """Return the seconds that a recent step spends in a phase, and their share of all phases."""
        spent = {each: self.mean(f"time/{each}") or 0.0 for each in PHASES}
        total = sum(spent.values())
        return spent[phase], spent[phase] / total if total > 0 else 0.0

    def count(self, metric: str) -> int:
        """Return how many records a metric has; of `rewards/NAME/mean`, the reward that has most."""
        pattern = metric.replace("NAME", "*")
        series = self.metrics.series.items()
        return max((len(each) for name, each in series if fnmatchcase(name, pattern)), default=0)

    def peak(self, metric: str) -> Peak | None:
        """Return the best a metric has been over `PEAK_WIDTH` records; None before there are enough."""
        known = [(step, value) for step, value in self.points(metric) if value is not None]
        sums = [0.0, *accumulate(value for _, value in known)]
        ends = range(PEAK_WIDTH, len(sums))
        if not ends:
            return None
        end = max(ends, key=lambda end: sums[end] - sums[end - PEAK_WIDTH])
        return Peak(known[end - 1][0], [value for _, value in known[end - PEAK_WIDTH : end]])

    def rewards(self) -> Iterator[tuple[int, str, RewardConfig]]:
        """Yield each reward's index in the recipe, name in the metrics, and entry; none if the numbers differ."""
        names = read_rewards(dict.fromkeys(self.metrics.series, 0.0))
        if not names and self.answers_after:
            names = read_rewards({f"{name}/mean": 0.0 for name in self.answers_after.values})
        if len(names) == len(self.recipe.rewards):
            for place, (name, entry) in enumerate(zip(names, self.recipe.rewards, strict=True)):
                yield place, name, entry

    def has_risen(self, errors: float = SURE) -> bool:
        """Return whether the reward has risen by more than its noise, or all of it is above its beginning."""
        change, first = self.change("reward"), self.first("reward", _FIRST)
        now = self.last("reward")
        above = len(first) == _FIRST and len(now) == NOW and min(now) > max(first)
        return change is not None and (above or change.rises(errors=errors))

    def is_near_best(self) -> bool:
        """Return whether the reward is near its highest value, or, if that is unknown, rose until scores agree."""
        now, spread, change = self.mean("reward"), self.mean("reward_std"), self.change("reward")
        if now is None:
            return False
        if not isinf(near_best(self.recipe)):
            return now >= near_best(self.recipe)
        alike = spread is not None and change is not None and spread <= _ALIKE * change.difference
        return alike and self.has_risen()


def judges(entry: RewardConfig) -> bool:
    """Return whether a reward is of a kind that tells right answers from wrong ones."""
    with suppress(RewardError):
        params = find_kind(entry.kind)
        return params is not None and params.meta.right_answer is not None
    # The run was trained elsewhere, with a package that is not here.
    return False


def score_bounds(entry: RewardConfig) -> tuple[float, float]:
    """Return a reward's least and greatest score before its weight; infinite if not known."""
    if entry.clip is not None:
        return entry.clip
    try:
        params = find_kind(entry.kind)
        return params.model_validate(entry.params).details().range if params else (-inf, inf)
    except (RewardError, ValidationError):
        # The run was trained elsewhere, with a package or a version that is not here.
        return -inf, inf


def metric_bounds(metric: str, recipe: Recipe) -> tuple[float, float]:
    """Return the least and greatest mean of an accuracy, a reward or the total, as the rewards declare it."""
    from grpo_cli.rewards.building import name_rewards

    if metric.startswith("accuracy/"):
        return 0.0, 1.0
    named = dict(zip(name_rewards(recipe.rewards), recipe.rewards, strict=True))
    if (entry := named.get(metric.removeprefix("rewards/"))) is not None:
        return score_bounds(entry)
    weighted = [(each.weight, score_bounds(each)) for each in named.values() if each.weight]
    ends = [sorted((weight * low, weight * high)) for weight, (low, high) in weighted]
    if len(ends) > 1:
        # A reward that does not apply to a row adds nothing to its total.
        ends = [[min(low, 0.0), max(high, 0.0)] for low, high in ends]
    return sum(low for low, _ in ends), sum(high for _, high in ends)


def rewards_of(recipe: Recipe, source: str) -> Recipe:
    """Return the recipe with the rewards of one of its sources alone."""
    rewards = [entry for entry in recipe.rewards if entry.source in (None, source)]
    own = [each for each in recipe.dataset.parts if each.source_name == source]
    return recipe.model_copy(update={"rewards": tuple(rewards), "dataset": own[0]})


def near_best(recipe: Recipe) -> float:
    """Return the total above which a completion is about as good as can be; infinite if not known."""
    if shares := recipe.dataset.shares:
        return sum(share * near_best(rewards_of(recipe, name)) for name, share in shares.items())
    weighted = [entry for entry in recipe.rewards if entry.weight]
    if not weighted:
        return inf
    best = sum(max(entry.weight * bound for bound in score_bounds(entry)) for entry in weighted)
    return best - _NEAR * sum(abs(entry.weight) for entry in weighted)


def read_history(run: Run) -> History:
    """Return the history of a run, finished or not; raises `UsageError` if this is not a run folder."""
    failed = run.status.state == "failed" and any(run.folder.path.glob("bad_batch_*.pt"))
    error_shares = [name for name in run.series if name.endswith(ERROR_SHARE)]
    return History(
        run.recipe,
        run.metrics,
        read_answers(run, "before"),
        read_answers(run, "after"),
        read_answers(run, "warmup"),
        str(run.folder.resolved),
        str(run.folder.path),
        tuple(run.checkpoints),
        run.status.step + 1 if failed else None,
        run.failed_completions() if any(any(run.values(name)) for name in error_shares) else {},
    )
