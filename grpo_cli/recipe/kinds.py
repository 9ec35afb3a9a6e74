"""Kinds of rewards, tools and environments: as their classes document them, and from other packages."""

import inspect
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic_core import to_jsonable_python

from grpo_cli.errors import GrpoError
from grpo_cli.recipe.base import Section, field_docs

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Params = TypeVar("Params", bound=Section)


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


@cache
def added_kinds(group: str) -> dict[str, "EntryPoint"]:
    """Return the kinds that other packages add through an entry-point group, by name; imports none."""
    # Imported late: it is slow, and recipes of built-in kinds do not need it.
    from importlib import metadata

    return {each.name: each for each in metadata.entry_points(group=group)}


def load_kind(
    entry: "EntryPoint", noun: str, bases: tuple[type[Params], ...], error_type: type[GrpoError]
) -> type[Params]:
    """Return the parameters' class of a kind that another package adds.

    Raises:
        GrpoError: It cannot be imported, or is something else; of `error_type`.
    """
    source = f"{noun} {entry.name!r} ({entry.value})"
    try:
        params = entry.load()
    except Exception as error:  # a package's own code raises anything
        raise error_type(
            f"{source} cannot be imported: {error!r:.300}", "update or remove that package"
        ) from error
    if not (inspect.isclass(params) and issubclass(params, bases)):
        names = " or ".join(base.__name__ for base in bases)
        raise error_type(f"{source} is not a {names}", "name a subclass of it there")
    return params
