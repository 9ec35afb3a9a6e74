"""Recipes as YAML again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.recipe.expect import ExpectConfig
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.yaml_tree import write_expect, write_yaml

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


def test_an_expect_block_can_stand_at_the_end_of_a_recipe(tmp_path):
    expect = ExpectConfig.model_validate(
        {
            "metrics": [
                {"metric": "reward", "step": 40, "band": [0.55, 0.85], "window": 4},
                {"metric": "accuracy/math", "step": 40, "band": [1e-7, 1]},
            ],
            "measured": {
                "runs": ["sums/1", "sums/2"],
                "seeds": [42, 1],
                "hardware": "2 CPU cores (x86_64), 8 GiB",
                "versions": {"trl": "1.16", "torch": ["2.12", "2.13.0+cpu"]},
                "date": "2026-11-21",
                "settings": {"model": "12345678", "training": "1234e567"},
            },
        }
    )
    text = write_expect(expect)
    assert "    - {metric: reward, step: 40, band: [0.55, 0.85], window: 4}\n" in text
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{write_yaml(made())}\n{text}", encoding="utf-8")
    assert load_recipe(path) == made(expect=expect)
