"""Metrics of given completions against the same numbers worked out by hand, without a model."""

import itertools
from collections import Counter
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest

from grpo_cli.analysis.metrics import compare, metric_names, per_prompt, summarize
from grpo_cli.analysis.samples import ScoredCompletion, as_scored, group_by_row, score_samples
from grpo_cli.eval.folder import make_chunks
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import RewardContext

GIVEN = {
    # row of the data: (answer, whether it is right, tokens, cut off) of each completion
    4: [("7", 1, 3, False), ("7", 1, 5, False), ("8", 0, 4, False), ("9", 0, 8, True)],
    9: [("1", 0, 2, False), ("2", 0, 2, False), ("2", 0, 2, False), ("5", 1, 2, False)],
    1: [("3", 1, 6, False), ("3", 1, 6, False), ("3", 1, 6, False), ("3", 1, 6, False)],
}


def groups(given=GIVEN, style=0.5):
    return [
        [
            ScoredCompletion(
                group=group,
                row=row,
                prompt=f"question {row}",
                text=answer,
                tokens=tokens,
                clipped=clipped,
                rewards={"math": float(right), "style": style},
                reasons={},
                failed=[],
                answers={"math": answer},
                total=right + 0.1 * style,
            )
            for answer, right, tokens, clipped in completions
        ]
        for group, (row, completions) in enumerate(given.items())
    ]


def means():
    values = per_prompt(groups(), {"math": 1.0})
    return {name: metric.value for name, metric in summarize(values, 4).items()}


def test_every_metric_is_the_mean_over_prompts():
    found = means()
    rights = {row: [right for _, right, _, _ in each] for row, each in GIVEN.items()}
    assert found["accuracy/math"] == pytest.approx(fmean(fmean(each) for each in rights.values()))
    assert found["rewards/style"] == 0.5
    assert found["reward"] == pytest.approx(found["accuracy/math"] + 0.05)
    assert found["completion_length"] == pytest.approx((20 / 4 + 8 / 4 + 24 / 4) / 3)
    assert found["clipped"] == pytest.approx(1 / 12)


def test_a_completion_that_no_reward_scores_has_no_part_in_the_mean_reward():
    config = RewardConfig(kind="regex", pattern="yes", when='task == "asked"')
    completion = SimpleNamespace(
        text="yes",
        token_ids=(1,),
        clipped=False,
        messages=(),
        episode=None,
        images=None,
        prompt=None,
    )
    columns = {"prompt": ["a", "b"], "row_id": [0, 1], "task": ["asked", "other"]}
    rewards = build_rewards([config], RewardContext(8))
    scored = score_samples(rewards, columns, [[completion], [completion]])
    assert [each.total for each in scored] == [1.0, None]
    assert per_prompt(group_by_row(scored), {})["reward"] == {0: 1.0}
    # As earlier versions wrote it.
    assert as_scored({**vars(scored[1]), "total": 0.0}) == scored[1]


def test_the_names_of_metrics_are_known_beforehand():
    assert metric_names(["math", "style"], {"math": 1.0}, 4, episodes=False) == list(means())


def test_a_mean_of_right_and_wrong_has_the_interval_of_a_share():
    values = per_prompt(groups(), {"math": 1.0})
    found = summarize(values, 4)
    assert found["rewards/math"] == found["accuracy/math"]
    assert found["rewards/math"].low is not None


@pytest.mark.parametrize("k", [2, 4])
def test_pass_at_k_is_counted_over_all_subsets(k):
    shares = []
    for completions in GIVEN.values():
        subsets = list(itertools.combinations([right for _, right, _, _ in completions], k))
        shares.append(sum(any(subset) for subset in subsets) / len(subsets))
    assert means()[f"pass@{k}/math"] == pytest.approx(fmean(shares))


def test_the_majority_decides_and_is_right_or_wrong():
    won = []
    for completions in GIVEN.values():
        (answer, _), *_ = Counter(each[0] for each in completions).most_common(1)
        won.append(next(right for given, right, _, _ in completions if given == answer))
    assert means()["maj@4/math"] == pytest.approx(fmean(won)) == pytest.approx(2 / 3)


def test_one_sample_has_neither_votes_nor_pass_at_k():
    single = {row: completions[:1] for row, completions in GIVEN.items()}
    assert set(per_prompt(groups(single), {"math": 1.0})) == {
        "reward",
        "rewards/math",
        "rewards/style",
        "accuracy/math",
        "completion_length",
        "clipped",
    }


def test_a_reward_that_does_not_apply_counts_for_no_prompt():
    given = [
        [replace(each, rewards={**each.rewards, "style": None}) for each in group]
        for group in groups()
    ]
    found = summarize(per_prompt(given, {"math": 1.0}), 4)["rewards/style"]
    assert (found.value, found.prompts) == (None, 0)
    assert "no prompt" in found.reason


def test_a_comparison_is_paired_by_row():
    before = {"reward": {row: row / 10 for row in range(20)}}
    after = {"reward": {row: row / 10 + (0.2 if row % 2 else 0.1) for row in range(5, 25)}}
    found = compare(before, after)["reward"]
    assert found.prompts == 15
    assert found.value == pytest.approx((8 * 0.2 + 7 * 0.1) / 15)
    assert 0.1 < found.low < found.value < found.high < 0.2


def test_too_few_prompts_say_why_there_is_no_interval():
    found = compare({"reward": {1: 0.0, 2: 1.0}}, {"reward": {1: 1.0, 2: 1.0}})["reward"]
    assert (found.value, found.low, found.high) == (0.5, None, None)
    assert "2 prompts are too few" in found.reason


def test_chunks_cover_all_prompts_once_the_longest_first():
    lengths = [5, 9, 1, 9, 3, 7, 2]
    chunks = make_chunks(lengths, 3, seed=11)
    assert [chunk.places for chunk in chunks] == [(1, 3, 5), (0, 4, 6), (2,)]
    assert len({chunk.seed for chunk in chunks}) == 3
    assert [chunk.number for chunk in chunks] == [0, 1, 2]
    assert make_chunks(lengths, 3, seed=12)[0].seed != chunks[0].seed
