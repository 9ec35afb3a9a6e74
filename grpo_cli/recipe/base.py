"""The base of every recipe section: frozen, closed to unknown keys, documented beneath each field.

Owns the value types that read YAML as a person means it. Does not know any section.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Item = TypeVar("Item")


class Section(BaseModel):
    """A frozen part of a recipe; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
        serialize_by_alias=True,
    )


class OpenSection(Section):
    """A section that also takes `GRPOConfig` fields by name; `extras` holds the ones given."""

    model_config = ConfigDict(extra="allow")
    OURS: ClassVar[frozenset[str]] = frozenset()
    """Names of its own fields that `GRPOConfig` does not have."""

    @property
    def extras(self) -> dict[str, Any]:
        """The `GRPOConfig` fields given by name, in the order written."""
        return dict(self.model_extra or {})


def _refuse_boolean(expected: str) -> Callable[[Any], Any]:
    """Keeps `true` from being read as the number 1, which pydantic would do."""

    def check(value: Any) -> Any:
        if isinstance(value, bool):
            raise PydanticCustomError("grpo_number", f"should be {expected}, not a boolean")
        return value

    return check


Integer = Annotated[int, BeforeValidator(_refuse_boolean("a whole number"))]
"""A whole number; `true` is not 1."""
Number = Annotated[float, BeforeValidator(_refuse_boolean("a number")), Field(allow_inf_nan=False)]
"""A finite number; `1e-6` and `"1e-6"` both work, `true` does not."""


class _OneOrMany:
    """Reads a single text as a list of one, and says so in the JSON Schema."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_as_tuple, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        many = handler(schema)
        return {"anyOf": [many["items"], many]}


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


OneOrMany = Annotated[tuple[Item, ...], _OneOrMany()]
"""A list that may be written as its only entry: `train: a.jsonl` and `train: [a.jsonl]` are the same."""
