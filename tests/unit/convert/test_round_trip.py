"""Each field of `GRPOConfig` keeps its value from a TRL config to the recipe."""

import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.convert.conversion import translate
from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.generation import GenerationConfig, VllmConfig
from grpo_cli.recipe.recipe import LoggingConfig, Recipe
from grpo_cli.recipe.training import TrainingConfig
from grpo_cli.recipe.yaml_tree import write_plain
from tests.nightly import scale
from tests.unit.convert.readings import reasons, targets

FIELDS = grpo_fields.read_grpo_fields()
HOUSED = [name for name in FIELDS if grpo_fields.home_of(name) and name != "use_liger_kernel"]
"""`use_liger_kernel` is translated to what TRL names in its place; see below."""
REFUSED = [name for name in FIELDS if not grpo_fields.home_of(name)]
SECTIONS = {
    "generation": GenerationConfig,
    "generation.vllm": VllmConfig,
    "training": TrainingConfig,
    "logging": LoggingConfig,
}
BASE = {
    "name": "round",
    "model": {"path": "org/model", "dtype": "bfloat16"},
    "dataset": {"kind": "hub", "path": "org/rows"},
    "rewards": [{"kind": "think_format"}],
}
FLAT = {
    "model_name_or_path": "org/model",
    "dtype": "bfloat16",
    "dataset_name": "org/rows",
    "reward_funcs": ["think_format_reward"],
    "output_dir": "round",
    "use_vllm": True,
    "vllm_mode": "server",
}
MOVED = {
    "seed": 7,
    "trust_remote_code": True,
    "use_cpu": True,
    "reward_weights": [0.25],
    "model_init_kwargs": {"rope_theta": 5},
    "use_vllm": True,
    "use_transformers_continuous_batching": True,
}
"""Fields that a recipe holds outside the sections of `GRPOConfig`."""


def values_of(kind):
    """Values that a type of the schema takes, those of a person's recipe."""
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (list, tuple):
        inner = next((each for each in arguments if each is not ...), str)
        return st.lists(values_of(inner), min_size=1, max_size=3)
    if origin is dict or kind is dict:
        return st.dictionaries(st.sampled_from(["alpha", "beta"]), st.integers(0, 9), min_size=1)
    if arguments:
        kinds = [each for each in arguments if each is not type(None)]
        return st.one_of(*(values_of(each) for each in kinds))
    simple = {
        bool: st.booleans(),
        int: st.integers(2, 1000),
        float: st.sampled_from([0.125, 0.5, 0.75, 1e-6, 3e-05]),
        str: st.sampled_from(["no", "1e-6", "a: b", "yes", "plain", "it's # one"]),
    }
    return simple.get(kind, st.sampled_from(["plain", "other"]))


def value_for(name):
    section = SECTIONS[grpo_fields.home_of(name)]
    own = section.model_fields.get(name.removeprefix("vllm_"))
    if own is None:
        return values_of(grpo_fields.python_type(FIELDS[name]))
    if name == "max_steps":
        return st.integers(1, 1000)
    if name == "eval_strategy":
        return st.sampled_from(["no", "epoch"])
    return values_of(own.annotation)


def reload(flat):
    """The recipe that a flat config becomes."""
    report = translate(write_plain(flat), Path("config.yaml"), "trl")
    return Recipe.model_validate(report.recipe), report


def section_value(recipe, name):
    section = recipe
    for step in grpo_fields.home_of(name).split("."):
        section = getattr(section, step)
    key = name.removeprefix("vllm_")
    if name == "vllm_server_base_url":
        return section.address
    value = section.extras[key] if key in section.extras else getattr(section, key)
    return list(value) if isinstance(value, tuple) else value


@settings(max_examples=scale(2, 40), deadline=None)
@given(data=st.data())
def test_every_field_keeps_its_value(data):
    for name in HOUSED:
        value = data.draw(value_for(name), label=name)
        if name == "vllm_server_base_url":
            value = "http://10.0.0.2:8000"
        tree = {**BASE, "generation": {"backend": "vllm", "vllm": {"mode": "server"}}}
        section = tree
        for step in grpo_fields.home_of(name).split("."):
            section = section.setdefault(step, {})
        section[name.removeprefix("vllm_")] = value
        recipe, report = reload({**FLAT, name: value})
        assert name not in reasons(report), name
        expected = section_value(Recipe.model_validate(tree), name)
        assert section_value(recipe, name) == expected, name


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_no_section_takes_is_moved_or_dropped_with_the_reason(name):
    flat = {**FLAT, name: MOVED.get(name, "text")}
    if name.startswith("use_transformers"):
        flat |= {"use_vllm": False, name: True}
    _, report = reload(flat)
    moved = {entry.key for entry in report.entries if entry.target is not None}
    assert name in moved if name in MOVED else name in moved or reasons(report)[name]


@pytest.mark.parametrize("name", ["use_liger_kernel", "use_liger_loss"])
def test_what_trl_calls_deprecated_becomes_what_it_names_instead(name):
    recipe, report = reload({**FLAT, name: True})
    assert recipe.model.init_kwargs == {"use_kernels": True}
    assert "deprecated in TRL" in report.comments["model.init_kwargs.use_kernels"]
    recipe, report = reload({**FLAT, name: False})
    assert recipe.model.init_kwargs == {}
    assert targets(report)[name] == "model.init_kwargs.use_kernels"
