"""What a change of the reward is a mean of, and when it is called noise."""

import pytest

from grpo_cli.report.reward_change import count_averaged, read_change


@pytest.mark.parametrize(
    ("records", "width"), [(1, 1), (3, 1), (6, 3), (12, 4), (40, 4), (200, 20)]
)
def test_a_few_records_are_averaged_where_there_are_so_many(records, width):
    assert count_averaged(records) == width


def test_a_change_within_the_spread_of_the_records_is_noise():
    noisy = [0.19, 0.25, 0.14, 0.22, 0.18, 0.21, 0.17, 0.26, 0.20, 0.15, 0.23, 0.19]
    change = read_change(noisy)
    assert change.is_noise
    assert change.describe() == "within noise (means of 4)"
    risen = read_change([each + 0.05 * at for at, each in enumerate(noisy)])
    assert risen.describe() == "mean of the first and last 4 records"


def test_what_does_not_change_is_not_noise():
    assert read_change([0.5] * 40).is_noise is False


def test_too_few_records_tell_no_noise():
    change = read_change([0.1, 0.2])
    assert change.is_noise is None
    assert change.describe() == "the first and the last record"
    assert read_change([]) is None
