"""Fields of other libraries' configurations, read from their sources without importing torch."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, cast

from grpo_cli.errors import SetupError, pip
from grpo_cli.recipe.base import Integer, Number

_KNOWN = {"trl": '"trl>=1.16,<1.17"', "transformers": "transformers", "peft": '"peft>=0.21,<0.22"'}
"""Packages → what to install to get the layout that is known here."""


@dataclass(frozen=True)
class UpstreamField:
    """One field of another library's configuration."""

    name: str
    annotation: str
    """The type as written in the sources."""
    default: str
    """The default as written in the sources."""
    help: str


def as_type(annotation: str) -> Any:
    """Return a field's type for pydantic; `Any` stands for what only upstream can check."""
    return _as_type(ast.parse(annotation, mode="eval").body)


def _as_type(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp):
        left, right = _as_type(node.left), _as_type(node.right)
        # `SchedulerType | str` means: one of the names of the enumeration.
        return left if right is str and ast.unparse(node.left) in _read_enums() else left | right
    text = ast.unparse(node)
    if isinstance(node, ast.Subscript):
        return _as_generic(ast.unparse(node.value), node.slice)
    simple = {"int": Integer, "float": Number, "bool": bool, "str": str, "None": None}
    if text in simple:
        return simple[text]
    if text == "dict":
        return dict[str, Any]
    return Literal[_read_enums()[text]] if text in _read_enums() else Any


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


@cache
def _read_enums() -> dict[str, tuple[str, ...]]:
    """Return the values of transformers' enumerations, by their names."""
    enums: dict[str, tuple[str, ...]] = {}
    for relative in ("trainer_utils.py", "training_args.py"):
        text = _source_path("transformers", relative).read_text(encoding="utf-8")
        for name in re.findall(r"^class (\w+)\(ExplicitEnum\)", text, re.MULTILINE):
            enums[name] = tuple(
                str(member.value.value)
                for member in _find_class("transformers", relative, name).body
                if isinstance(member, ast.Assign) and isinstance(member.value, ast.Constant)
            )
    return enums


def read_class(package: str, relative: str, name: str) -> Iterator[UpstreamField]:
    """Yield the fields of a dataclass in an installed package, without those of its parents.

    Raises:
        SetupError: The package is missing, or laid out in a way this version does not know.
    """
    for line in _find_class(package, relative, name).body:
        if isinstance(line, ast.AnnAssign):
            default, help_text = _read_default(line.value)
            annotation = ast.unparse(line.annotation)
            field = ast.unparse(line.target)
            yield UpstreamField(field, annotation, default, help_text)


def _read_default(value: ast.expr | None) -> tuple[str, str]:
    if not isinstance(value, ast.Call):
        return (ast.unparse(value) if value else ""), ""
    options = {option.arg: option.value for option in value.keywords}
    default = options.get("default") or options.get("default_factory")
    metadata = options.get("metadata")
    pairs = (
        zip(metadata.keys, metadata.values, strict=True) if isinstance(metadata, ast.Dict) else ()
    )
    helps = [ast.literal_eval(text) for key, text in pairs if key and ast.unparse(key) == "'help'"]
    return (ast.unparse(default) if default else ""), "".join(helps)


def _find_class(package: str, relative: str, name: str) -> ast.ClassDef:
    """Parse a class from its head to its first method: all that holds fields, a third of the file."""
    path = _source_path(package, relative)
    text = path.read_text(encoding="utf-8")
    head = re.search(rf"^class {name}\b", text, re.MULTILINE)
    if head is None:
        raise SetupError(
            f"{path} has no class `{name}`: this version of grpo was made for another {package}. "
            f"Fix: {pip(f'install {_KNOWN[package]}')}"
        )
    method = re.compile(r"^    (?:def |@|async )|^\S", re.MULTILINE).search(text, head.end())
    definition = ast.parse(text[head.start() : method.start() if method else None]).body[0]
    return cast(ast.ClassDef, definition)


def _source_path(package: str, relative: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    path = Path(next(iter(folders))) / relative if folders else None
    if path is None or not path.is_file():
        raise SetupError(
            f"{package} is not installed, or lacks {relative}. Fix: {pip(f'install {_KNOWN[package]}')}"
        )
    return path
