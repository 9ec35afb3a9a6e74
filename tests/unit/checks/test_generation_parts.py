"""`generation.sampling_parts` where it does something, and where it does not."""

import pytest

from grpo_cli.batch.plan import batch_inputs, plan_batch
from grpo_cli.checks.generation import check_parts
from grpo_cli.recipe.loading import load_tree
from tests.contexts import make_context, run_check
from tests.recipe_texts import GOOD, write_recipe

OWN = "async def asked(completions, **kwargs): ...\n\n\ndef counted(completions, **kwargs): ...\n"


@pytest.mark.parametrize(
    ("reward", "parts", "told"),
    [
        ("kind: math, answer: answer", 2, 1),
        ("kind: math, answer: answer", 1, 0),
        ("kind: math, answer: answer, timeout_s: 2", 2, 1),
        ("kind: judge, model: m, rubric: r", 2, 0),
        ("kind: code, tests: answer", 2, 0),
        ("kind: python, path: own.py:asked", 2, 0),
        ("kind: python, path: own.py:counted", 2, 1),
        ("kind: python, path: own.py:counted, timeout_s: 2", 2, 0),
    ],
)
def test_parts_are_noted_where_no_reward_waits(tmp_path, monkeypatch, reward, parts, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    text = GOOD.replace("kind: math, answer: answer", reward)
    text = text.replace("num_generations: 4", f"num_generations: 2\n  sampling_parts: {parts}")
    loaded = load_tree(write_recipe(tmp_path, text))
    plan = plan_batch(batch_inputs(loaded.recipe, 1, 100, None))
    found = run_check(check_parts, make_context(loaded, plan=plan))
    assert [(each.path, each.level) for each in found] == [
        ("generation.sampling_parts", "note")
    ] * told


@pytest.mark.parametrize(
    ("parts", "processes", "told"),
    [(2, 1, None), (4, 1, "set it to 2"), (2, 2, "set it to 1"), (2, 4, "set it to 1")],
)
def test_more_parts_than_groups_are_noted(tmp_path, monkeypatch, parts, processes, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    text = GOOD.replace("kind: math, answer: answer", "kind: python, path: own.py:asked")
    size = 4 // processes
    text = text.replace("batch_size: 4", f"batch_size: {size}")
    text = text.replace("num_generations: 4", f"num_generations: 2\n  sampling_parts: {parts}")
    loaded = load_tree(write_recipe(tmp_path, text))
    plan = plan_batch(batch_inputs(loaded.recipe, processes, 100, None))
    found = [each.fix for each in check_parts(make_context(loaded, plan=plan))]
    assert [fix.partition(",")[0] for fix in found] == ([told] if told else [])
