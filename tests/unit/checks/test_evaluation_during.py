"""Held-out sets that a recipe cannot be trained with; `recipes/invalid/during.yaml` has the mistakes in them."""

import pytest

from grpo_cli.checks.compatibility import check_compatibility
from grpo_cli.checks.evaluation import check_during
from grpo_cli.recipe.recipe import Recipe
from tests.contexts import make_context, plan_of
from tests.run_folders import PLAIN

DURING = {"evaluation": {"during": [{"every": 5}, {"name": "few", "every": 50, "limit": 9}]}}
ROWS = {**PLAIN["dataset"], "eval_rows": [{"q": "2"}]}


def check(**changes):
    recipe = Recipe.model_validate({**PLAIN, "dataset": ROWS, **DURING, **changes})
    context = make_context(recipe, plan=plan_of(40))
    issues = [*check_during(context), *check_compatibility(context)]
    return [each for each in issues if each.path.startswith("evaluation")]


def test_a_set_that_is_never_evaluated_is_warned_of():
    (problem,) = check()
    assert (problem.path, problem.level) == ("evaluation.during.1.every", "warning")
    assert problem.seen == "50 is more than the 40 steps of this training"


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"training": {"mode": "async"}}, "`training.mode: async`"),
        (
            {"training": {"lr_scheduler_type": "reduce_lr_on_plateau"}},
            "`training.lr_scheduler_type",
        ),
        ({"launch": {"strategy": "fsdp2"}}, "`launch.strategy: fsdp2`, which shards the weights"),
        (
            {
                "dataset": {**ROWS, "kind": "scored", "response": "a", "reward": "r"},
                "rewards": [],
            },
            "`dataset.kind: scored`",
        ),
    ],
)
def test_they_are_refused_once_where_nothing_measures_before_and_after(changes, obstacle):
    (problem,) = check(**changes)
    assert (problem.path, problem.level) == ("evaluation.during", "error")
    assert f"does not work with {obstacle}" in problem.seen


def test_the_first_set_decides_on_the_best_checkpoint_unless_another_metric_is_named():
    def decides(**training):
        recipe = Recipe.model_validate({**PLAIN, "dataset": ROWS, **DURING, "training": training})
        return recipe.best_metric, recipe.is_best_of_held_out_set

    assert decides() == ("eval_held_out/reward", True)
    assert decides(metric_for_best_model="few/accuracy/math") == ("eval_few/accuracy/math", True)
    assert decides(early_stopping={"metric": "eval_few/reward"}) == ("eval_few/reward", True)
    assert decides(eval_strategy="steps") == ("eval_reward", False)
