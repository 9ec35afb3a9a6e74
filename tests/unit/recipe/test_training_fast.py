"""`training.fast`: what it takes, and when a part would not be exact."""

import pytest
import yaml
from transformers.training_args import OptimizerNames

from grpo_cli.errors import RecipeError
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.recipe import describe_fast
from grpo_cli.recipe.training import FastConfig, find_left_off, leave_off
from tests.recipe_texts import GOOD, write_recipe

OFF = FastConfig(no_signal=False, shared_prompts=False, sampling=False)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("true", FastConfig()),
        ("false", OFF),
        ("{no_signal: false}", FastConfig(no_signal=False)),
        ("{max_tokens_per_micro_batch: 4096}", FastConfig(max_tokens_per_micro_batch=4096)),
        ("{cuda_graphs: true}", FastConfig(cuda_graphs=True)),
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
        ({"torch_compile_backend": "inductor"}, {"shared_prompts"}),
    ],
)
def test_parts_that_would_not_be_exact(settings, parts):
    assert set(find_left_off(FastConfig(), settings)) == parts
    assert find_left_off(OFF, settings) == {}


def test_a_budget_holds_where_rows_may_change_places():
    budget = OFF.model_copy(update={"max_tokens_per_micro_batch": 4096})
    assert find_left_off(budget, {"beta": 0.04, "torch_compile": True}) == {}
    found = find_left_off(budget, {"entropy_coef": 0.01})
    assert set(found) == {"max_tokens_per_micro_batch"}
    assert leave_off(budget, found) == OFF


ON = "no_signal, shared_prompts, sampling"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("", ON),
        ("  fast: false\n", f"off: {ON} (switched off)"),
        (
            "  fast: {sampling: false, max_tokens_per_micro_batch: 512}\n",
            "no_signal, shared_prompts, max_tokens_per_micro_batch 512; off: sampling (switched off)",
        ),
        ("  fast: {sampling: false}\n", "no_signal, shared_prompts; off: sampling (switched off)"),
        (
            "  beta: 0.04\n",
            "shared_prompts, sampling; off: no_signal (every completion has a KL term, of weight 0.04)",
        ),
        (
            "  top_entropy_quantile: 0.2\n  fast: {max_tokens_per_micro_batch: 512}\n",
            "sampling; off: no_signal, shared_prompts, max_tokens_per_micro_batch (top_entropy_quantile "
            "chooses among all tokens of a micro-batch)",
        ),
        (
            "  beta: 0.04\n  fast: {no_signal: false}\n",
            "shared_prompts, sampling; off: no_signal (switched off)",
        ),
        (
            "model: {attn_implementation: flex_attention}\n",
            "no_signal, sampling; off: shared_prompts (attn_implementation flex_attention takes no such rows)",
        ),
        (
            "model: {lora: {lora_dropout: 0.1}}\n",
            "no_signal, sampling; off: shared_prompts (lora_dropout is 0.1, drawn again for each copy of a "
            "prompt)",
        ),
        ("launch: {strategy: zero2}\n", ON),
        (
            "launch: {strategy: zero3}\n",
            "no_signal, shared_prompts; off: sampling (with strategy zero3 each process holds a part of the "
            "weights)",
        ),
        (
            "generation: {generation_kwargs: {typical_p: 0.9}}\n",
            "no_signal, shared_prompts; off: sampling (only generate() knows typical_p (generation_kwargs))",
        ),
        ("  fast: {cuda_graphs: true}\n", f"{ON}, cuda_graphs"),
        (
            "  fast: {sampling: false, cuda_graphs: true}\n",
            "no_signal, shared_prompts; off: sampling (switched off); cuda_graphs (`sampling` is off)",
        ),
        (
            "  neftune_noise_alpha: 5\n  fast: {cuda_graphs: true}\n",
            "off: no_signal, shared_prompts (neftune_noise_alpha makes noise by the width of a micro-batch); "
            "sampling, cuda_graphs (neftune_noise_alpha makes other noise for every copy of a prompt)",
        ),
        (
            "generation: {backend: vllm}\n",
            "no_signal, shared_prompts",
        ),
    ],
)
def test_what_is_on_is_said_in_a_line(tmp_path, more, told):
    place, _, value = more.partition(": ")
    known = place in ("model", "generation", "launch")
    flags = _flags(place, yaml.safe_load(value)) if known else []
    path = write_recipe(tmp_path, GOOD + ("" if known else more))
    assert describe_fast(load_recipe(path, flags)) == told


@pytest.mark.parametrize(
    ("flags", "cpu", "why"),
    [
        ([], True, "there is no GPU"),
        (["launch.use_cpu=true"], False, "there is no GPU"),
        (["model.attn_implementation=eager"], False, "attention eager needs other masks"),
        (["model.lora={lora_dropout: 0.1}"], False, "dropout in an adapter ends when it is merged"),
        (["model.lora={}", "model.quantization=4bit"], False, "quantized weights"),
    ],
)
def test_graphs_that_the_recipe_or_the_machine_excludes_are_off(tmp_path, flags, cpu, why):
    recipe = load_recipe(write_recipe(tmp_path), [*flags, "training.fast={cuda_graphs: true}"])
    on, _, off = describe_fast(recipe, cpu=cpu).partition("; off: ")
    assert "cuda_graphs" not in on
    assert "cuda_graphs (" in off
    assert why in off


def _flags(place, values):
    found = []
    for name, value in values.items():
        inner = isinstance(value, dict)
        found += _flags(f"{place}.{name}", value) if inner else [f"{place}.{name}={value}"]
    return found
