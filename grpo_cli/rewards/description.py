"""What each kind of reward does, as its schema says: for `grpo rewards` and anything that lists kinds."""

import inspect
from dataclasses import asdict, dataclass
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from grpo_cli.errors import UsageError, nearest
from grpo_cli.rewards.registry import KINDS


@dataclass(frozen=True)
class ParameterDescription:
    """One parameter of a kind."""

    name: str
    required: bool
    default: Any
    """None where it is required."""
    doc: str


@dataclass(frozen=True)
class KindDescription:
    """One kind of reward."""

    kind: str
    summary: str
    """The first line of `doc`."""
    doc: str
    """What it rewards, with formula, range and source."""
    parameters: tuple[ParameterDescription, ...]

    def as_json(self) -> dict[str, Any]:
        """The description as plain values."""
        return asdict(self)


def list_kinds() -> list[KindDescription]:
    """Every kind, in the order of the registry."""
    return [describe_kind(kind) for kind in KINDS]


def describe_kind(kind: str) -> KindDescription:
    """One kind by its name in recipes.

    Raises:
        UsageError: There is no such kind.
    """
    if kind not in KINDS:
        close = nearest(kind, KINDS)
        hint = f"grpo rewards show {close}" if close else f"choose one of {', '.join(KINDS)}"
        raise UsageError(f"there is no reward kind `{kind}`. Fix: {hint}")
    schema = KINDS[kind]
    doc = inspect.cleandoc(schema.__doc__ or "")
    fields = schema.model_fields.items()
    parameters = tuple(_describe_parameter(field.alias or name, field) for name, field in fields)
    return KindDescription(kind, doc.partition("\n")[0], doc, parameters)


def _describe_parameter(name: str, field: FieldInfo) -> ParameterDescription:
    required = field.is_required()
    default = None if required else to_jsonable_python(field.get_default(call_default_factory=True))
    return ParameterDescription(
        name, required, default, " ".join((field.description or "").split())
    )
