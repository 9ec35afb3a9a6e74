"""Settings that mean nothing without sampling, and groups that do not fit their places."""

import pytest

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.machine import Hardware
from tests.recipe_texts import write_recipe

TEXT = """\
name: good
model:
  path: tiny
dataset:
  kind: scored
  rows: {rows}
generation:
  backend: {backend}
  num_generations: {size}
training:
  per_device_train_batch_size: {size}
  beta: 0.04
"""


def check(tmp_path, sizes=(4, 4), size=4, rewards=(0, 1), more="", backend="transformers"):
    (tmp_path / "tiny").mkdir(exist_ok=True)
    rows = [
        {"prompt": f"p{number}", "response": str(place), "reward": rewards[place % 2]}
        for number, count in enumerate(sizes)
        for place in range(count)
    ]
    text = TEXT.format(rows=rows, size=size, backend=backend).replace(
        "beta: 0.04", f"beta: 0.04\n{more}".rstrip()
    )
    checked = check_recipe(write_recipe(tmp_path, text), hardware=Hardware(gpus=0, cpus=2))
    return [problem for problem in checked.problems if not problem.path.startswith("model")]


def test_groups_that_fit_need_no_word(tmp_path):
    assert check(tmp_path) == []


@pytest.mark.parametrize(
    ("sizes", "rewards", "path", "level", "said"),
    [
        ((4, 6), (0, 1), "generation.num_generations", "note", "up to 6 responses"),
        ((4, 1), (0, 1), "dataset", "note", "1 prompts have a single response"),
        ((4, 4), (1, 1), "dataset.reward", "error", "one and the same reward"),
    ],
)
def test_groups_are_looked_at(tmp_path, sizes, rewards, path, level, said):
    (problem,) = check(tmp_path, sizes, rewards=rewards)
    assert (problem.path, problem.level) == (path, level)
    assert said in problem.seen


def test_empty_responses_are_counted(tmp_path):
    text = TEXT.format(rows="[{prompt: p, response: ' ', reward: 0}, {prompt: p, response: a, reward: 1}]",
                       size=2, backend="transformers")  # fmt: skip
    checked = check_recipe(write_recipe(tmp_path, text), hardware=Hardware(gpus=0, cpus=2))
    seen = {each.path: each.seen for each in checked.problems if each.level == "warning"}
    assert seen["dataset.response"] == "1 of 2 responses are empty"


def test_mostly_empty_places_are_warned_of(tmp_path):
    (problem,) = check(tmp_path, (2, 2, 3), size=8)
    assert problem.level == "warning"
    assert "71% of the places" in problem.seen
    assert "num_generations: 3" in problem.fix


def test_what_only_sampling_has_is_refused(tmp_path):
    more = "  early_stopping: {metric: eval_reward}\n  eval_strategy: steps"
    problem = check(tmp_path, more=more)[0]
    assert problem.path == "training.early_stopping.metric"
    assert "eval_ranking" in problem.fix
    more = "  metric_for_best_model: eval_rankin\n  eval_strategy: steps"
    assert "training.metric_for_best_model" in [each.path for each in check(tmp_path, more=more)]
    more = "  eval_strategy: steps\nlaunch: {strategy: zero3, use_cpu: true}"
    assert "training.eval_strategy" in [each.path for each in check(tmp_path, more=more)]
    (problem,) = check(tmp_path, backend="transformers_continuous_batching")
    assert problem.path == "generation.backend"
    (problem,) = check(tmp_path, backend="transformers\n  dynamic_sampling: {max_resample: 1}")
    assert problem.path == "generation.dynamic_sampling"


def test_without_a_kl_term_there_is_a_warning(tmp_path):
    (tmp_path / "tiny").mkdir()
    rows = [{"prompt": "p", "response": text, "reward": len(text)} for text in ("a", "bb")]
    text = TEXT.format(rows=rows, size=2, backend="transformers").replace("  beta: 0.04\n", "")
    checked = check_recipe(write_recipe(tmp_path, text), hardware=Hardware(gpus=0, cpus=2))
    assert "training.beta" in [p.path for p in checked.problems if p.level == "warning"]
