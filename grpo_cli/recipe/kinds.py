"""Kinds of rewards, tools and environments, as their classes document them."""

import inspect
from dataclasses import asdict, dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from grpo_cli.recipe.base import Section, field_docs


@dataclass(frozen=True)
class ParameterDescription:
    """One parameter of a kind."""

    name: str
    required: bool
    default: Any
    """None if it is required."""
    doc: str


@dataclass(frozen=True)
class KindDescription:
    """One kind, as its class documents it."""

    kind: str
    summary: str
    """The first line of `doc`."""
    doc: str
    """All that the class says."""
    parameters: tuple[ParameterDescription, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the description as plain values."""
        return asdict(self)


def describe(kind: str, params: type[Section]) -> KindDescription:
    """Return the description of a kind by the class of its parameters."""
    doc = inspect.cleandoc(params.__doc__ or "")
    docs = field_docs(params)
    parameters = tuple(
        ParameterDescription(
            field.alias or name,
            field.is_required(),
            None
            if field.is_required()
            else to_jsonable_python(field.get_default(call_default_factory=True)),
            " ".join(docs.get(name, "").split()),
        )
        for name, field in params.model_fields.items()
    )
    return KindDescription(kind, doc.partition("\n")[0], doc, parameters)
