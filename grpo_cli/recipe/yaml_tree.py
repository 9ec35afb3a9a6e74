"""YAML as recipes read and write it: values know their lines, `1e-6` is a number, `no` is the word "no".

Source: YAML 1.2 core schema, https://yaml.org/spec/1.2.2/#103-core-schema
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from yaml.reader import Reader

from grpo_cli.errors import RecipeError, recipe_error, sort_by_likeness
from grpo_cli.input_files import read_input
from grpo_cli.issues import Issue, Location

KeyPath = tuple[str | int, ...]
"""Keys of mappings and indices of lists, from the root of a tree to a value."""
# Python reads numbers of up to 4300 digits; a longer one stays text.
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]{0,4000}|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null")),
    **{"true": True, "false": False, ".nan": float("nan")},
    **{".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf")},
}
_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in "str int float bool null map seq timestamp merge value".split()
)
_LOOKALIKES = {"\u00a0": "no-break space", "\u2013": "dash (–)", "\u2014": "dash (—)"}
"""Characters that word processors and web pages use instead of a space or a hyphen."""
_DATA_SUFFIXES = frozenset({".jsonl", ".csv", ".tsv", ".parquet", ".arrow"})
_SYNTAX_FIXES = (
    (
        "cannot start any token",
        "indent with spaces, not tabs; put text that begins with `@`, `%` or a backtick in quotes",
    ),
    (
        "mapping values",
        "put text that holds `: ` in quotes, or indent this line like its neighbours",
    ),
    ("end of stream", "close the quote that is opened here"),
    ("nesting depth", "write it with fewer levels"),
    ("document", "keep one YAML document in the file (remove `---`)"),
    ("alias", "define the anchor before it is used, or put text that begins with `*` in quotes"),
    (
        "escape character",
        "put text that holds a backslash, such as a pattern, in single quotes instead of double ones",
    ),
    ("", "check the indentation, brackets and quotes of this line and the one above"),
)
"""Parts of the parser's messages, and the fix; the first match counts."""


_DEEPEST = 64
"""Levels of lists and mappings inside each other."""
_MOST_REPEATED = 100_000
"""Values that aliases may add to those that a text holds."""


@dataclass
class Node:
    """A value and where it stands. Mappings hold nodes by key, lists hold nodes."""

    value: Any
    """A scalar, a `dict[str, Node]` or a `list[Node]`."""
    location: Location
    key_locations: dict[str, Location] = field(default_factory=dict)
    """For a mapping: where each key was written."""
    style: str | None = None
    """Of a scalar: its quote, or the mark of its block; None if it has none."""
    comment: str = ""
    """Of a scalar without quotes: the comment behind it."""

    def plain(self) -> Any:
        """Return the tree as plain Python values."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def child(self, key: str | int) -> "Node | None":
        """Return the node under a key or index, or None."""
        child: Node | None = None
        if isinstance(self.value, dict):
            child = self.value.get(str(key))
        elif isinstance(self.value, list) and isinstance(key, int) and key < len(self.value):
            child = self.value[key]
        return child

    def find(self, path: Iterable[str | int]) -> "Node | None":
        """Return the node at a path, or None."""
        node: Node | None = self
        for step in path:
            node = node.child(step) if node is not None else None
        return node


def as_node(value: Any, where: Location) -> Node:
    """Return a plain value as a tree, of which all stands in one place."""
    if isinstance(value, dict):
        return Node({str(key): as_node(each, where) for key, each in value.items()}, where)
    if isinstance(value, list | tuple | set):
        return Node([as_node(each, where) for each in value], where)
    return Node(value, where)


def dotted(path: Iterable[str | int]) -> str:
    """Return `("rewards", 0, "kind")` as `rewards.0.kind`."""
    return ".".join(map(str, path))


def split_path(path: str) -> KeyPath:
    """Return `rewards.0.kind` as `("rewards", 0, "kind")`."""
    return tuple(
        int(step) if step.isascii() and step.isdigit() else step for step in path.split(".")
    )


def locate(tree: Node, path: KeyPath, *, key: bool = False) -> Location:
    """Return where the value (or its key) stands; the nearest ancestor's place if it was not written."""
    node = tree
    for depth, step in enumerate(path, 1):
        child = node.child(step)
        if child is None:
            break
        if key and depth == len(path):
            return node.key_locations.get(str(step), child.location)
        node = child
    return node.location


def merge(base: Node, over: Node) -> Node:
    """Merge mappings key by key, the later wins; lists and other values replace.

    A mapping of another `kind` replaces too: the earlier one's keys would not belong to it.
    """
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    old, new = (node.value["kind"].value if "kind" in node.value else None for node in (base, over))
    if new is not None and new != old:
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, over.location, {**base.key_locations, **over.key_locations})


def read_scalar(text: str) -> Any:
    """Read an unquoted scalar.

    `1e-6`, `.5` and `1_000` are numbers; `no`, `yes`, `on`, `off`, `12:30` and dates stay text.
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""), {"0x": 16, "0o": 8}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def read_source(path: Path) -> str:
    """Return the text of a YAML file.

    Raises:
        RecipeError: The file is missing, not UTF-8, or holds data.
    """
    if path.suffix in _DATA_SUFFIXES and path.is_file():
        fix = "name it as `train` of a recipe's `dataset` (`kind: files`); `grpo init` writes a recipe"
        raise recipe_error("is a file of data, not YAML", fix, location=Location(str(path)))
    try:
        data = read_input(path)
        text = data.decode("utf-8-sig")
    except OSError as error:
        message = f"cannot be read ({error.strerror})"
        raise recipe_error(message, _missing_fix(path), location=Location(str(path))) from None
    except UnicodeDecodeError as error:
        where = Location(str(path), data[: error.start].count(b"\n") + 1, 1)
        raise recipe_error("is not UTF-8 text", "save the file as UTF-8", location=where) from None
    return text


def read_text(
    text: str, source: str, *, has_lines: bool = True, repeated: list[Issue] | None = None
) -> Node:
    """Read YAML text.

    Args:
        text: The YAML.
        source: Its name in messages: a path, or a flag.
        has_lines: Whether messages name lines of it; a flag has none.
        repeated: Receives an issue for each key that stands twice, the values of which are merged. Without
            it, they are raised.

    Raises:
        RecipeError: The text is not the YAML a recipe may hold.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    reader = _Reader(source, has_lines, text.splitlines())
    try:
        root = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if error.context_mark and "end of stream" in (error.problem or ""):
            mark = error.context_mark
        lines = text.splitlines()[max(mark.line - 1, 0) : mark.line + 1] if mark else []
        problem = error.problem or error.context or "cannot be parsed"
        message = f"is not valid YAML: {problem}"
        for number, line in enumerate(lines, max(mark.line, 1) if mark else 1):
            glued = re.fullmatch(r"\s*(\w+):([^\s/:].*)", line)
            if has_lines and glued and "':'" in problem:
                where = Location(source, number, glued.start(1) + 1)
                fix = f"put a space after the colon: `{glued[1]}: {glued[2]}`"
                raise recipe_error(message, fix, location=where) from None
        raise recipe_error(
            message, _syntax_fix(problem, lines), location=reader.locate(mark)
        ) from None
    except RecursionError:
        raise _too_deep(Location(source)) from None
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        sign = Reader.NON_PRINTABLE.search(text)
        if sign is None:
            message, where = f"is not YAML ({error})", Location(source)
        else:
            before = text[: sign.start()]
            column = sign.start() - before.rfind("\n")
            where = (
                Location(source, before.count("\n") + 1, column) if has_lines else Location(source)
            )
            message = f"holds the character U+{ord(sign[0]):04X}, which YAML does not allow"
        raise recipe_error(message, "remove that character", location=where) from None
    if root is None:
        return Node({}, Location(source, 1, 1) if has_lines else Location(source))
    tree = reader.read(root)
    if repeated is None and reader.repeated:
        raise RecipeError(reader.repeated)
    if repeated is not None:
        repeated += reader.repeated
    return tree


class _Reader:
    def __init__(self, source: str, has_lines: bool, lines: list[str]) -> None:
        self._source, self._has_lines, self._lines = source, has_lines, lines
        self.repeated: list[Issue] = []
        """Keys that stand twice in a mapping."""
        self._open: list[yaml.Node] = []
        """The lists and mappings that the value being read lies in."""
        # Without aliases a text has fewer values than characters.
        self._left = sum(map(len, lines)) + len(lines) + _MOST_REPEATED

    def locate(self, mark: Any) -> Location:
        if mark is None or not self._has_lines:
            return Location(self._source)
        return Location(self._source, mark.line + 1, mark.column + 1)

    def read(self, node: yaml.Node) -> Node:
        """Read a node, and what an alias stands for each time anew."""
        where = self.locate(node.start_mark)
        self._left -= 1
        if self._left < 0:
            fix = "write out what differs, and keep the rows of a dataset in a file"
            seen = f"its aliases repeat more than {_MOST_REPEATED:,} values"
            raise recipe_error(seen, fix, location=where)
        if any(node is outer for outer in self._open):
            fix = "remove the alias (`*name`), or write out the part that is meant"
            raise recipe_error("the value of this anchor holds itself", fix, location=where)
        if len(self._open) == _DEEPEST:
            raise _too_deep(where)
        self._open.append(node)
        try:
            return self._read(node, where)
        finally:
            self._open.pop()

    def _read(self, node: yaml.Node, where: Location) -> Node:
        if node.tag not in _PLAIN_TAGS:
            fix = "remove the tag; recipes hold plain values"
            raise recipe_error(f"has the tag `{node.tag}`", fix, location=where)
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, where)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.read(child) for child in node.value], where)
        if node.style:  # type: ignore[attr-defined]
            return Node(node.value, where, style=node.style)  # type: ignore[attr-defined]
        end = node.end_mark
        rest = self._lines[end.line][end.column :] if end.line < len(self._lines) else ""
        comment = rest.strip() if re.match(r"\s+#", rest) else ""
        return Node(read_scalar(node.value), where, comment=comment)

    def _read_mapping(self, node: yaml.MappingNode, where: Location) -> Node:
        inherited: dict[str, Node] = {}
        own: dict[str, Node] = {}
        keys: dict[str, Location] = {}
        for key_node, value_node in node.value:
            key, key_at = str(key_node.value), self.locate(key_node.start_mark)
            if key.strip(" ").startswith("\u00a0"):
                fix = "replace them with plain spaces, in the lines below too"
                raise recipe_error(
                    "is indented with no-break spaces (U+00A0)", fix, location=key_at
                )
            if not isinstance(key_node, yaml.ScalarNode):
                fix = 'if this is a template, put it in quotes: "{{ question }}"'
                raise recipe_error(
                    "a key must be a word, not a list or a mapping", fix, location=key_at
                )
            if key == "<<" and not key_node.style:
                inherited |= self._read_merged(value_node)
            elif key in own:
                message = f"the key `{key}` stands twice in this mapping"
                if keys[key].line:
                    message += f" (first in line {keys[key].line})"
                fix = "remove one of the two"
                if isinstance(value_node, yaml.MappingNode) and isinstance(own[key].value, dict):
                    fix = f"move its keys into the first `{key}`, and remove the second"
                self.repeated.append(Issue(message, fix, location=key_at))
                # Read on with what the file means once it is corrected.
                own[key] = merge(own[key], self.read(value_node))
            else:
                own[key], keys[key] = self.read(value_node), key_at
        keys = {key: child.location for key, child in inherited.items()} | keys
        return Node(inherited | own, where, keys)

    def _read_merged(self, node: yaml.Node) -> dict[str, Node]:
        """Read what `<<` merges: a mapping, or a list of them, of which the first wins."""
        merged: dict[str, Node] = {}
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in reversed(sources):
            mapping = self.read(source)
            if not isinstance(mapping.value, dict):
                fix = "name a mapping after `<<`"
                raise recipe_error("`<<` merges mappings only", fix, location=mapping.location)
            merged |= mapping.value
        return merged


def _too_deep(where: Location) -> RecipeError:
    seen = f"more than {_DEEPEST} lists or mappings stand inside each other"
    return recipe_error(seen, "write it with fewer levels", location=where)


def _syntax_fix(problem: str, lines: list[str]) -> str:
    for sign, name in _LOOKALIKES.items():
        if any(sign in line for line in lines):
            return f"replace the {name} in this line or the one above with a plain one"
    if any("\t" in line[: len(line) - len(line.lstrip())] for line in lines):
        return "indent this line and the one above with spaces, not tabs"
    return next(fix for part, fix in _SYNTAX_FIXES if part in problem)


def _missing_fix(path: Path) -> str:
    if path.is_dir():
        return "name a file, not a folder"
    if not path.parent.is_dir():
        return f"check the path: there is no folder {path.parent}"
    beside = sort_by_likeness(
        path.name,
        sorted(
            each.name
            for each in path.parent.iterdir()
            if each.suffix in {".yaml", ".yml"} and each != path
        ),
    )
    if not beside:
        return "check the path, or write a recipe with `grpo init`"
    return f"check the name; the YAML files there are {', '.join(beside[:8])}"


def write_plain(value: Any, *, compact: bool = False) -> str:
    """Return the YAML of plain values, which this reader and PyYAML both read as these values.

    Args:
        value: Mappings, lists, texts, numbers, truth values and None.
        compact: Whether a list or mapping that holds no other one stands on one line.
    """
    return _dump(value, width=100, default_flow_style=None if compact else False)


def write_yaml(recipe: BaseModel) -> str:
    """Return the YAML that reads as this recipe, wherever its file is: what differs from the defaults."""
    return write_plain(recipe.model_dump(mode="json", exclude_defaults=True))


def write_expect(expect: BaseModel) -> str:
    """Return the `expect` block as lines for a recipe's end: one metric a line, one fact a line."""
    plain = expect.model_dump(mode="json", exclude_defaults=True)
    lines = ["expect:", "  metrics:", *(f"    - {_write_line(each)}" for each in plain["metrics"])]
    if "measured" in plain:
        facts = plain["measured"].items()
        lines += ["  measured:", *(f"    {name}: {_write_line(value)}" for name, value in facts)]
    return "\n".join(lines) + "\n"


def _write_line(value: Any) -> str:
    # YAML ends a lone scalar with a line of its own.
    return _dump(value, width=10**6, default_flow_style=True).removesuffix("...\n").strip()


def _dump(value: Any, **options: Any) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options)
    return text


class _Dumper(yaml.SafeDumper):
    """Indents lists below their key, and writes texts of several lines as such."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)

    def represent_text(self, text: str) -> yaml.Node:
        style = None
        if not text.replace("\n", "").isprintable():
            # Other separators of lines among them, which every other style would take for such.
            style = '"'
        elif "\n" in text:
            style = "|" if "\n" in text.strip("\n") else '"'
        elif not isinstance(read_scalar(text), str):
            # PyYAML's own rules miss `1e-6`.
            style = "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
