"""Recipes as YAML again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.writing import write_yaml

TRICKY = ["no", "1e-6", "~", "a: b", "# no comment", "two\nlines\n", "\ttab", " x ", "é \u2028 x"]


def made(**changes):
    plain = {
        "name": "r",
        "model": {"path": "org/model"},
        "dataset": {"kind": "inline", "rows": [{"q": "1"}], "prompt": {"user": "{{ q }}"}},
        "rewards": [{"kind": "length", "target": 3}],
    }
    return Recipe.model_validate({**plain, **changes})


def reads_back(recipe, folder):
    path = folder / "recipe.yaml"
    path.write_text(write_yaml(recipe), encoding="utf-8")
    return load_recipe(path) == recipe


@pytest.mark.parametrize("text", TRICKY)
def test_a_text_stays_a_text(text, tmp_path):
    assert reads_back(made(description=text), tmp_path)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_stays_itself(tmp_path_factory, text):
    rows = {"kind": "inline", "rows": [{"q": text}], "prompt": {"user": "{{ q }}"}}
    assert reads_back(made(dataset=rows), tmp_path_factory.mktemp("written"))


def test_only_what_differs_is_written_and_long_texts_are_blocks():
    text = write_yaml(made(training={"learning_rate": 1e-4, "beta": 0.04}, description="a\nb"))
    assert "description: |-\n  a\n  b\n" in text
    assert "training:\n  learning_rate: 0.0001\n  beta: 0.04\n" in text
    assert "generation" not in text
