"""`when`: which rows a reward applies to."""

import pytest

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Batch, Score
from grpo_cli.rewards.kinds.length import LengthParams
from grpo_cli.rewards.scoring import DOES_NOT_APPLY, Condition, Reward

ROWS = {"task": ["math", "code", "math", None], "level": [1, 2, 3, 4], "row_id": [7, 8, 9, 10]}
BATCH = Batch(["p"] * 4, ["a", "b", "c", "d"], columns=ROWS)


def reward(when, scorer, **options):
    params = LengthParams(target=1)
    return Reward("mine", 1.0, "length", params, scorer, condition=Condition(when), **options)


def test_only_the_rows_it_holds_on_are_scored():
    seen = []

    def scorer(batch):
        seen.append((batch.texts, batch.columns["level"]))
        return [Score(float(level)) for level in batch.columns["level"]]

    scores = reward('task == "math"', scorer).score(BATCH)
    assert scores == [Score(1.0), DOES_NOT_APPLY, Score(3.0), DOES_NOT_APPLY]
    assert seen == [(["a", "c"], [1, 3])]


def test_where_it_holds_on_no_row_nothing_is_called():
    assert reward("level > 9", lambda batch: 1 / 0).score(BATCH) == [DOES_NOT_APPLY] * 4


def test_failures_name_the_row_of_the_whole_batch():
    def scorer(batch):
        return [ValueError("odd") if text == "c" else Score(1.0) for text in batch.texts]

    with pytest.raises(RewardError, match=r"failed on row 10: ValueError: odd"):
        reward('task == "math"', scorer).score(BATCH)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("level >= 3 and task", [False, False, True, False]),
        ("task is none", [False, False, False, True]),
        ("task in ['code', 'math'] and not level == 1", [False, True, True, False]),
        ("'at' in (task or '')", [True, False, True, False]),
        ("true", [True] * 4),
    ],
)
def test_expressions(text, holds):
    assert [Condition(text).holds(BATCH, row) for row in range(4)] == holds


@pytest.mark.parametrize("text", ["", "task ==", "task }} {{ level", "{{ task }}", "a b", "%}"])
def test_what_is_not_an_expression_is_refused(text):
    with pytest.raises(RewardError, match="`when` cannot be read"):
        Condition(text).columns()


def test_columns_are_those_it_reads():
    assert Condition("level > 2 and task == 'x' and range(2)").columns() == {"level", "task"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("levle > 2", "'levle' is undefined"),
        ("task > 2", "not supported"),
        ("level.__class__.__mro__", "unsafe"),
        ("range(10 ** 9) | list", "Range too big"),
    ],
)
def test_failures_say_where_and_what(text, reason):
    with pytest.raises(RewardError) as caught:
        reward(text, lambda batch: []).score(BATCH)
    assert reason in str(caught.value)
    assert "fails on row 8: " in str(caught.value)
    assert "reward 'mine'" in str(caught.value)


def test_named_arguments_are_not_taken_for_comparisons():
    assert Condition("task | default(default_value='x') == 'x'").columns() == {"task"}
    with pytest.raises(RewardError, match="is not one expression"):
        Condition("task | default(default_value='x') ==").columns()
