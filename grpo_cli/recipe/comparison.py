"""In what two recipes differ. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_cli.recipe.recipe import Recipe


@dataclass(frozen=True)
class Difference:
    """One setting that two recipes give different values."""

    path: str
    """Dotted, such as `training.learning_rate`."""
    old: Any
    """None where it was not there."""
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.old} → {self.new}"


def list_differences(old: Recipe, new: Recipe) -> list[Difference]:
    """The settings in which two recipes differ, in the order of the schema."""
    before, after = (dict(flatten(each.model_dump(mode="json"))) for each in (old, new))
    return [
        Difference(path, before.get(path), after.get(path))
        for path in {**after, **before}
        if before.get(path) != after.get(path)
    ]


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted path and value of everything in nested plain values; lists of texts or numbers stay whole."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flatten(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}[{index}]")
    else:
        yield path, value
