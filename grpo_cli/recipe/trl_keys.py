"""Checks the keys of the open sections against the installed `GRPOConfig`.

Owns: unknown and misplaced keys, and the types of values that TRL, not this schema, defines.
"""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from grpo_cli.errors import Problem, nearest
from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.explanation import Path, explain, unknown_key
from grpo_cli.recipe.generation import GenerationConfig, VllmConfig
from grpo_cli.recipe.logging import LoggingConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.training import TrainingConfig
from grpo_cli.recipe.yaml_tree import Node

_OPEN: dict[grpo_fields.Home, type[BaseModel]] = {
    "generation": GenerationConfig,
    "generation.vllm": VllmConfig,
    "training": TrainingConfig,
    "logging": LoggingConfig,
}


def check_trl_keys(tree: Node) -> list[Problem]:
    """Problems of keys that are TRL's: unknown, in the wrong section, or of the wrong type.

    Values that TRL wants in another type than YAML gave (such as `"1e-6"`) are converted in place.
    """
    problems = list(_check_top(tree))
    for home, model in _OPEN.items():
        path: Path = tuple(home.split("."))
        node: Node | None = tree
        for step in path:
            node = node.child(step) if node else None
        if node is not None and isinstance(node.value, dict):
            problems += _check_section(tree, node, path, home, model)
    return problems


def _check_top(tree: Node) -> Iterator[Problem]:
    for key in tree.value:
        if key not in Recipe.model_fields and key != "extends":
            hint = _hint(str(key), None)
            yield unknown_key(tree, (key,), [*Recipe.model_fields, "extends"], hint)


def _check_section(
    tree: Node, node: Node, path: Path, home: grpo_fields.Home, model: type[BaseModel]
) -> Iterator[Problem]:
    fields = grpo_fields.read_grpo_fields()
    for key, child in list(node.value.items()):
        if key in model.model_fields:
            continue
        name = f"vllm_{key}" if home == "generation.vllm" else key
        if name in fields and grpo_fields.home_of(name) == home:
            yield from _check_type(tree, child, (*path, key), fields[name])
            continue
        valid = [*model.model_fields, *grpo_fields.names_in(home)]
        yield unknown_key(tree, (*path, key), valid, _hint(str(key), home))


def _hint(key: str, home: grpo_fields.Home | None) -> str | None:
    """Where a key belongs that is known, only not here."""
    if key in grpo_fields.MOVED:
        return grpo_fields.MOVED[key]
    if home is not None and key in Recipe.model_fields:
        return f"move `{key}:` to the top level of the recipe"
    refusal = grpo_fields.refusal_of(key)
    if refusal:
        return refusal
    full = f"vllm_{key}" if home == "generation.vllm" else key
    if full in grpo_fields.RENAMED:
        return f"write it as `{grpo_fields.key_in_home(grpo_fields.RENAMED[full])}`"
    for section, model in _OPEN.items():
        if section != home and key in model.model_fields:
            return f"move it to `{section}.{key}`"
    known = grpo_fields.read_grpo_fields()
    if key in known:
        return f"move it to `{grpo_fields.key_in_home(key)}`"
    if home == "generation.vllm" and key.startswith("vllm_"):
        return f"write `{key.removeprefix('vllm_')}`"
    if home is None and not nearest(key, Recipe.model_fields):
        close = nearest(key, [name for name in known if grpo_fields.home_of(name)])
        return f"write it as `{grpo_fields.key_in_home(close)}`" if close else None
    return None


def _check_type(
    tree: Node, child: Node, path: Path, field: grpo_fields.GrpoField
) -> Iterator[Problem]:
    adapter: TypeAdapter[object] = TypeAdapter(
        grpo_fields.python_type(field),
        config=ConfigDict(hide_input_in_errors=True, arbitrary_types_allowed=True),
    )
    try:
        value = adapter.validate_python(child.plain())
    except ValidationError as error:
        yield from explain(error, Recipe, tree, path)
        return
    if not isinstance(child.value, dict | list):
        child.value = value
