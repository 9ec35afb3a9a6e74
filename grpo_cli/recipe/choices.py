"""What a recipe chooses: the settings that are not as they are by default, each beside its default. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from grpo_cli.recipe.recipe import Recipe


@dataclass(frozen=True)
class Choice:
    """One setting that a recipe had to make, or made otherwise than the schema would."""

    path: str
    """Dotted, such as `training.learning_rate`."""
    value: Any
    """As plain values."""
    default: Any
    """None where there is none."""
    has_default: bool
    """Whether the schema knows one: not of what must be given, nor of fields passed through by name."""


def list_choices(recipe: Recipe) -> list[Choice]:
    """The settings of a recipe that need not be so, in the order of the schema."""
    return list(_walk(recipe, recipe.model_dump(mode="json"), ""))


def _walk(section: BaseModel, plain: dict[str, Any], path: str) -> Iterator[Choice]:
    for name, field in type(section).model_fields.items():
        at, key = f"{path}.{name}" if path else name, field.serialization_alias or name
        value, shown = getattr(section, name), plain.get(key)
        known = not field.is_required()
        default = field.get_default(call_default_factory=True) if known else None
        parts = value if isinstance(value, tuple) else ()
        if isinstance(value, BaseModel) and isinstance(shown, dict):
            yield from _walk(value, shown, at)
        elif parts and isinstance(shown, list) and isinstance(parts[0], BaseModel):
            for index, part in enumerate(parts):
                yield from _walk(part, shown[index], f"{at}[{index}]")
        elif not known or value != default:
            yield Choice(at, shown, default, known)
    for name in section.model_extra or {}:
        yield Choice(f"{path}.{name}" if path else name, plain.get(name), None, False)
