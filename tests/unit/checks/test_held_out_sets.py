"""Held-out sets that a recipe cannot be trained with; `recipes/invalid/during.yaml` has the mistakes in them."""

import pytest

from grpo_cli.checks.evaluation import check_during, check_metrics
from grpo_cli.recipe.recipe import Recipe
from tests.run_folders import PLAIN

DURING = {"evaluation": {"during": [{"every": 5}, {"name": "few", "every": 50, "limit": 9}]}}
ROWS = {**PLAIN["dataset"], "eval_rows": [{"q": "2"}]}


def check(**changes):
    recipe = Recipe.model_validate({**PLAIN, "dataset": ROWS, **DURING, **changes})
    return list(check_during(recipe, 40))


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


def test_a_task_is_asked_in_its_own_way_and_needs_no_held_out_rows(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    task = {"every": 5, "task": "none.yaml", "source": "sums", "temperature": 1.0}
    problems = check(dataset=PLAIN["dataset"], evaluation={"during": [task]})
    assert [(each.path.removeprefix("evaluation.during.0."), each.seen) for each in problems] == [
        ("source", "is for held-out rows, and a task of lm-eval asks in its own way"),
        ("temperature", "is for held-out rows, and a task of lm-eval asks in its own way"),
        ("task", "lm-eval is not installed"),
        ("task", "there is no file none.yaml"),
    ]
    assert problems[2].is_missing_package


@pytest.mark.parametrize(
    ("metric", "fix"),
    [
        (None, "set it to eval_gsm8k/acc, or to another metric of the task"),
        ("reward", "set it to eval_gsm8k/acc, or to another metric of the task"),
        ("eval_gsm8k/exact_match,strict-match", None),
    ],
)
def test_a_task_decides_on_the_best_checkpoint_by_a_metric_that_is_named(metric, fix):
    training = {"load_best_model_at_end": True, "metric_for_best_model": metric}
    recipe = Recipe.model_validate(
        {
            **PLAIN,
            "training": {name: value for name, value in training.items() if value},
            "evaluation": {"during": [{"every": 5, "task": "gsm8k"}]},
        }
    )
    assert [each.fix for each in check_metrics(recipe)] == ([fix] if fix else [])
    assert recipe.is_best_of_held_out_set is (fix is None)


def test_a_set_is_called_by_its_task_file_and_a_recipe_is_none(tmp_path):
    task, recipe = tmp_path / "mc.yaml", tmp_path / "recipe.yaml"
    task.write_text("task: digits  # one to nine\ndoc_to_text: !function own.read\n")
    recipe.write_text("name: a\ndataset: {task: digits}\n")
    during = [{"every": 5, "task": str(path)} for path in (task, recipe)]
    problems = check(evaluation={"during": during})
    assert [(each.path, each.seen) for each in problems if "file" in each.seen] == [
        (
            "evaluation.during.1.task",
            f"{recipe} is no task file of lm-eval: it has neither `task` nor `group`",
        )
    ]
    training = {"metric_for_best_model": "digits/acc", "early_stopping": {"metric": ""}}
    whole = Recipe.model_validate(
        {**PLAIN, "training": training, "evaluation": {"during": during[:1]}}
    )
    assert [(each.path.rpartition(".")[2], each.fix) for each in check_metrics(whole)] == [
        ("metric", "name a metric, or remove it"),
        ("metric_for_best_model", "set it to eval_mc/acc"),
    ]
