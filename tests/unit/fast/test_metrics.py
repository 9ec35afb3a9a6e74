"""Metrics of batches of different size: what they would be if all rows had been in one batch."""

import math
from types import SimpleNamespace

import pytest
import torch

from grpo_cli.fast.batches import Counts, Logged
from grpo_cli.fast.metrics import merge_evaluation, merge_metrics, merge_step

ALONE = SimpleNamespace(num_processes=1)


def test_each_metric_is_averaged_over_what_it_is_a_mean_of():
    first = {"kl": [0.1], "vespo/phi_seq_mean": [1.0], "clip_ratio/low_mean": [0.5]}
    second = {"kl": [0.4], "vespo/phi_seq_mean": [4.0], "clip_ratio/low_mean": [0.0]}
    first |= {"clip_ratio/low_min": [0.5], "clip_ratio/high_max": [0.1], "num_tokens": [7]}
    second |= {"clip_ratio/low_min": [math.nan], "clip_ratio/high_max": [0.3], "num_tokens": [9]}
    counts = [[30, 1], [10, 2]]
    found = merge_metrics([first, second], counts, Counts(40, 3))
    assert found == {
        "kl": pytest.approx((30 * 0.1 + 10 * 0.4) / 40),
        "vespo/phi_seq_mean": pytest.approx((1 + 2 * 4) / 3),
        "clip_ratio/low_mean": pytest.approx(15 / 40),
        "clip_ratio/low_min": 0.5,
        "clip_ratio/high_max": 0.3,
        "num_tokens": 9,
    }
    by_row = merge_metrics([first, second], counts, Counts(40, 3), by_token=False)
    assert by_row["clip_ratio/low_mean"] == pytest.approx(0.5 / 3)


def test_a_value_that_is_missing_in_a_batch_counts_nothing():
    metrics = [{"rewards/a/mean": [math.nan]}, {"rewards/a/mean": [2.0]}, {}]
    found = merge_metrics(metrics, [[0, 4], [0, 4], [0, 4]], Counts(0, 12))
    assert found == {"rewards/a/mean": 2.0}
    assert math.isnan(merge_metrics(metrics[:1], [[0, 4]], Counts(0, 4))["rewards/a/mean"])


@pytest.mark.parametrize(
    ("loss_type", "wanted"), [("dapo", 0.7), ("vespo", 0.7), ("grpo", 0.35), ("bnpo", 0.35)]
)
def test_the_loss_of_the_policy_adds_up_as_the_loss_does(loss_type, wanted):
    logged = [
        Logged({"policy_loss": [0.5], "entropy_coef": []}, 4, torch.tensor(3.0)),
        Logged({"policy_loss": [0.2], "entropy_coef": [0.1]}, 4, torch.tensor(0.0)),
    ]
    found = merge_step(logged, ALONE, loss_type=loss_type, by_token=True)
    assert found == {"policy_loss": pytest.approx(wanted), "entropy_coef": 0.1}


@pytest.mark.parametrize(
    ("loss_type", "wanted"), [("dapo", 0.25), ("bnpo", 0.25), ("grpo", 0.2), ("luspo", 0.2)]
)
def test_the_loss_of_an_evaluation_is_one_over_all_rows_or_tokens(loss_type, wanted):
    logged = [
        Logged({"policy_loss": [0.1]}, 8, torch.tensor(10), torch.tensor(0.1)),
        Logged({"policy_loss": [0.4]}, 4, torch.tensor(10), torch.tensor(0.4)),
    ]
    found = merge_evaluation(logged, 12, loss_type=loss_type, by_token=True)
    assert found == {"loss": pytest.approx(wanted), "policy_loss": pytest.approx(wanted)}
