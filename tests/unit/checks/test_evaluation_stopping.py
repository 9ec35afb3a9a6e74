"""Rules of `training.stop_when` that can never stop the recipe they stand in."""

import pytest

from grpo_cli.checks.evaluation import check_early_stopping
from grpo_cli.errors import RecipeError
from grpo_cli.recipe.loading import load_recipe, load_tree
from tests.contexts import make_context
from tests.recipe_texts import GOOD, write_recipe


def check(tmp_path, rules, more=""):
    text = GOOD + f"  stop_when: {rules}\n" + more
    loaded = load_tree(write_recipe(tmp_path, text))
    return [loaded.place(problem) for problem in check_early_stopping(make_context(loaded))]


def test_a_rule_without_its_metric_is_warned_of_where_it_stands(tmp_path):
    (problem,) = check(tmp_path, "[nan_loss, kl_runaway]")
    assert problem.level == "warning"
    assert problem.path == "training.stop_when.1"
    assert problem.location.line == GOOD.count("\n") + 1
    assert str(problem).endswith(
        "`kl_runaway` can never stop this run: no KL is computed with `training.beta: 0`. "
        "Fix: remove `kl_runaway`, or change that"
    )
    assert check(tmp_path, "[nan_loss, kl_runaway]", "  beta: 0.04\n") == []


def test_held_out_prompts_must_be_looked_at_while_it_trains(tmp_path):
    (problem,) = check(tmp_path, "held_out_gap")
    assert "`eval_strategy` is `no`" in problem.seen
    assert check(tmp_path, "held_out_gap", "  eval_strategy: steps\n") == []


def test_an_unknown_rule_is_told_with_the_nearest_one(tmp_path):
    path = write_recipe(tmp_path, GOOD + "  stop_when: [nan_los, truncation]\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    assert (problem.path, problem.fix) == ("training.stop_when.0", "write `nan_loss`")
    assert problem.location.line == GOOD.count("\n") + 1


@pytest.mark.parametrize(
    ("name", "message", "fix"),
    [
        ("slow_reward", "`slow_reward` costs time and spoils nothing", "remove `slow_reward`"),
        ("held_out_loss", "`held_out_loss` is checked after training", "remove `held_out_loss`"),
        (
            "no such",
            "is not a rule that stops a run",
            "choose from those that `grpo diagnose --rules` lists",
        ),
    ],
)
def test_a_rule_that_stops_nothing_is_refused_in_one_line(tmp_path, name, message, fix):
    path = write_recipe(tmp_path, GOOD + f"  stop_when: ['{name}']\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    assert message in problem.seen
    assert (problem.fix, problem.path) == (fix, "training.stop_when.0")
    assert len(str(problem)) < 300


def test_one_rule_may_stand_without_a_list(tmp_path):
    path = write_recipe(tmp_path, GOOD + "  stop_when: truncation\n")
    assert load_recipe(path).training.stop_when == ("truncation",)
