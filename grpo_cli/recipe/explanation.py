"""Turns pydantic's findings into problems a person can mend.

Owns the wording and the search for the place in the YAML tree. Does not decide what is valid.
"""

import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from grpo_cli.errors import Location, Problem, nearest, sort_by_likeness
from grpo_cli.recipe.yaml_tree import Node

Path = tuple[str | int, ...]
_LISTED = 12
"""Valid keys that a message names."""


def explain(
    error: ValidationError, model: type[BaseModel], tree: Node, at: Path = ()
) -> list[Problem]:
    """One problem for each place that pydantic found wrong.

    Args:
        error: What `model.model_validate` raised.
        model: The schema that was validated.
        tree: The whole recipe as read.
        at: Where in the tree the validated value stands.
    """
    found: dict[Path, list[dict[str, Any]]] = {}
    for entry in error.errors(include_url=False):
        path = _walk_into(tree, at, entry["loc"], entry["type"])
        found.setdefault(path, []).append(typing.cast(dict[str, Any], entry))
    return [
        _explain_place(path, entries, model, tree, at)
        for path, entries in found.items()
        if not _is_echo(entries, tree, path)
    ]


def _is_echo(entries: list[dict[str, Any]], tree: Node, path: Path) -> bool:
    """Whether a list is called too short only because its entries are wrong."""
    node: Node | None = tree
    for step in path:
        node = node.child(step) if node else None
    return entries[0]["type"] == "too_short" and node is not None and bool(node.value)


def dotted(path: Iterable[str | int]) -> str:
    """`("rewards", 0, "kind")` as `rewards.0.kind`."""
    return ".".join(map(str, path))


def split_path(path: str) -> Path:
    """`rewards.0.kind` as `("rewards", 0, "kind")`."""
    return tuple(
        int(step) if step.isascii() and step.isdigit() else step for step in path.split(".")
    )


def locate(tree: Node, path: Path, *, key: bool = False) -> Location:
    """Where the value (or its key) stands; the nearest ancestor's place where it was not written."""
    node = tree
    for depth, step in enumerate(path):
        child = node.child(step)
        if child is None:
            return node.location
        if key and depth == len(path) - 1:
            return node.key_locations.get(str(step), child.location)
        node = child
    return node.location


def unknown_key(tree: Node, path: Path, valid: Sequence[str], hint: str | None = None) -> Problem:
    """The problem of a key that nobody knows, with the nearest name that is known."""
    name = str(path[-1])
    close = nearest(name, valid)
    owner = f"`{dotted(path[:-1])}`" if len(path) > 1 else "a recipe"
    if hint:
        fix = hint
    elif close:
        fix = f"write `{close}`"
    else:
        fix = f"remove it; {owner} takes {_list_nearest(name, valid)}"
    what = f"`{name}` does not belong here" if hint else f"unknown key `{name}`"
    return Problem(what, fix, path=dotted(path), location=locate(tree, path, key=True))


def _list_nearest(name: str, valid: Iterable[str]) -> str:
    """Name the valid keys, the most similar first, and where all are if these are not."""
    names = sort_by_likeness(name, valid)
    if len(names) <= _LISTED:
        return ", ".join(names)
    return f"{', '.join(names[:_LISTED])} and others (all: `grpo schema`)"


def _walk_into(tree: Node, at: Path, steps: Iterable[str | int], kind: str) -> Path:
    """The path that really exists: pydantic also names the branches of unions it tried."""
    path = at
    node = tree
    for step in at:
        node = node.child(step) or node
    remaining = list(steps)
    for index, step in enumerate(remaining):
        child = node.child(step)
        if child is not None:
            path, node = (*path, step), child
        elif kind == "missing" and index == len(remaining) - 1:
            path = (*path, step)
    return path


def _explain_place(
    path: Path, entries: list[dict[str, Any]], model: type[BaseModel], tree: Node, at: Path
) -> Problem:
    entry = entries[0]
    kind = entry["type"]
    name = dotted(path)
    if kind == "missing":
        fields = _model_at(model, tree, at, path[:-1])
        what = fields.model_fields[str(path[-1])].description if _has(fields, path[-1]) else None
        about = f" ({what.splitlines()[0].rstrip('.')})" if what else ""
        return Problem(f"is missing{about}", f"add `{path[-1]}: …`", name, locate(tree, path[:-1]))
    if kind == "extra_forbidden":
        owner = _model_at(model, tree, at, path[:-1])
        return unknown_key(tree, path, [f.alias or key for key, f in owner.model_fields.items()])
    node = tree
    for step in path:
        node = node.child(step) or node
    seen = _show(node.plain())
    if kind in {"union_tag_not_found", "union_tag_invalid"}:
        return _explain_tag(entry, node, name)
    expectation, fix = _expectation(entries, node.plain())
    return Problem(f"{expectation} (got {seen})", fix, name, node.location)


def _explain_tag(entry: dict[str, Any], node: Node, name: str) -> Problem:
    tag = str(entry["ctx"].get("discriminator", "kind")).strip("'")
    if entry["type"] == "union_tag_not_found":
        return Problem(
            f"has no `{tag}`",
            f"add `{tag}: …` (one of hub, files, reasoning_gym, inline, scored)",
            name,
            node.location,
        )
    expected = [value.strip(" '") for value in str(entry["ctx"]["expected_tags"]).split(",")]
    seen = str(entry["ctx"]["tag"])
    child = node.child(tag)
    return _wrong_choice(
        f"{name}.{tag}", seen, expected, child.location if child else node.location
    )


def _wrong_choice(name: str, seen: str, expected: Sequence[str], where: Location) -> Problem:
    close = nearest(seen, expected)
    fix = f"write `{close}`" if close else f"write one of {', '.join(expected)}"
    return Problem(f"should be one of {', '.join(expected)} (got {_show(seen)})", fix, name, where)


_NOUNS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "dict": "a mapping (`key: value` lines)",
    "mapping": "a mapping (`key: value` lines)",
    "model": "a mapping (`key: value` lines)",
    "list": "a list",
    "tuple": "a list",
    "none": "null",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _expectation(entries: list[dict[str, Any]], seen: Any) -> tuple[str, str]:
    """What the value should be, and how to mend it, from all branches pydantic tried."""
    nouns: list[str] = []
    choices: list[str] = []
    for entry in entries:
        kind, context = entry["type"], entry.get("ctx", {})
        if kind in _BOUNDS:
            word, key = _BOUNDS[kind]
            return f"should be {word} {context[key]}", f"set it {word} {context[key]}"
        if kind == "literal_error":
            choices += [
                part.strip("' ")
                for part in str(context["expected"]).replace(" or ", ",").split(",")
            ]
        elif kind == "grpo_number":
            nouns.append(str(entry["msg"]).removeprefix("should be ").partition(",")[0])
        elif kind.rsplit("_", 1)[0] in _NOUNS:
            nouns.append(_NOUNS[kind.rsplit("_", 1)[0]])
        elif kind == "int_from_float":
            nouns.append("a whole number")
        elif kind == "finite_number":
            nouns.append("a finite number")
        elif kind == "model_attributes_type":
            nouns.append(_NOUNS["mapping"])
        elif kind == "too_short":
            # A wrong entry is left out of what is counted.
            if len(entries) == 1:
                return "is empty", "add at least one entry"
        elif kind in {"string_too_short", "string_pattern_mismatch"}:
            pattern = context.get("pattern")
            return "is not a valid name" if pattern else "is empty", (
                f"use a name that matches {pattern}" if pattern else "write a value"
            )
        else:
            return _sentence(str(entry["msg"])), context.get("fix", "correct the value")
    return _combine(list(dict.fromkeys(nouns)), list(dict.fromkeys(choices)), seen)


def _combine(nouns: list[str], choices: list[str], seen: Any) -> tuple[str, str]:
    expected = " or ".join([*([f"one of {', '.join(choices)}"] if choices else []), *nouns])
    if seen is None and nouns == [_NOUNS["mapping"]]:
        return "is empty", "write its keys beneath it, indented, or remove it"
    close = nearest(str(seen), choices) if choices else None
    if close:
        return f"should be {expected}", f"write `{close}`"
    if nouns == ["text"] and not isinstance(seen, dict | list) and seen is not None:
        shown = str(seen).lower() if isinstance(seen, bool) else seen
        return f"should be {expected}", f'put it in quotes: "{shown}"'
    return f"should be {expected}", f"write {expected}"


def _sentence(message: str) -> str:
    text = message.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _show(value: Any) -> str:
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    )
    return text if len(text) <= 60 else f"{text[:57]}…"


def _has(model: type[BaseModel], name: str | int) -> bool:
    return str(name) in model.model_fields


def _model_at(model: type[BaseModel], tree: Node, at: Path, path: Path) -> type[BaseModel]:
    """The schema that describes the mapping at `path`; the nearest one above where there is none."""
    node = tree
    for step in at:
        node = node.child(step) or node
    for step in path[len(at) :]:
        child = node.child(step)
        if child is None:
            break
        node = child
        by_key = {f.alias or key: f.annotation for key, f in model.model_fields.items()}
        options = list(_models_in(by_key.get(str(step)))) if isinstance(step, str) else [model]
        model = _pick(options, node) or model
    return model


def _pick(options: list[type[BaseModel]], node: Node) -> type[BaseModel] | None:
    if len(options) <= 1:
        return options[0] if options else None
    kind = node.child("kind")
    for option in options:
        field = option.model_fields.get("kind")
        if kind is not None and field and kind.value in typing.get_args(field.annotation):
            return option
    return None


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    if typing.get_origin(annotation) is not Literal:
        for argument in typing.get_args(annotation):
            yield from _models_in(argument)
