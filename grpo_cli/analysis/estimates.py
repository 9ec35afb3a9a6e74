"""Proportions, means and differences, each with its uncertainty: numbers in, numbers out."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from grpo_cli.units import count_noun

FEWEST_CLUSTERS = 8
"""Prompts below which a bootstrap's interval is too narrow to be shown."""
ALL_EQUAL = "it is the same for all prompts"
RESAMPLES = 10_000
_BLOCK = 2**20
"""Resampled values in memory at once."""
_LEVEL = 0.95
_Z = NormalDist().inv_cdf((1 + _LEVEL) / 2)
_FLAT = 1e-12


@dataclass(frozen=True)
class Interval:
    """A 95 % interval, or the reason why there is none."""

    low: float | None
    high: float | None
    reason: str | None = None


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that one of `k` completions is right, from `right` right ones among `samples`.

    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1, the unbiased estimator.
    """
    if not 0 < k <= samples:
        raise ValueError(f"k is {k}, and there are {samples} samples")
    # One division of whole numbers: 1 of 5 is then 0.2, and not a hair below it.
    ways = math.comb(samples, k)
    return (ways - math.comb(samples - right, k)) / ways


def majority(answers: Sequence[Hashable | None]) -> int | None:
    """Return the index of the first completion with the commonest answer; None if none answers.

    Source: Wang et al. 2023 (arXiv:2203.11171), self-consistency. Ties go to the first, right or wrong.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    return answers.index(counts.most_common(1)[0][0]) if counts else None


def proportion_interval(rates: Sequence[float], size: int) -> Interval:
    """Return the 95 % interval of a proportion from its share in each cluster of `size` answers; never of width 0.

    Wilson's interval for the effective number of answers; that of the clusters if all agree.
    Source: Wilson 1927; Korn and Graubard 1998 (Survey Methodology 24), effective sample size.
    """
    clusters, mean = len(rates), fmean(rates)
    answers, variance = clusters * size, variance_of_mean(rates)
    effective = float(clusters)
    if variance > _FLAT:
        # Both variances without bias: one answer in each cluster counts as one.
        effective = mean * (1 - mean) * answers / (answers - 1) / variance
    count = min(max(effective, 1.0), float(answers))
    scale = 1 + _Z**2 / count
    middle = (mean + _Z**2 / (2 * count)) / scale
    half = _Z / scale * math.sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2))
    return Interval(max(middle - half, 0.0), min(middle + half, 1.0))


def variance_of_mean(values: Sequence[float]) -> float:
    """Return the squared standard error of a mean."""
    # `statistics.variance` is exact, and too slow for every step of a training.
    if len(values) < 2:
        return 0.0
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)


def say_too_few(prompts: int) -> str:
    """Return the reason for which this number of prompts has no interval."""
    verb = "is" if prompts == 1 else "are"
    return f"{count_noun(prompts, 'prompt')} {verb} too few, {FEWEST_CLUSTERS} are needed"


def mean_interval(means: Sequence[float]) -> Interval:
    """Return the 95 % bootstrap interval of a mean over clusters, such as the mean of each prompt's completions.

    Source: Efron and Tibshirani 1993, chapter 13 (percentile interval), clusters resampled whole.
    """
    if len(means) < FEWEST_CLUSTERS:
        return Interval(None, None, say_too_few(len(means)))
    if max(means) - min(means) <= _FLAT:
        return Interval(None, None, ALL_EQUAL)
    import numpy

    values = numpy.asarray(means, dtype=numpy.float64)
    generator = numpy.random.default_rng(0)
    resampled = numpy.empty(RESAMPLES)
    block = max(_BLOCK // len(values), 1)
    for start in range(0, RESAMPLES, block):
        size = (min(block, RESAMPLES - start), len(values))
        drawn = generator.integers(0, len(values), size)
        resampled[start : start + size[0]] = values[drawn].mean(axis=1)
    low, high = numpy.quantile(resampled, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Interval(float(low), float(high))


def student_t(probability: float, freedom: int) -> float:
    """Return a quantile above the median of Student's t, from the exact finite series of its distribution.

    Source: Abramowitz and Stegun 1964, 26.7.3 (odd) and 26.7.4 (even degrees of freedom).
    """
    low, high = 0.0, math.pi / 2
    # Bisects the angle: t itself may be large with 1 degree of freedom.
    for _ in range(80):
        angle = (low + high) / 2
        below = _central_mass(angle, freedom) < 2 * probability - 1
        low, high = (angle, high) if below else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _central_mass(angle: float, freedom: int) -> float:
    """Return the probability that |t| is below `sqrt(freedom)·tan(angle)`."""
    odd = freedom % 2
    sine, square = math.sin(angle), math.cos(angle) ** 2
    if freedom == 1:
        return 2 * angle / math.pi
    term = total = math.cos(angle) if odd else 1.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= (power - 1) / power * square
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def predict_mean(values: Sequence[float], future: int = 1) -> tuple[float, float]:
    """Return the 95 % prediction interval of the mean of `future` more values like these, taken as normal.

    Source: Meeker, Hahn and Escobar 2017, Statistical Intervals, chapter 4: mean ± t·s·√(1/m + 1/n).
    """
    count, middle = len(values), fmean(values)
    spread = math.sqrt(variance_of_mean(values) * count)
    t = student_t((1 + _LEVEL) / 2, count - 1)
    half = t * spread * math.sqrt(1 / future + 1 / count)
    return middle - half, middle + half


def predict_share(share: float, trials: int) -> tuple[float, float]:
    """Return the 95 % prediction interval of the share in as many more trials; never of width 0.

    It holds every share that a score test of two proportions does not tell from `share`: with c = z²/2n its ends
    solve (x − p)² = c·(x + p)·(2 − x − p).
    Source: Krishnamoorthy and Peng 2011 (J. Statist. Plann. Inference 141), the joint sampling approach.
    """
    c = _Z**2 / (2 * trials)
    middle = share + c * (1 - share)
    square = middle**2 - (1 + c) * (share**2 * (1 + c) - 2 * c * share)
    half = math.sqrt(max(square, 0.0))
    return max((middle - half) / (1 + c), 0.0), min((middle + half) / (1 + c), 1.0)


@dataclass(frozen=True)
class CrossedMean:
    """A mean over seeds and prompts, each seed with the same prompts, and how much each makes it uncertain."""

    value: float
    seeds: int
    prompts: int
    by_seed: float
    """Variance between seeds, of a seed's mean."""
    by_prompt: float
    """What the choice of prompts adds to the squared standard error, however many seeds there are."""

    def interval(self, seeds: int | None = None) -> Interval:
        """Return the 95 % interval, or the one that this number of seeds would give if they were like these.

        Each part has the t of its own degrees of freedom: with few seeds, those of their sum are too uncertain.
        Source: Banerjee 1961 (Sankhyā A 23), an interval from separate estimates of variances, never too narrow.
        """
        count = seeds or self.seeds
        if count < 2:
            return Interval(None, None, "one seed does not show how much seeds differ")
        square = _t(count) ** 2 * self.by_seed / count
        if self.by_prompt:
            square += _t(self.prompts) ** 2 * self.by_prompt
        half = math.sqrt(square)
        if half <= _FLAT:
            return Interval(None, None, ALL_EQUAL)
        return Interval(self.value - half, self.value + half)

    def seeds_needed(self) -> int | None:
        """Return how many seeds would set this mean apart from 0; None if it takes more prompts, or too many."""
        for count in _SEED_COUNTS:
            low, high = self.interval(count).low, self.interval(count).high
            if count > self.seeds and low is not None and high is not None and low * high > 0:
                return count
        return None


def _t(count: int) -> float:
    # From a few hundred on it is the normal distribution's, and its series takes long.
    return student_t((1 + _LEVEL) / 2, min(count, 200) - 1)


_SEED_COUNTS: tuple[int, ...] = (*range(2, 21), *range(25, 101, 5))


def crossed_mean(values: Sequence[Sequence[float]]) -> CrossedMean:
    """Return the mean of values by seed and prompt (in one order), both taken as drawn at random.

    Source: Searle, Casella and McCulloch 1992, Variance Components, chapter 4: two-way crossed, one observation a
    cell. The prompts' part is the variance of the prompts' means less that of the residuals, at least 0.
    """
    rows = [fmean(row) for row in values]
    columns = [fmean(column) for column in zip(*values, strict=True)]
    seeds, prompts, mean = len(rows), len(columns), fmean(rows)
    residuals = 0.0
    if seeds > 1 and prompts > 1:
        squares = (
            (value - row - column + mean) ** 2
            for row, each in zip(rows, values, strict=True)
            for value, column in zip(each, columns, strict=True)
        )
        residuals = sum(squares) / ((seeds - 1) * (prompts - 1) * seeds * prompts)
    by_prompt = max(variance_of_mean(columns) - residuals, 0.0)
    return CrossedMean(mean, seeds, prompts, variance_of_mean(rows) * seeds, by_prompt)
