import dataclasses

import pytest
from pydantic import TypeAdapter

from grpo_cli.errors import RecipeError
from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.base import read_fields
from grpo_cli.recipe.grpo_fields import LORA_REFUSED
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.model import LoraConfig

RECIPE = """
name: tiny
model: {path: some/model, lora: LORA}
dataset: {kind: inline, rows: [{prompt: a}]}
rewards: [{kind: length, target: 4}]
"""


def load(tmp_path, lora):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("LORA", lora))
    return load_recipe(path).model.lora


def test_every_field_of_the_installed_peft_is_ours_passed_on_or_refused():
    upstream = {
        field.name: field for field in dataclasses.fields(pytest.importorskip("peft").LoraConfig)
    }
    assert read_fields("LoraConfig").keys() == upstream.keys()
    ours, passed = LoraConfig.model_fields.keys(), grpo_fields.fields_in("model.lora")
    assert upstream.keys() == {*passed, *LORA_REFUSED}
    assert ours <= passed.keys()
    for name, field in passed.items():
        default = upstream[name].default
        if default not in (dataclasses.MISSING, None):
            TypeAdapter(grpo_fields.python_type(field)).validate_python(default)


def test_fields_are_read_by_their_own_names(tmp_path):
    lora = load(
        tmp_path,
        "{r: 4, rank_pattern: {q_proj: 8}, alpha_pattern: {v_proj: 1.5}, layers_to_transform: [0, 2], "
        "target_modules: [q_proj], layers_pattern: layers, bias: all, init_lora_weights: gaussian}",
    )
    assert lora.max_rank == 8
    assert lora.extras["layers_to_transform"] == [0, 2]
    assert lora.init_lora_weights == "gaussian"
    assert load(tmp_path, "{init_lora_weights: false}").init_lora_weights is False


@pytest.mark.parametrize(
    ("lora", "path", "seen", "fix"),
    [
        ("{rank_patern: {a: 1}}", "rank_patern", "unknown key", "write `rank_pattern`"),
        ("{rank_pattern: {q_proj: 0}}", "rank_pattern.q_proj", "at least 1", "at least 1"),
        ("{bias: some}", "bias", "one of none, all, lora_only", "none"),
        ("{layers_to_transform: first}", "layers_to_transform", "whole number", ""),
        ("{init_lora_weights: pissa_niter_4}", "init_lora_weights", "rewrites the base", "mica"),
        (
            "{init_lora_weights: gausian}",
            "init_lora_weights",
            "one of true, false, gaussian, ",
            "`gaussian`",
        ),
        ("{kasa_config: {}}", "kasa_config", "does not belong", "rewrites the base"),
        ("{task_type: CAUSAL_LM}", "task_type", "does not belong", "always a causal"),
        ("{beta: 0.1}", "beta", "does not belong", "`training.beta`"),
    ],
)
def test_what_peft_would_take_or_refuse_late(tmp_path, lora, path, seen, fix):
    with pytest.raises(RecipeError) as refused:
        load(tmp_path, lora)
    (problem,) = refused.value.problems
    assert problem.path == f"model.lora.{path}"
    assert seen in problem.seen
    assert fix in problem.fix
