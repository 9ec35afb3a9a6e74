"""The base of every recipe section, frozen and closed to unknown keys; and the fields of other libraries.

Fields of `GRPOConfig`, `AsyncGRPOConfig` and `LoraConfig` stand in a table that `docs/generate.py` writes.

Source: trl 1.16, transformers 5.24 and peft 0.21; `tests/unit/upstream/test_fields.py` compares.
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
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
        hide_input_in_errors=True,
        protected_namespaces=(),
        serialize_by_alias=True,
        # Only the validator of the whole recipe is needed. Building one for each section as well takes 40 ms at
        # every start; that is also why defaults are made with `model_construct`.
        defer_build=True,
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).get("properties", {})
        for name, doc in field_docs(cls).items():
            key = cls.model_fields[name].alias or name
            properties[key] = {"description": doc, **properties[key]}
        return described


def field_docs(section: type[Section]) -> dict[str, str]:
    """Return the docstring beneath each field of a section, by the field's name.

    Read from the source when it is needed: pydantic would do so for every section at every start.
    """
    docs: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if issubclass(each, Section) and each is not Section:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            for field, doc in pairwise(getattr(definition, "body", [])):
                if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                    docs[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(doc.value))
    return {name: docs[name] for name in section.model_fields if name in docs}


class OpenSection(Section):
    """A section that also takes fields of `GRPOConfig` or `LoraConfig` by name; `extras` holds those given."""

    model_config = ConfigDict(extra="allow")
    OURS: ClassVar[frozenset[str]] = frozenset()
    """Names of its own fields that the other configuration does not have."""

    @property
    def extras(self) -> dict[str, Any]:
        """The fields given by name that are not its own, in the order written."""
        return dict(self.model_extra or {})


def _refuse_boolean(expected: str) -> BeforeValidator:
    """Keep `true` from being read as the number 1, as pydantic would."""

    def check(value: Any) -> Any:
        if isinstance(value, bool):
            raise PydanticCustomError("grpo_number", f"should be {expected}, not a boolean")
        return value

    return BeforeValidator(check)


NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
"""Names that are parts of file names, for which file systems allow 255 bytes."""


def _refuse_too_large(value: int) -> int:
    """Refuse what torch and numpy cannot hold."""
    if not -(2**63) <= value < 2**63:
        raise PydanticCustomError(
            "grpo_size", "should fit in 64 bits", {"fix": "set a smaller number"}
        )
    return value


Integer = Annotated[int, _refuse_boolean("a whole number"), AfterValidator(_refuse_too_large)]
"""A whole number of 64 bits; `true` is not 1."""
Number = Annotated[float, _refuse_boolean("a number"), Field(allow_inf_nan=False)]
"""A finite number; `1e-6` and `"1e-6"` both work, `true` does not."""


@dataclass(frozen=True)
class ShortForm:
    """Reads a short form as the full one, and adds it to the JSON Schema."""

    expand: Callable[[Any], Any]
    schema: Callable[[dict[str, Any]], dict[str, Any]]
    """The short form's JSON Schema, from that of the full one."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        full = handler(schema)
        return {"anyOf": [self.schema(full), full]}


AS_PATH = ShortForm(
    lambda value: {"path": value} if isinstance(value, str) else value,
    lambda full: {"type": "string", "minLength": 1},
)
"""A section that may be written as its `path` alone."""


def _check_address(text: str) -> str:
    """Check that HTTP clients understand an address; TRL's takes no path."""
    try:
        parts = urlsplit(text)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        whole = False
    if not whole or parts.path.strip("/") or parts.query:
        raise PydanticCustomError(
            "grpo_address", "should be an address such as http://10.0.0.2:8000, without a path"
        )
    return text.rstrip("/")


Address = Annotated[str, AfterValidator(_check_address)]
"""Of a server, without a path."""
OneOrMany = Annotated[
    tuple[Item, ...],
    ShortForm(
        lambda value: (value,) if isinstance(value, str) else value, lambda full: full["items"]
    ),
]
"""A list that may be written as its only entry: `train: a.jsonl` and `train: [a.jsonl]` are the same."""


TABLE = Path(__file__).with_name("upstream_fields.json")
_SIMPLE = {
    "int": Integer,
    "float": Number,
    "bool": bool,
    "str": str,
    "None": None,
    "dict": dict[str, Any],
}


@dataclass(frozen=True)
class UpstreamField:
    """One field of another library's configuration."""

    name: str
    annotation: str
    """Its type; enumerations are a `Literal` of their values."""
    default: Any
    """None also for a default that JSON has no type for."""
    help: str


@cache
def read_fields(
    config: Literal["GRPOConfig", "AsyncGRPOConfig", "LoraConfig"],
) -> dict[str, UpstreamField]:
    """Return the fields of a configuration by their names."""
    return {name: UpstreamField(name, *each) for name, each in _read_table()[config].items()}


@cache
def _read_table() -> dict[str, dict[str, list[Any]]]:
    table: dict[str, dict[str, list[Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def as_type(annotation: str) -> Any:
    """Return a field's type for pydantic; `Any` stands for what only upstream can check."""
    return _as_type(ast.parse(annotation, mode="eval").body)


def _as_type(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp):
        return _as_type(node.left) | _as_type(node.right)
    if isinstance(node, ast.Subscript):
        return _as_generic(ast.unparse(node.value), node.slice)
    return _SIMPLE.get(ast.unparse(node), Any)


def _as_generic(outer: str, inside: ast.expr) -> Any:
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if outer == "Literal":
        return Literal[tuple(map(ast.literal_eval, parts))]
    types = tuple(map(_as_type, parts))
    if outer in ("Union", "Optional"):
        return Union[types if outer == "Union" else (*types, None)]  # noqa: UP007
    if outer == "list":
        return list[types]  # type: ignore[valid-type]
    return dict[str, types[-1]] if outer == "dict" else Any  # type: ignore[valid-type]
