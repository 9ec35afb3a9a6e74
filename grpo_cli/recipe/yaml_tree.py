"""YAML text as a tree whose every value knows where it was written.

Owns reading scalars as a person means them (`1e-6` is a number, `no` is the word "no"), and refusing
what a recipe has no use for: tags, duplicate keys, recursive or exploding aliases, huge files.
Does not know what a recipe is.

Source: YAML 1.2 core schema, https://yaml.org/spec/1.2.2/#103-core-schema
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo_cli.errors import Location, Problem, RecipeError

MAX_BYTES = 2**20
MAX_NODES = 20_000
MAX_DEPTH = 40
MAX_DIGITS = 300

_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", "+.inf", ".Inf"), float("inf")),
    "-.inf": float("-inf"),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value")
)


@dataclass
class Node:
    """A value and where it stands. Mappings hold nodes by key, lists hold nodes."""

    value: Any
    """A scalar, a `dict[str, Node]` or a `list[Node]`."""
    location: Location
    key_locations: dict[str, Location] = field(default_factory=dict)
    """For a mapping: where each key was written."""

    def plain(self) -> Any:
        """The tree as plain Python values."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def child(self, key: str | int) -> "Node | None":
        """The node under a key or index, or None."""
        if isinstance(self.value, dict):
            return self.value.get(str(key))
        if isinstance(self.value, list) and isinstance(key, int) and key < len(self.value):
            return self.value[key]
        return None


def merge(base: Node, over: Node) -> Node:
    """Mappings merge key by key, the later wins; lists and other values replace.

    A mapping of another `kind` replaces too: the earlier one's keys would not belong to it.
    """
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    kinds = [node.value["kind"].value if "kind" in node.value else None for node in (base, over)]
    if kinds[1] is not None and kinds[0] != kinds[1]:
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, over.location, {**base.key_locations, **over.key_locations})


def read_scalar(text: str) -> Any:
    """Reads an unquoted scalar.

    `1e-6`, `.5` and `1_000` are numbers; `no`, `yes`, `on`, `off`, `12:30` and dates stay text.
    """
    if text in _SPECIAL:
        return _SPECIAL[text]
    if len(text) > MAX_DIGITS:
        return text
    if _INTEGER.fullmatch(text):
        base = {"0x": 16, "0o": 8}.get(text[:2], 10)
        return int(text.replace("_", ""), base)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def read_source(path: Path) -> str:
    """The text of a YAML file.

    Raises:
        RecipeError: The file is missing, too large, or not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _refuse(
            Location(str(path)), f"cannot be read ({error.strerror})", _missing_fix(path)
        ) from None
    if len(data) > MAX_BYTES:
        raise _refuse(
            Location(str(path)),
            f"has {len(data):,} bytes; a recipe has at most {MAX_BYTES:,}",
            "put data into files of its own and name them in `dataset`",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _refuse(
            Location(str(path), line, 1), "is not UTF-8 text", "save the file as UTF-8"
        ) from None


def read_text(text: str, source: str) -> Node:
    """Reads YAML text; `source` names it in messages.

    Raises:
        RecipeError: The text is not the YAML a recipe may hold.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_depth(text, source, loader)
        root = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        raise _refuse_syntax(error, source, text) from None
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise _refuse(Location(source), f"is not YAML ({error})", "remove that character") from None
    if root is None:
        return Node({}, Location(source, 1, 1))
    return _Builder(source).build(root, ())


def _check_depth(text: str, source: str, loader: Any) -> None:
    """Refuses deep nesting before composing, which recurses in C and would crash."""
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            depth += 1
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            mark = event.start_mark
            where = Location(source, mark.line + 1, mark.column + 1) if mark else Location(source)
            raise _refuse(where, f"is nested more than {MAX_DEPTH} deep", "flatten it")


class _Builder:
    """Turns composed YAML nodes into ours; counts them, so that aliases cannot explode."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.count = 0

    def build(self, node: yaml.Node, ancestors: tuple[int, ...]) -> Node:
        where = self._locate(node)
        self.count += 1
        if self.count > MAX_NODES:
            raise _refuse(
                where,
                f"has more than {MAX_NODES:,} values once aliases are expanded",
                "put data into files of its own and name them in `dataset`",
            )
        if id(node) in ancestors:
            raise _refuse(where, "an alias holds itself", "remove the alias")
        if len(ancestors) > MAX_DEPTH:
            raise _refuse(where, f"is nested more than {MAX_DEPTH} deep", "flatten it")
        ancestors = (*ancestors, id(node))
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, where, ancestors)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, where)
            return Node([self.build(child, ancestors) for child in node.value], where)
        return Node(self._read(node, where), where)  # type: ignore[arg-type]

    def _build_mapping(
        self, node: yaml.MappingNode, where: Location, ancestors: tuple[int, ...]
    ) -> Node:
        self._check_tag(node, where)
        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        keys: dict[str, Location] = {}
        for key_node, value_node in node.value:
            key_at = self._locate(key_node)
            key = self._read_key(key_node, key_at)
            if key == "<<" and not key_node.style:
                merged.update(self._merge(value_node, ancestors))
                continue
            if key in own:
                raise _refuse(
                    key_at,
                    f"the key `{key}` stands twice in this mapping (first in line {keys[key].line})",
                    "remove one of the two",
                )
            own[key] = self.build(value_node, ancestors)
            keys[key] = key_at
        inherited = {key: child for key, child in merged.items() if key not in own}
        keys.update({key: child.location for key, child in inherited.items()})
        return Node({**inherited, **own}, where, keys)

    def _merge(self, node: yaml.Node, ancestors: tuple[int, ...]) -> dict[str, Node]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Node] = {}
        for source in reversed(sources):
            built = self.build(source, ancestors)
            if not isinstance(built.value, dict):
                raise _refuse(
                    built.location, "`<<` merges mappings only", "name a mapping after `<<`"
                )
            merged.update(built.value)
        return merged

    def _read_key(self, node: yaml.Node, where: Location) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise _refuse(
                where,
                "a key must be a word, not a list or a mapping",
                'if this is a template, put it in quotes: "{{ question }}"',
            )
        self._check_tag(node, where)
        return str(node.value)

    def _read(self, node: yaml.ScalarNode, where: Location) -> Any:
        self._check_tag(node, where)
        return node.value if node.style else read_scalar(node.value)

    def _check_tag(self, node: yaml.Node, where: Location) -> None:
        """Refuses every tag but YAML's own plain ones, which the composer puts on untagged nodes."""
        if node.tag not in _PLAIN_TAGS:
            raise _refuse(
                where, f"has the tag `{node.tag}`", "remove the tag; recipes hold plain values"
            )

    def _locate(self, node: yaml.Node) -> Location:
        mark = node.start_mark
        return Location(self.source, mark.line + 1, mark.column + 1)


def _refuse(where: Location, message: str, fix: str) -> RecipeError:
    return RecipeError([Problem(message, fix, location=where)])


_LOOKALIKES = {"\u00a0": "no-break space", "\u2013": "dash (–)", "\u2014": "dash (—)"}
"""Characters that word processors and web pages put in the place of a space or a hyphen."""


def _refuse_syntax(error: yaml.MarkedYAMLError, source: str, text: str) -> RecipeError:
    mark = error.problem_mark or error.context_mark
    lines = text.splitlines()[max(mark.line - 1, 0) : mark.line + 1] if mark else []
    where = Location(source, mark.line + 1, mark.column + 1) if mark else Location(source)
    said = error.problem or error.context or "cannot be parsed"
    return _refuse(where, f"is not valid YAML: {said}", _syntax_fix(said, lines))


def _syntax_fix(said: str, lines: list[str]) -> str:
    for sign, name in _LOOKALIKES.items():
        if any(sign in line for line in lines):
            return f"replace the {name} in this line or the one above with a plain one"
    if "cannot start any token" in said:
        return "indent with spaces, not tabs; put text that begins with `@`, `%` or a backtick in quotes"
    if "mapping values" in said:
        return "put text that holds `: ` in quotes, or indent this line like its neighbours"
    if "document" in said:
        return "keep one YAML document in the file (remove `---`)"
    if "alias" in said:
        return "define the anchor before it is used, or put text that begins with `*` in quotes"
    return "check the indentation, brackets and quotes of this line and the one above"


def _missing_fix(path: Path) -> str:
    folder = path.parent
    if path.is_dir():
        return "name a file, not a folder"
    if not folder.is_dir():
        return f"check the path: there is no folder {folder}"
    here = sorted(other.name for other in folder.iterdir() if other.suffix in {".yaml", ".yml"})
    if not here:
        return "check the path, or write a recipe with `grpo init`"
    return f"check the name; the YAML files there are {', '.join(here[:8])}"
