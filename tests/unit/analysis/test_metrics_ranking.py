"""Pairs ranked right, and how much likelier the better responses are."""

import pytest

from grpo_cli.analysis.metrics import (
    GAP,
    RANKING,
    RankedGroup,
    likelihood_gap,
    rank_by_prompt,
    ranking_accuracy,
    read_ranked,
    write_ranked,
)


@pytest.mark.parametrize(
    ("log_probabilities", "rewards", "share"),
    [
        ([-1.0, -2.0], [1, 0], 1.0),
        ([-2.0, -1.0], [1, 0], 0.0),
        ([-1.0, -1.0], [1, 0], 0.5),
        # Three pairs differ in reward; the two of equal reward are not compared.
        ([-1.0, -3.0, -2.0, -2.5], [2, 1, 1, 1], 1.0),
        ([-2.2, -3.0, -2.0, -2.5], [2, 1, 1, 1], 2 / 3),
        ([-1.0, -2.0], [1, 1], None),
        ([-1.0], [1], None),
    ],
)
def test_pairs_of_different_reward_are_ranked(log_probabilities, rewards, share):
    assert ranking_accuracy(log_probabilities, rewards) == share


def test_the_gap_is_between_those_above_the_mean_and_those_below():
    assert likelihood_gap([-1.0, -2.0, -4.0, -9.0], [3, 2, 0, 1.5]) == pytest.approx(5.0)
    assert likelihood_gap([-1.0, -2.0, -4.0], [2, 1, 0]) == pytest.approx(3.0)
    assert likelihood_gap([-1.0, -2.0], [1, 1]) is None


def test_what_was_written_is_read_again(tmp_path):
    groups = [RankedGroup(3, [1.0, 0.0], [-1.0, -1.5]), RankedGroup(4, [1.0, 1.0], [-1.0, -2.0])]
    write_ranked(tmp_path / "ranked.jsonl", groups)
    assert read_ranked(tmp_path / "ranked.jsonl") == groups
    assert rank_by_prompt(groups) == {RANKING: {3: 1.0}, GAP: {3: 0.5}}
    assert read_ranked(tmp_path / "none.jsonl") == []
