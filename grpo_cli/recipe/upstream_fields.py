"""Fields of `GRPOConfig`, `AsyncGRPOConfig` and `LoraConfig`, from a table that `docs/generate.py` writes.

Source: trl 1.16, transformers 5.24 and peft 0.21; `tests/unit/upstream/test_fields.py` compares.
"""

import ast
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

from grpo_cli.recipe.base import Integer, Number

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
