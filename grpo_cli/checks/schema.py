"""The JSON Schema of recipes, for editors: our schema, the rewards' parameters, and TRL's fields."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from grpo_cli.environments.registry import find_kind, kind_names
from grpo_cli.errors import UsageError
from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.episode import KindConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.registry import load_kinds
from grpo_cli.runs.files import write_json

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


def build_schema() -> dict[str, Any]:
    """Return the schema that an editor needs to complete and check a recipe as `grpo check` does."""
    schema = Recipe.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    for home, section in grpo_fields.OPEN.items():
        _add_trl_fields(definitions[section.__name__], home)
    definitions["RewardConfig"] = _build_kinds(RewardConfig, load_kinds(), definitions)
    kind = definitions.pop("KindConfig")
    for part in ("tools", "environment"):
        name = f"{part.removesuffix('s').title()}Config"
        kinds = {each: find_kind(part, each) for each in kind_names(part)}
        definitions[name] = _build_kinds(KindConfig, kinds, definitions) | {
            "description": kind["description"]
        }
        _rename_refs(schema["properties"][part], "#/$defs/KindConfig", f"#/$defs/{name}")
    schema["properties"]["extends"] = {
        "description": "Recipes this one builds on; later ones win, lists replace.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    # A recipe that extends another may leave out what its parents give.
    schema.pop("required", None)
    return {"$schema": SCHEMA_ID, "title": "grpo recipe", **schema}


def write_schema(path: Path) -> None:
    """Write the schema to a file.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        write_json(path, build_schema())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror})", "give another place with --output FILE"
        ) from None


def _add_trl_fields(section: dict[str, Any], home: grpo_fields.Home) -> None:
    for key, field in grpo_fields.fields_in(home).items():
        if key not in section["properties"]:
            value = TypeAdapter(grpo_fields.python_type(field)).json_schema()
            section["properties"][key] = {**value, "description": field.help.replace("%%", "%")}
    section["additionalProperties"] = False


def _rename_refs(schema: Any, old: str, new: str) -> None:
    for value in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(value, dict | list):
            _rename_refs(value, old, new)
    if isinstance(schema, dict) and schema.get("$ref") == old:
        schema["$ref"] = new


def _build_kinds(
    shared: type[BaseModel], kinds: Mapping[str, type[BaseModel]], definitions: dict[str, Any]
) -> dict[str, Any]:
    """Return one branch a kind: its own parameters beside those that every entry has."""
    common = _schema_of(shared, definitions)["properties"]
    branches = []
    for kind, params in kinds.items():
        own = _schema_of(params, definitions)
        described = {"description": own.get("description", "")}
        properties = {**common, **own.get("properties", {}), "kind": {"const": kind, **described}}
        branches.append(
            {
                "title": kind,
                **described,
                "type": "object",
                "properties": properties,
                "required": ["kind", *own.get("required", [])],
                "additionalProperties": False,
            }
        )
    return {"anyOf": branches}


def _schema_of(model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema(by_alias=True)
    definitions.update(schema.pop("$defs", {}))
    return schema
