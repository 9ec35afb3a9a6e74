"""`on_error` and `clip`: what a completion gets whose scoring fails, or goes too far."""

import pytest
from pydantic import ValidationError

from grpo_cli.errors import RewardError
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.contract import Batch, Score
from grpo_cli.rewards.kinds.length import LengthParams
from grpo_cli.rewards.scoring import Reward

BATCH = Batch(["p"] * 4, ["fine", "boom", "nan", "huge"])


def scorer(batch):
    found = []
    for text in batch.texts:
        if text == "boom":
            raise ZeroDivisionError("no luck")
        found.append(Score({"fine": 1.0, "nan": float("nan"), "huge": 50.0}[text], text))
    return found


def reward(**options):
    return Reward("mine", 1.0, "length", LengthParams(target=1), scorer, **options)


def test_by_default_a_failure_ends_the_run():
    with pytest.raises(RewardError, match="no luck"):
        reward().score(BATCH)


@pytest.mark.parametrize(("on_error", "given"), [("zero", 0.0), ("skip", None)])
def test_only_the_rows_that_fail_are_forgiven(on_error, given):
    scores = reward(on_error=on_error).score(BATCH)
    assert [score.value for score in scores] == [1.0, given, given, 50.0]
    assert [score.failed for score in scores] == [False, True, True, False]
    assert "no luck" in scores[1].reason
    assert "not finite" in scores[2].reason


def test_a_batch_without_failures_is_scored_once():
    calls = []

    def counting(batch):
        calls.append(len(batch.completions))
        return [Score(1.0) for _ in batch.completions]

    options = {"on_error": "skip"}
    Reward("mine", 1.0, "length", LengthParams(target=1), counting, **options).score(BATCH)
    assert calls == [4]


def test_scores_are_clipped_and_reasons_kept():
    scores = reward(on_error="skip", clip=(-1.0, 2.0)).score(BATCH)
    assert [score.value for score in scores] == [1.0, None, None, 2.0]
    assert scores[3].reason == "huge"


def test_a_recipe_gives_both():
    config = RewardConfig(kind="length", target=1, on_error="zero", clip=[-1, 0])
    assert (config.on_error, config.clip, config.params) == ("zero", (-1.0, 0.0), {"target": 1})
    with pytest.raises(ValidationError, match="lowest, highest"):
        RewardConfig(kind="length", clip=[1, 1])
