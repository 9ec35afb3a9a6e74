import dataclasses

import pytest

from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.generation import GenerationConfig, VllmConfig
from grpo_cli.recipe.recipe import LoggingConfig
from grpo_cli.recipe.training import TrainingConfig
from grpo_cli.recipe.yaml_tree import read_text

OPEN = {
    "generation": GenerationConfig,
    "generation.vllm": VllmConfig,
    "training": TrainingConfig,
    "logging": LoggingConfig,
}
OURS = {
    "skip_special_tokens",
    *("backend", "dynamic_sampling", "vllm", "early_stopping", "stop_when"),
    *(
        "backend",
        "vllm",
        "early_stopping",
        "stop_when",
        "sampling_parts",
        "mode",
        "asynchronous",
        "fast",
    ),
    *("managed", "base_url", "enable_lora", "max_restarts", "server_args"),
}


@pytest.fixture(scope="module")
def upstream():
    trl = pytest.importorskip("trl")
    return {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}


def test_the_sources_give_exactly_the_fields_of_the_class(upstream):
    assert set(grpo_fields.read_grpo_fields()) == set(upstream)


def test_every_field_has_one_home_or_a_refusal():
    for name in grpo_fields.read_grpo_fields():
        home, refusal = grpo_fields.home_of(name), grpo_fields.refusal_of(name)
        assert (home is None) == (refusal is not None), name


def test_no_home_or_refusal_names_a_field_that_is_gone():
    known = set(grpo_fields.read_grpo_fields())
    assert known >= grpo_fields._GENERATION
    assert known >= grpo_fields._LOGGING
    assert set(grpo_fields._REFUSED) <= known
    assert set(grpo_fields._CHOICES) <= known
    assert not set(grpo_fields.MOVED) & known - {"dtype"}


def test_our_defaults_are_trls(upstream):
    different = {"logging_steps", "report_to", "log_completions"}
    for home, model in OPEN.items():
        for key, field in model.model_fields.items():
            name = f"vllm_{key}" if home == "generation.vllm" else key
            if key in OURS or name in different:
                continue
            assert grpo_fields.home_of(name) == home or name in upstream, name
            assert field.default == upstream[name].default, name


def test_upstream_names_every_choice_we_offer(upstream):
    trl = pytest.importorskip("trl")
    text = trl.GRPOConfig.__doc__ + "".join(
        str(field.metadata.get("help")) for field in upstream.values()
    )
    for name, choices in grpo_fields._CHOICES.items():
        for choice in choices:
            assert choice in text, (name, choice)


def test_every_upstream_default_fits_the_type_we_check(upstream):
    from pydantic import ConfigDict, TypeAdapter

    for name, field in grpo_fields.read_grpo_fields().items():
        default = upstream[name].default
        if default is dataclasses.MISSING or default is None:
            continue
        plain = getattr(default, "value", default)
        adapter = TypeAdapter(
            grpo_fields.python_type(field), config=ConfigDict(arbitrary_types_allowed=True)
        )
        adapter.validate_python(plain)


def test_enumerations_are_read_by_value():
    field = grpo_fields.read_grpo_fields()["lr_scheduler_type"]
    assert "cosine" in str(grpo_fields.python_type(field))


def test_a_mapping_may_be_written_as_json():
    lines = """chat_template_kwargs: '{"a": false}'\n  generation_kwargs: a=1\n"""
    tree = read_text(f"generation:\n  {lines}", "recipe.yaml")
    (issue,) = grpo_fields.check_trl_keys(tree)
    assert tree.plain()["generation"]["chat_template_kwargs"] == {"a": False}
    assert issue.path == "generation.generation_kwargs"
