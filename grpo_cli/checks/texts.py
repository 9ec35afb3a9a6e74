"""Prompts and patterns of which YAML reads something else than is meant."""

import re
from collections.abc import Iterator

from grpo_cli.issues import Issue
from grpo_cli.recipe.explanation import Path, dotted
from grpo_cli.recipe.yaml_tree import Node

_PROMPTS = frozenset({"user", "system", "rubric", "chat_template"})
_PATTERNS = frozenset({"regex", "pattern"})
_HIDDEN = re.compile(r"#\S")
"""How a comment begins that may be text: after the sign of most others comes a space."""
_LINE_BREAK = re.compile(r"\\n(?![a-z])")
r"""Two characters that mean a line break in double quotes; not the beginning of `\neq`."""


def check_texts(node: Node, path: Path = ()) -> Iterator[Issue]:
    """Find prompts and patterns that are cut by a comment, or whose backslashes are read otherwise than meant."""
    if isinstance(node.value, dict | list):
        entries = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        for key, child in entries:
            yield from check_texts(child, (*path, key))
    elif isinstance(node.value, str) and path and path[-1] in _PROMPTS | _PATTERNS:
        yield from _check_text(node, path)


def _check_text(node: Node, path: Path) -> Iterator[Issue]:
    where, end = dotted(path), node.value[-30:]
    if _HIDDEN.match(node.comment):
        seen = f"` #` begins a comment, so the text ends with {end!r}, without {node.comment!r:.60}"
        yield Issue(seen, "put the whole text in quotes", where, level="warning")
    if path[-1] in _PROMPTS and node.style in (None, "'") and _LINE_BREAK.search(node.value):
        seen = r"holds a backslash and an n, which are a line break in double quotes alone"
        fix = "put the text in double quotes, or write it as a block (`|`)"
        yield Issue(seen, fix, where, level="warning")
    if path[-1] in _PATTERNS and "\b" in node.value:
        seen = f"{node.value!r:.60} holds a backspace: in double quotes, YAML reads \\b as that character"
        fix = "write the pattern in single quotes: '…\\b…'"
        yield Issue(seen, fix, where, level="warning")
