"""Estimates against independent computations: by enumeration, by published numbers, by simulation."""

import itertools
import random
from fractions import Fraction
from statistics import fmean, stdev

import pytest

from grpo_cli.estimates import (
    FEWEST_CLUSTERS,
    difference_interval,
    majority,
    mean_interval,
    pass_at_k,
    proportion_interval,
)


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples):
    for right in range(samples + 1):
        answers = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(answers, k))
            share = Fraction(sum(any(subset) for subset in subsets), len(subsets))
            assert pass_at_k(samples, right, k) == pytest.approx(float(share))


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_refuses_more_than_was_sampled(k):
    with pytest.raises(ValueError, match="3 samples"):
        pass_at_k(3, 1, k)


@pytest.mark.parametrize(
    ("answers", "place"),
    [
        (["4", "5", "5"], 1),
        (["4", "5"], 0),
        ([None, "5", None, "4"], 1),
        ([None, None], None),
        ([], None),
    ],
)
def test_the_majority_is_the_first_of_the_commonest(answers, place):
    assert majority(answers) == place


def test_a_proportion_is_wilsons_where_answers_are_independent():
    # 20 prompts with one answer each, 13 right: Wilson 1927 gives 0.433 to 0.819. The variance
    # between clusters divides by n - 1, which makes them count as 19.
    interval = proportion_interval([1.0] * 13 + [0.0] * 7, 1)
    assert interval.low == pytest.approx(0.433, abs=0.006)
    assert interval.high == pytest.approx(0.819, abs=0.006)


@pytest.mark.parametrize("rates", [[0.0] * 4, [1.0] * 4, [0.5] * 4, [0.3]])
def test_a_proportion_never_has_an_interval_of_width_zero(rates):
    interval = proportion_interval(rates, 8)
    assert 0 <= interval.low <= sum(rates) / len(rates) <= interval.high <= 1
    assert interval.high - interval.low > 0.05


def test_answers_that_agree_within_a_prompt_count_as_one():
    clustered = proportion_interval([1.0, 0.0] * 8, 8)
    spread = proportion_interval([0.5] * 16, 8)
    assert clustered.high - clustered.low > spread.high - spread.low


def test_a_mean_is_as_uncertain_as_its_standard_error_says():
    draws = random.Random(4)
    values = [draws.gauss(5, 2) for _ in range(200)]
    interval = mean_interval(values, seed=1)
    half = 1.96 * stdev(values) / len(values) ** 0.5
    assert interval.low == pytest.approx(fmean(values) - half, abs=0.05)
    assert interval.high == pytest.approx(fmean(values) + half, abs=0.05)
    assert interval == mean_interval(values, seed=1)
    assert interval != mean_interval(values, seed=2)


def test_intervals_hold_the_truth_as_often_as_they_say():
    draws = random.Random(0)
    held = 0
    for trial in range(200):
        sample = [draws.random() for _ in range(40)]
        interval = mean_interval(sample, seed=trial)
        held += interval.low <= 0.5 <= interval.high
    assert held / 200 > 0.88


def test_a_paired_difference_is_narrower_than_its_parts():
    draws = random.Random(5)
    before = [draws.random() for _ in range(60)]
    after = [value + 0.1 + draws.gauss(0, 0.02) for value in before]
    interval = difference_interval(before, after)
    assert 0.09 < interval.low < 0.1 < interval.high < 0.11
    alone = mean_interval(after)
    assert interval.high - interval.low < (alone.high - alone.low) / 5


def test_too_few_prompts_and_equal_ones_have_no_interval_but_a_reason():
    few = mean_interval([0.0, 1.0])
    assert (few.low, few.high) == (None, None)
    assert "2 prompts are too few" in few.reason
    assert "same for all prompts" in mean_interval([0.5] * FEWEST_CLUSTERS).reason
    with pytest.raises(ValueError, match=r"argument 2"):
        difference_interval([1.0], [1.0, 2.0])


def test_one_right_of_five_is_a_fifth():
    assert [pass_at_k(5, right, 1) for right in range(6)] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
