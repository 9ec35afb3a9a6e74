"""`--set a.b=c`: values that replace a recipe's, cited as the flag when they are wrong."""

import re
from dataclasses import replace

from grpo_cli.errors import Location, Problem, RecipeError
from grpo_cli.recipe.yaml_tree import Node, merge, read_text

_PATH = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def apply_overrides(tree: Node, overrides: list[str]) -> Node:
    """Sets each `path=value` in a tree; the value is read as YAML.

    Raises:
        RecipeError: A flag is not `path=value`, or its path leads through a value that is no mapping.
    """
    problems: list[Problem] = []
    for text in overrides:
        try:
            _set(tree, text)
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    return tree


def _set(tree: Node, text: str) -> None:
    flag = Location(f"--set {text}")
    name, equals, raw = text.partition("=")
    if not equals or not _PATH.fullmatch(name.strip()):
        raise RecipeError(
            [
                Problem(
                    "is not `path=value`",
                    "write for example --set training.max_steps=50",
                    location=flag,
                )
            ]
        )
    if name.strip() == "extends":
        raise RecipeError(
            [Problem("is read before --set", "write `extends` into the recipe", "extends", flag)]
        )
    value = _read_value(raw, flag)
    *parents, last = name.strip().split(".")
    node = tree
    for depth, step in enumerate(parents):
        node = _descend(node, step, ".".join(parents[: depth + 1]), flag)
    _put(node, last, value, name.strip(), flag)


def _read_value(raw: str, flag: Location) -> Node:
    """Reads the value alone, every node of it placed at the flag."""
    if raw.strip().startswith("{{"):
        # A template, which a shell has already stripped of the quotes that YAML would want.
        return Node(raw.strip(), flag)
    try:
        wrapped = read_text(f"value: {raw}" if raw.strip() else "value: ''", flag.source)
    except RecipeError as error:
        placed = [replace(problem, location=flag) for problem in error.problems]
        raise RecipeError(placed) from None
    if len(wrapped.value) > 1:
        message = "has a line that does not belong to the value"
        fix = 'put a text of several lines in double quotes, with "\\n" between the lines; give each key a --set'
        raise RecipeError([Problem(message, fix, location=flag)])
    value = wrapped.value["value"]
    _place(value, flag)
    return value


def _place(node: Node, flag: Location) -> None:
    node.location = flag
    node.key_locations = dict.fromkeys(node.key_locations, flag)
    children = node.value.values() if isinstance(node.value, dict) else node.value
    if isinstance(node.value, dict | list):
        for child in children:
            _place(child, flag)


def _descend(node: Node, step: str, path: str, flag: Location) -> Node:
    if isinstance(node.value, list):
        return _list_item(node, step, path, flag)
    if not isinstance(node.value, dict):
        raise _no_mapping(path, flag)
    child = node.value.get(step)
    if child is None or child.value is None:
        child = Node({}, flag)
        node.value[step] = child
        node.key_locations[step] = flag
    return child


def _list_item(node: Node, step: str, path: str, flag: Location) -> Node:
    if not (step.isascii() and step.isdigit() and len(step) < 10) or int(step) >= len(node.value):
        problem = Problem(
            f"the list has {len(node.value)} entries, numbered from 0",
            f"use a number from 0 to {len(node.value) - 1}, or edit the recipe",
            path=path,
            location=flag,
        )
        raise RecipeError([problem])
    return node.value[int(step)]


def _put(node: Node, last: str, value: Node, path: str, flag: Location) -> None:
    if isinstance(node.value, list):
        _list_item(node, last, path, flag)
        node.value[int(last)] = value
    elif isinstance(node.value, dict):
        known = node.value.get(last)
        node.value[last] = merge(known, value) if known is not None else value
        node.key_locations[last] = flag
    else:
        raise _no_mapping(path, flag)


def _no_mapping(path: str, flag: Location) -> RecipeError:
    problem = Problem(
        "leads through a value that holds no keys",
        f"check the path, or set the whole of it: --set '{path.rpartition('.')[0]}={{…}}'",
        path,
        flag,
    )
    return RecipeError([problem])
