"""Recipe → TRL → recipe and TRL → recipe → TRL keep every training value: tried on each field of GRPOConfig."""

import ast
import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.convert.conversion import translate
from grpo_cli.convert.key_report import find
from grpo_cli.convert.to_trl import FlatConfig, flatten_recipe
from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.generation import GenerationConfig, VllmConfig
from grpo_cli.recipe.recipe import LoggingConfig, Recipe
from grpo_cli.recipe.training import TrainingConfig
from tests.nightly import scale
from tests.unit.convert.readings import NAMES, read, reasons, targets

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
    """The recipe that a flat config becomes, by way of the YAML that would lie on a disk."""
    text = FlatConfig({"all": flat}).write("recipe.yaml")
    report = translate(text, Path("config.yaml"), "trl")
    return Recipe.model_validate(report.recipe), report


def plain(value):
    return list(value) if isinstance(value, tuple) else value


def section_value(recipe, name):
    section = recipe
    for step in grpo_fields.home_of(name).split("."):
        section = getattr(section, step)
    key = name.removeprefix("vllm_")
    if name == "vllm_server_base_url":
        return section.address
    return plain(section.extras[key] if key in section.extras else getattr(section, key))


@settings(max_examples=scale(2, 40), deadline=None)
@given(data=st.data())
def test_every_field_keeps_its_value_in_both_directions(data):
    for name in HOUSED:
        value = data.draw(value_for(name), label=name)
        if name == "vllm_server_base_url":
            value = "http://10.0.0.2:8000"
        keeps_value_through_trl(name, value)
        keeps_value_through_recipe(name, value)


def keeps_value_through_trl(name, value):
    tree = {**BASE, "generation": {"backend": "vllm", "vllm": {"mode": "server"}}}
    section = tree
    for step in grpo_fields.home_of(name).split("."):
        section = section.setdefault(step, {})
    section[name.removeprefix("vllm_")] = value
    recipe = Recipe.model_validate(tree)
    flat = flatten_recipe(recipe, Path.cwd()).flat
    assert section_value(reload(flat)[0], name) == section_value(recipe, name), name


def keeps_value_through_recipe(name, value):
    recipe, report = reload({**FLAT, name: value})
    assert name not in reasons(report), name
    again = flatten_recipe(recipe, Path.cwd()).flat
    # TRL reads a tracker alone and a list of it alike.
    expected = [value] if name == "report_to" and isinstance(value, str) else value
    assert again[name] == expected, name


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_no_section_takes_is_moved_or_dropped_with_the_reason(name):
    value = MOVED.get(name, "text")
    flat = {**FLAT, name: value}
    if name.startswith("use_transformers"):
        flat |= {"use_vllm": False, name: True}
        name = "use_transformers_continuous_batching"
        value = True
    recipe, report = reload(flat)
    if name in MOVED:
        assert flatten_recipe(recipe, Path.cwd()).flat[name] == value
    else:
        kept = {entry.key for entry in report.entries if entry.target is not None}
        assert name in kept or reasons(report)[name]


def test_the_moved_fields_are_those_that_the_schema_says():
    assert set(MOVED) <= set(REFUSED)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_config_was_converted_to_goes_to_trl_and_back_unchanged(name):
    """Every value of a section that is TRL's, for each of the written configs."""
    report = read(name)
    recipe = Recipe.model_validate(report.recipe)
    flat = {"reward_funcs": ["think_format_reward"], **flatten_recipe(recipe, Path.cwd()).flat}
    if recipe.dataset.shares:
        # TRL's command line has no mixture with ratios.
        flat["dataset_name"] = "org/rows"
    again = reload(flat)[0]
    for section in ("generation", "training"):
        before = {**getattr(recipe, section).trl_fields()}
        assert getattr(again, section).trl_fields() == before
    assert again.model == recipe.model.model_copy(update={"chat_template": None})
    assert again.seed == recipe.seed


def test_where_our_defaults_are_not_trls_the_value_is_written():
    flat = flatten_recipe(Recipe.model_validate(BASE), Path.cwd()).flat
    for home, section in SECTIONS.items():
        for key, field in section.model_fields.items():
            name = f"vllm_{key}" if home == "generation.vllm" else key
            if name not in FIELDS or name == "log_completions":
                continue
            try:
                theirs = ast.literal_eval(FIELDS[name].default)
            except ValueError:
                continue
            ours = plain(field.get_default(call_default_factory=True))
            same = ours == theirs or (ours == [] and theirs == "none")
            assert same or flat[name] == ours, name


def test_the_written_config_reads_the_same_with_pyyaml():
    flat = {**FLAT, "eval_strategy": "no", "learning_rate": 1e-6, "run_name": "1e-6", "a": "on"}
    assert yaml.safe_load(FlatConfig({"all": flat}).write("r")) == flat


def test_loras_single_target_survives_trls_reading_of_a_list_of_one():
    lora = {"target_modules": ["q_proj"], "r": 4}
    recipe = Recipe.model_validate({**BASE, "model": {"path": "m", "lora": lora}})
    flat = flatten_recipe(recipe, Path.cwd()).flat
    assert flat["lora_target_modules"] == r"(.*\.)?q_proj"
    assert find(reload(flat)[1].recipe, "model.lora.target_modules") == r"(.*\.)?q_proj"


@pytest.mark.parametrize("name", ["use_liger_kernel", "use_liger_loss"])
def test_what_trl_calls_deprecated_becomes_what_it_names_instead(name):
    recipe, report = reload({**FLAT, name: True})
    assert recipe.model.init_kwargs == {"use_kernels": True}
    assert "deprecated in TRL" in report.comments["model.init_kwargs.use_kernels"]
    assert flatten_recipe(recipe, Path.cwd()).flat["model_init_kwargs"] == {"use_kernels": True}
    recipe, report = reload({**FLAT, name: False})
    assert recipe.model.init_kwargs == {}
    assert targets(report)[name] == "model.init_kwargs.use_kernels"
