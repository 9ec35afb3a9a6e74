"""Turns pydantic's errors into issues with the line, what was seen and a fix."""

import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from grpo_cli.errors import nearest, sort_by_likeness
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Section, field_docs
from grpo_cli.recipe.yaml_tree import KeyPath, Node, dotted, locate

_LISTED = 12
"""Valid keys that a message names."""
UNKNOWN = "unknown key"
"""The kind of an issue about a key that the schema does not have."""
_UNKNOWN = "extra_forbidden"
"""Pydantic's word for a key that the schema does not have."""
_MAPPING = "a mapping (`key: value` lines)"
_BOOLEAN = "true or false"
_NOUNS = {
    "int": "a whole number",
    "int_from": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": _BOOLEAN,
    "string": "text",
    **dict.fromkeys(("dict", "mapping", "model", "model_attributes"), _MAPPING),
    **dict.fromkeys(("list", "tuple"), "a list"),
    "none": "null",
}
"""What pydantic's error types, without their last word, ask for."""
_EXAMPLES = {"model.lora": "`lora: {r: 16}`, or null for none"}
"""What to write in place of a value of another type."""
_OTHER_NAMES = {
    **dict.fromkeys(("weight", "share", "proportion", "probability"), "ratio"),
    **dict.fromkeys(("pattern", "regexp"), "regex"),
    **dict.fromkeys(
        (
            "train_test_split",
            "test_size",
            "val_size",
            "val_split",
            "val_set_size",
            "validation_split",
        ),
        "eval_fraction",
    ),
    "regex": "pattern",
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
}
"""Names that other tools give to a key."""
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def explain(
    error: ValidationError, model: type[Section], tree: Node, at: KeyPath = ()
) -> list[Issue]:
    """Return one issue for each place that pydantic found wrong.

    Args:
        error: What `model.model_validate` raised.
        model: The schema that was validated.
        tree: The whole recipe as read.
        at: Where in the tree the validated value stands.
    """
    places: dict[KeyPath, list[dict[str, Any]]] = {}
    for entry in error.errors(include_url=False):
        path = _existing_path(tree, at, entry["loc"], entry["type"])
        places.setdefault(path, []).append(typing.cast(dict[str, Any], entry))
    unknown = {
        path: tree.find(path) for path, each in places.items() if each[0]["type"] == _UNKNOWN
    }
    # What an unknown mapping holds is not missing beside it.
    inside = {
        (*path[:-1], key)
        for path, node in unknown.items()
        for key in (node.value if node is not None and isinstance(node.value, dict) else ())
    }
    issues = (
        _explain_place(path, each, model, tree, at)
        for path, each in places.items()
        if path not in inside
    )
    return [issue for issue in issues if issue is not None]


def unknown_key(tree: Node, path: KeyPath, valid: Sequence[str], hint: str | None = None) -> Issue:
    """Return the issue of an unknown key, with the nearest valid name or, if it belongs elsewhere, a hint."""
    name, where = str(path[-1]), locate(tree, path, key=True)
    if hint:
        return Issue(f"`{name}` does not belong here", hint, dotted(path), where)
    node = tree.find(path)
    if node is not None and isinstance(node.value, dict) and node.value.keys() & {*valid}:
        keys = ", ".join(node.value)
        fix = f"write its keys ({keys}) one level up, in place of `{name}`"
        return Issue(f"unknown key `{name}`", fix, dotted(path), where, kind=UNKNOWN)
    other = _OTHER_NAMES.get(name)
    longer = [each for each in valid if each.endswith(f"_{name}")]
    if (
        close := (other if other in valid else None)
        or nearest(name, valid)
        or (longer[0] if len(longer) == 1 else None)
    ):
        fix = f"write `{close}`"
    else:
        names = sort_by_likeness(name, valid)
        more = " and others (all: `grpo schema`)" if len(names) > _LISTED else ""
        owner = f"`{dotted(path[:-1])}`" if path[1:] else "a recipe"
        fix = f"remove it; {owner} takes {', '.join(names[:_LISTED])}{more}"
    return Issue(f"unknown key `{name}`", fix, dotted(path), where, kind=UNKNOWN)


def _existing_path(tree: Node, at: KeyPath, steps: KeyPath, kind: str) -> KeyPath:
    """Return the path without the branches of unions that pydantic tried and names too."""
    path, node = at, tree.find(at) or tree
    for index, step in enumerate(steps, 1):
        child = node.child(step)
        if child is not None:
            path, node = (*path, step), child
        elif kind == "missing" and index == len(steps):
            path = (*path, step)
    return path


def _explain_place(
    path: KeyPath, entries: list[dict[str, Any]], model: type[Section], tree: Node, at: KeyPath
) -> Issue | None:
    """Return the issue of one place; None if a list is too short only because its entries are wrong."""
    kind, context = entries[0]["type"], entries[0].get("ctx", {})
    node = tree.find(path)
    if kind == "missing":
        doc = field_docs(_section_at(model, tree, at, path[:-1])).get(str(path[-1]))
        about = f" ({doc.splitlines()[0].rstrip('.')})" if doc else ""
        where = locate(tree, path[:-1])
        return Issue(f"is missing{about}", f"add `{path[-1]}: …`", dotted(path), where)
    if kind == _UNKNOWN:
        fields = _section_at(model, tree, at, path[:-1]).model_fields
        others = [
            each
            for each in _options_at(model, tree, at, path[:-1])
            if path[-1] in each.model_fields
        ]
        if others and (own := tree.find((*path[:-1], "kind"))):
            seen = f"`{path[-1]}` is not a key of `kind: {own.value}` ({own.location})"
            fix = f"remove it, or set `kind: {_kinds_of(others[0])[0]}`, which takes it"
            return Issue(seen, fix, dotted(path), locate(tree, path, key=True))
        return unknown_key(tree, path, [field.alias or key for key, field in fields.items()])
    if node is None or (kind == "too_short" and node.value):
        return None
    seen = node.plain()
    if kind == "union_tag_not_found":
        kinds = ", ".join(_kinds_at(model, tree, at, path))
        fix = f"add `kind: …` (one of {kinds})"
        return Issue("has no `kind`", fix, dotted(path), node.location)
    if kind == "union_tag_invalid":
        path = (*path, "kind")
        seen, choices = context["tag"], _split(context["expected_tags"])
        expectation, fix = _combine([], choices, seen)
    else:
        expectation, fix = _expectation(entries, seen)
        fix = f"write {_EXAMPLES[dotted(path)]}" if dotted(path) in _EXAMPLES else fix
    where = locate(tree, path)
    if kind == "grpo_secret":
        # The place of a flag is the flag as written.
        where = replace(where, source=where.source.replace(str(seen), "…"))
        return Issue(expectation, fix, dotted(path), where)
    return Issue(f"{expectation} (got {_show(seen)})", fix, dotted(path), where)


def _split(listed: object) -> list[str]:
    """Return the names in pydantic's `'a', 'b' or 'c'`."""
    return [part.strip("' ") for part in str(listed).replace(" or ", ",").split(",")]


def _expectation(entries: list[dict[str, Any]], seen: Any) -> tuple[str, str]:
    """Return what the value should be, and the fix, from all branches pydantic tried."""
    nouns: list[str] = []
    choices: list[str] = []
    for entry in entries:
        kind, context = entry["type"], entry.get("ctx", {})
        if kind in _BOUNDS:
            word, key = _BOUNDS[kind]
            return f"should be {word} {context[key]}", f"set it {word} {context[key]}"
        if kind == "literal_error":
            choices += _split(context["expected"])
        elif kind == "grpo_number":
            nouns.append(str(entry["msg"]).removeprefix("should be ").partition(",")[0])
        elif kind.rsplit("_", 1)[0] in _NOUNS:
            nouns.append(_NOUNS[kind.rsplit("_", 1)[0]])
        elif kind == "too_short":
            # A wrong entry, which comes first, is left out of what is counted.
            if len(entries) == 1:
                return "is empty", "add at least one entry"
        elif kind == "string_too_short":
            return "is empty", "write a value"
        elif kind == "string_pattern_mismatch":
            return "is not a valid name", f"use a name that matches {context['pattern']}"
        else:
            text = str(entry["msg"]).removeprefix("Value error, ")
            return text[:1].lower() + text[1:], context.get("fix", "correct the value")
    return _combine(list(dict.fromkeys(nouns)), list(dict.fromkeys(choices)), seen)


def _combine(nouns: list[str], choices: list[str], seen: Any) -> tuple[str, str]:
    """Return the expectation and the fix for a value that is one of `choices`, or of the types in `nouns`."""
    if choices and _BOOLEAN in nouns:
        nouns, choices = [each for each in nouns if each != _BOOLEAN], ["true", "false", *choices]
    expected = " or ".join([*([f"one of {', '.join(choices)}"] if choices else []), *nouns])
    if seen is None and nouns == [_MAPPING]:
        return "is empty", "write its keys beneath it, indented, or remove it"
    longer = [each for each in choices if each.startswith(f"{seen}") and f"{seen}"[2:]]
    if close := nearest(str(seen), choices) or (longer[0] if longer else None):
        return f"should be {expected}", f"write `{close}`"
    if nouns == ["text"] and not isinstance(seen, dict | list) and seen is not None:
        return f"should be {expected}", f'put it in quotes: "{_show(seen)}"'
    if nouns == ["a list"] and isinstance(seen, str):
        return f"should be {expected}", f"write [{', '.join(seen.split())}]"
    fix = "write one of these" if len(choices) > _LISTED else f"write {expected}"
    return f"should be {expected}", fix


def _show(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _section_at(model: type[Section], tree: Node, at: KeyPath, path: KeyPath) -> type[Section]:
    """Return the schema of the mapping at `path`; of the nearest one above if it has none."""
    for depth in range(len(at), len(path)):
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        field = fields.get(str(path[depth]))
        options = list(_sections_in(field.annotation)) if field else []
        if options[1:]:
            # In a list, each entry has its kind.
            end = depth + 1 + isinstance((*path, "")[depth + 1], int)
            node = tree.find((*path[:end], "kind"))
            # `sources` alone makes a mixture.
            kind = node.value if node else "mixture"
            options = [each for each in options if kind in _kinds_of(each)]
        model = options[0] if options else model
    return model


def _kinds_at(model: type[Section], tree: Node, at: KeyPath, path: KeyPath) -> list[str]:
    """Return the kinds that the mapping at `path`, or list entry, may be of; keys tell a mixture."""
    options = _options_at(model, tree, at, path)
    return [kind for each in options for kind in _kinds_of(each) if kind != "mixture"]


def _options_at(
    model: type[Section], tree: Node, at: KeyPath, path: KeyPath
) -> Sequence[type[Section]]:
    """Return the schemas that the mapping at `path`, or list entry, may have."""
    end = -2 if path and isinstance(path[-1], int) else -1
    if len(path[:end]) < len(at) or not path:
        return ()
    fields = _section_at(model, tree, at, path[:end]).model_fields
    field = fields.get(str(path[end]))
    return list(_sections_in(field.annotation)) if field else ()


def _kinds_of(section: type[Section]) -> tuple[str, ...]:
    return typing.get_args(section.model_fields["kind"].annotation)


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections_in(argument)
