"""Errors keep their fields, whatever arguments their classes take."""

import pytest

from grpo_cli.errors import RecipeError, RewardError
from grpo_cli.issues import Issue
from grpo_cli.launch.supervisor import RefusedError
from grpo_cli.rewards.kinds.judge_endpoint import _RefusalError


@pytest.mark.parametrize(
    "error",
    [
        RewardError("it failed", "mend it", "rewards.0", ["line 1"]),
        RecipeError([Issue("is wrong", "mend it", "seed")]),
        RefusedError(3, (Issue("is wrong", "mend it", "seed"),)),
        _RefusalError("no reply", "start it", all_requests=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_names_its_subject_keeps_its_class_and_fields(error):
    before = str(error)
    about = error.about("reward 'a'")
    assert str(about) == f"reward 'a': {before}"
    assert (type(about), about.args) == (type(error), error.args)
    assert vars(about) == {**vars(error), "seen": about.seen}
    assert str(error) == before
