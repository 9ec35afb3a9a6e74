"""Estimates against independent computations: by enumeration, by published numbers, by simulation."""

import itertools
import random
from fractions import Fraction
from statistics import fmean, stdev

import pytest

from grpo_cli.analysis.estimates import (
    FEWEST_CLUSTERS,
    majority,
    mean_interval,
    pass_at_k,
    predict_mean,
    predict_share,
    proportion_interval,
    student_t,
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
    # 20 prompts with one answer each, 13 right: Wilson 1927 gives 0.433 to 0.819.
    interval = proportion_interval([1.0] * 13 + [0.0] * 7, 1)
    assert interval.low == pytest.approx(0.4329, abs=1e-4)
    assert interval.high == pytest.approx(0.8188, abs=1e-4)


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
    interval = mean_interval(values)
    half = 1.96 * stdev(values) / len(values) ** 0.5
    assert interval.low == pytest.approx(fmean(values) - half, abs=0.05)
    assert interval.high == pytest.approx(fmean(values) + half, abs=0.05)
    assert interval == mean_interval(values)


def test_intervals_hold_the_truth_as_often_as_they_say():
    draws = random.Random(0)
    held = 0
    for _ in range(200):
        sample = [draws.random() for _ in range(40)]
        interval = mean_interval(sample)
        held += interval.low <= 0.5 <= interval.high
    assert held / 200 > 0.88


def test_a_paired_difference_is_narrower_than_its_parts():
    draws = random.Random(5)
    before = [draws.random() for _ in range(60)]
    after = [value + 0.1 + draws.gauss(0, 0.02) for value in before]
    interval = mean_interval([now - then for then, now in zip(before, after, strict=True)])
    assert 0.09 < interval.low < 0.1 < interval.high < 0.11
    alone = mean_interval(after)
    assert interval.high - interval.low < (alone.high - alone.low) / 5


def test_too_few_prompts_and_equal_ones_have_no_interval_but_a_reason():
    few = mean_interval([0.0, 1.0])
    assert (few.low, few.high) == (None, None)
    assert "2 prompts are too few" in few.reason
    assert "same for all prompts" in mean_interval([0.5] * FEWEST_CLUSTERS).reason


def test_one_right_of_five_is_a_fifth():
    assert [pass_at_k(5, right, 1) for right in range(6)] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]


T_975 = {
    1: 12.7062,
    2: 4.3027,
    3: 3.1824,
    4: 2.7764,
    5: 2.5706,
    10: 2.2281,
    30: 2.0423,
    120: 1.9799,
}


@pytest.mark.parametrize(("freedom", "value"), T_975.items())
def test_students_t_is_that_of_printed_tables(freedom, value):
    assert student_t(0.975, freedom) == pytest.approx(value, abs=5e-5)


def test_students_t_has_other_levels_too():
    assert student_t(0.95, 2) == pytest.approx(2.91999, abs=1e-5)
    assert student_t(0.995, 5) == pytest.approx(4.03214, abs=1e-5)


def test_the_mean_of_more_values_falls_into_its_interval_as_often_as_it_says():
    generator = random.Random(7)

    def draw(count):
        return [generator.gauss(3.0, 2.0) for _ in range(count)]

    for past, future in ((3, 1), (4, 4)):
        hits = 0
        for _ in range(4000):
            low, high = predict_mean(draw(past), future)
            hits += low <= fmean(draw(future)) <= high
        assert hits / 4000 == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize("chance", [0.3, 0.7, 0.95])
def test_another_share_falls_into_its_interval_about_as_often_as_it_says(chance):
    generator = random.Random(3)

    def draw():
        return sum(generator.random() < chance for _ in range(100)) / 100

    hits = 0
    for _ in range(2000):
        low, high = predict_share(draw(), 100)
        hits += low <= draw() <= high
    assert 0.93 <= hits / 2000 <= 0.99


def test_a_share_of_all_or_nothing_still_leaves_room():
    c = 1.959964**2 / 200
    assert predict_share(1.0, 100) == pytest.approx(((1 - c) / (1 + c), 1.0), abs=1e-6)
    assert predict_share(0.0, 100) == pytest.approx((0.0, 2 * c / (1 + c)), abs=1e-6)
