"""Texts that YAML reads otherwise than they look, and keys that `grpo convert` left to write."""

import re
from collections.abc import Iterator

from grpo_cli.checks.context import CheckContext
from grpo_cli.issues import Issue, Location
from grpo_cli.recipe.explanation import Path, dotted, split_path
from grpo_cli.recipe.yaml_tree import Node

_PROMPTS = frozenset({"user", "system", "rubric", "chat_template"})

_PATTERNS = frozenset({"regex", "pattern"})

_LATEX = re.compile(r"(?<!\\)(?:\\\\)*\\(boxed|begin|frac|text)(?![a-z])")
"""Commands of LaTeX whose backslash a regular expression reads with the letter after it."""

_HIDDEN = re.compile(r"#\S")
"""How a comment begins that may be text: after the sign of most others comes a space."""

_LINE_BREAK = re.compile(r"\\n(?![a-z])")
r"""Two characters that mean a line break in double quotes; not the beginning of `\neq`."""

_ESCAPED = re.compile(r"[\b\f]|\t(?=ext|imes|heta|frac)|\r(?=ight|ho)")
r"""What YAML makes of `\b`, of `\boxed`, `\frac` and `\text` in double quotes."""

_TO_DO = re.compile(r" *# TO DO: ([\w.]+)( \(in part\))?: ")

_SIGNS = {"\b": r"\b", "\f": r"\f", "\t": r"\t", "\r": r"\r"}


def check_to_do(context: CheckContext) -> Iterator[Issue]:
    """Find lines of `grpo convert` that say what a person has to write, or to compare with the source."""
    tree = context.loaded.tree
    for number, line in enumerate(context.loaded.text.splitlines(), 1):
        left = _TO_DO.match(line)
        if left and (left[2] or tree.find(split_path(left[1])) is None):
            seen = (
                "is still to be written, as the comment `TO DO` says: training would run without it"
            )
            fix = "write it, or delete the comment"
            if left[2]:
                seen = "is converted in part, as the comment `TO DO` says"
                fix = "compare it with the source, then delete the comment"
            place = Location(tree.location.source, number, line.index("#") + 1)
            yield Issue(seen, fix, left[1], place)


def check_texts(context: CheckContext) -> Iterator[Issue]:
    """Find texts that are cut by a comment, and backslashes that are read otherwise."""
    yield from _find_texts(context.loaded.tree, ())


def _find_texts(node: Node, path: Path) -> Iterator[Issue]:
    if isinstance(node.value, dict | list):
        entries = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        for key, child in entries:
            yield from _find_texts(child, (*path, key))
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
    if found := _ESCAPED.search(node.value):
        sign = _SIGNS[found[0]]
        seen = f"{node.value!r:.60} holds a control character: in double quotes, YAML reads {sign} as one"
        fix = f"write the text in single quotes: '…{sign}…'"
        yield Issue(seen, fix, where, level="warning")
    if path[-1] in _PATTERNS and (command := _LATEX.search(node.value)):
        letter, name = command[1][0], command[1]
        seen = f"`\\{letter}` before `{name[1:]}` is a sign of regular expressions, so it never matches \\{name}"
        yield Issue(seen, f"write `\\\\{name}` (in single quotes)", where, level="warning")
