"""`training.fast`: what it takes, and when a part would not be exact."""

import pytest
import yaml
from transformers.training_args import OptimizerNames

from grpo_cli.errors import RecipeError
from grpo_cli.preflight.fast import describe_fast
from grpo_cli.recipe.fast import FastConfig, find_left_off
from grpo_cli.recipe.loading import load_recipe
from tests.recipe_texts import GOOD, write_recipe

OFF = FastConfig(no_signal=False, shared_prompts=False, sampling=False)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("true", FastConfig()),
        ("false", OFF),
        ("{no_signal: false}", FastConfig(no_signal=False)),
        ("{max_tokens_per_micro_batch: 4096}", FastConfig(max_tokens_per_micro_batch=4096)),
    ],
)
def test_a_switch_or_a_section(tmp_path, written, meant):
    path = write_recipe(tmp_path, GOOD + f"  fast: {written}\n")
    assert load_recipe(path).training.fast == meant


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("1", "training.fast"),
        ("{no_signals: false}", "training.fast.no_signals"),
        ("{max_tokens_per_micro_batch: 0}", "training.fast.max_tokens_per_micro_batch"),
    ],
)
def test_anything_else_is_told_with_its_place(tmp_path, written, path):
    with pytest.raises(RecipeError) as caught:
        load_recipe(write_recipe(tmp_path, GOOD + f"  fast: {written}\n"))
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, set()),
        ({"loss_type": "bnpo"}, set()),
        ({"beta": 0.0, "entropy_coef": 0.0, "top_entropy_quantile": 1.0}, set()),
        ({"beta": 0.04}, {"no_signal"}),
        ({"beta": 0.04, "loss_type": "bnpo"}, {"no_signal", "shared_prompts"}),
        ({"entropy_coef": 0.01}, {"no_signal", "shared_prompts"}),
        ({"use_adaptive_entropy": True}, {"no_signal", "shared_prompts"}),
        ({"top_entropy_quantile": 0.2}, {"no_signal", "shared_prompts"}),
        ({"optim": "adalomo"}, {"no_signal", "shared_prompts"}),
        ({"optim": "galore_adamw_layerwise"}, {"no_signal", "shared_prompts"}),
        ({"neftune_noise_alpha": 5}, {"no_signal", "shared_prompts", "sampling"}),
        ({"optim": OptimizerNames.LOMO}, {"no_signal", "shared_prompts"}),
        ({"torch_compile": True}, {"shared_prompts"}),
    ],
)
def test_parts_that_would_not_be_exact(settings, parts):
    assert set(find_left_off(FastConfig(), settings)) == parts
    assert find_left_off(OFF, settings) == {}


ON = "rows without signal left out, prompts computed once, sampling from shared prompts"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", ON),
        ("  fast: false\n", "off, as TRL does"),
        ("  fast: {sampling: false}\n", ON.removesuffix(", sampling from shared prompts")),
        ("  beta: 0.04\n", "not rows without signal left out: beta is 0.04"),
        ("  beta: 0.04\n  fast: {no_signal: false}\n", ON.partition(", ")[2]),
        (
            "model: {attn_implementation: flex_attention}\n",
            "attn_implementation flex_attention takes",
        ),
        ("model: {lora: {lora_dropout: 0.1}}\n", "not prompts computed once: lora_dropout is 0.1"),
        ("launch: {strategy: zero2}\n", "not sampling from shared prompts: with strategy zero2"),
        ("generation: {backend: vllm}\n", ON.removesuffix(", sampling from shared prompts")),
    ],
)
def test_what_is_on_is_said_in_a_line(tmp_path, more, words):
    place, _, value = more.partition(": ")
    known = place in ("model", "generation", "launch")
    flags = _flags(place, yaml.safe_load(value)) if known else []
    path = write_recipe(tmp_path, GOOD + ("" if known else more))
    told = describe_fast(load_recipe(path, flags))
    assert words in told
    assert "not " in told or told == words


def _flags(place, values):
    found = []
    for name, value in values.items():
        inner = isinstance(value, dict)
        found += _flags(f"{place}.{name}", value) if inner else [f"{place}.{name}={value}"]
    return found
