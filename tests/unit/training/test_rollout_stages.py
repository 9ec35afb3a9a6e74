"""The stages of a generation step on plain data, without a trainer."""

import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from grpo_cli.rewards.contract import RewardParams, Score
from grpo_cli.rewards.scoring import Reward
from grpo_cli.training.rollout.dynamic_sampling import DynamicSampling
from grpo_cli.training.rollout.rollout import (
    NO_REWARD,
    Aggregation,
    Context,
    Rollout,
    Scoring,
    count_tokens,
    measure_lengths,
)
from grpo_cli.training.rollout.step import GenerationStep, PhaseClock

SIZE = 2


class Params(RewardParams):
    """Of a reward that a test makes up."""


def reward_of(name, score, **more):
    return Reward(name, 1.0, "python", Params(), score, **more)


def context(step=0, training=True):
    state = SimpleNamespace(global_step=step, stateful_callbacks={})
    return Context(state, training, SIZE)


def rows_of(numbers):
    return [{"prompt": f"row {n}", "row_id": n} for n in numbers for _ in range(SIZE)]


class Counter:
    """Completes a row with its number and the number of the completion."""

    in_parts = True

    def __init__(self):
        self.sampled = []

    def waits(self):
        return {}

    def sample(self, rows, context):
        ids = [[row["row_id"], index % SIZE] for index, row in enumerate(rows)]
        self.sampled += [row["row_id"] for row in rows][::SIZE]
        return Rollout(context, list(rows), [[9]] * len(rows), ids, [str(own) for own in ids])


def even_rows_teach(batch):
    """Tells completions of rows with even numbers apart."""
    return [Score(float(place if row % 2 == 0 else 1)) for row, place in batch.completion_ids]


def step_of(reward=even_rows_teach, **stages):
    rewards = [reward_of("own", reward)] if reward else []
    scoring = Scoring(rewards, "0")
    aggregation = Aggregation(scoring.names, torch.ones(1), normalized_first=False)
    step = GenerationStep(Counter(), scoring, aggregation, PhaseClock())
    if "max_resample" in stages:
        data = Dataset.from_list([{"prompt": f"row {n}", "row_id": n} for n in range(12)])
        dynamic = DynamicSampling(
            data,
            seed=0,
            max_resample=stages["max_resample"],
            sample=step.sample,
            aggregation=aggregation,
            ended=lambda rollout: [True] * len(rollout.rows),
        )
        step.stages.append(dynamic)
    return step


def test_completions_are_scored_and_groups_without_signal_found():
    rollout = step_of().run(rows_of([1, 2, 3]), context())
    assert rollout.own_scores() == [[1], [1], [0], [1], [1], [1]]
    assert rollout.silent == [0, 2]
    assert [score.value for score in rollout.judged["own"]] == [1, 1, 0, 1, 1, 1]


def test_groups_without_signal_are_replaced_and_both_are_told_apart():
    step, now = step_of(max_resample=4), context()
    logged = []
    step.log = lambda rollout: logged.append(rollout) or rollout
    rollout = step.run(rows_of([1, 2, 3]), now)
    assert rollout.silent == []
    learned = {row["row_id"] for row in rollout.rows}
    assert 2 in learned
    assert all(number % 2 == 0 for number in learned)
    # Tokens, rows and scores of a completion stay together.
    for row, ids, scores in zip(
        rollout.rows, rollout.completion_ids, rollout.own_scores(), strict=True
    ):
        assert (row["row_id"], float(ids[1])) == (ids[0], scores[0])
    first, *later = rollout.rounds
    assert first.learned == {2, 3}
    assert sum(len(each.learned) for each in later) == 4
    resampled = rollout.metrics["dynamic_sampling/resampled_groups"]
    assert resampled == sum(len(each.rollout.rows) for each in later) // SIZE
    # Metrics are of the first sampling, counts of all.
    assert rollout.metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert rollout.metrics["reward"] == pytest.approx(5 / 6)
    assert rollout.unused_tokens == resampled * SIZE * 3
    assert now.state.stateful_callbacks["dynamic_sampling"]["prompts_seen"] == 3 + resampled
    assert logged == [rollout]


def test_an_evaluation_replaces_nothing():
    rollout = step_of(max_resample=4).run(rows_of([1, 3]), context(training=False))
    assert (rollout.silent, rollout.rounds) == ([0, 1], [])


def test_what_a_reward_logs_in_an_evaluation_waits_for_all_batches():
    def score(batch):
        batch.extra["log_metric"]("f1", 0.5)
        return even_rows_teach(batch)

    step = step_of(score)
    rollout = step.run(rows_of([1]), context())
    assert ("log_metric", ("f1", 0.5)) in rollout.calls[0]
    rollout = step.run(rows_of([1]), context(training=False))
    assert all(arguments[0] != "f1" for _, arguments in rollout.calls[0])
    assert step._scoring.logging == {"own"}


def test_without_rewards_all_completions_score_the_same():
    rollout = step_of(None).run(rows_of([1, 2]), context())
    assert rollout.own_scores() == [[0.0]] * 4
    assert Scoring([], "0").names == [NO_REWARD]
    assert rollout.silent == [0, 1]


def test_lengths_are_of_the_models_own_tokens():
    rollout = Rollout(
        context(),
        rows_of([1]),
        [[9, 9], [9]],
        [[1, 2, 3], [4, 5]],
        ["a", "b"],
        mask=[[1, 0, 1], [1, 1]],
    )
    lengths = measure_lengths(rollout, [True, False])
    assert lengths["completions/mean_length"] == 2
    assert lengths["completions/clipped_ratio"] == 0.5
    assert lengths["completions/max_terminated_length"] == 2
    assert count_tokens(rollout) == 3 + 4


def test_metrics_of_scores_leave_out_what_no_reward_scored():
    aggregation = Aggregation(["a", "b"], torch.tensor([1.0, 2.0]), normalized_first=False)
    none = math.nan
    metrics = aggregation.measure(torch.tensor([[1.0, 1.0], [0.0, none], [none, none]]))
    assert metrics["reward"] == 1.5
    assert metrics["rewards/a/mean"] == 0.5
    assert metrics["rewards/b/mean"] == 1.0
