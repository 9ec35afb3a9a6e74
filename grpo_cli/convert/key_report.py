"""What became of every key of a config, the recipe built from them, and the YAML that is written."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, cast

import yaml

from grpo_cli.errors import nearest
from grpo_cli.issues import Location
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.yaml_tree import KeyPath, Node, dotted, locate, write_plain

Dialect = Literal["trl", "open-r1", "axolotl", "ms-swift"]
CONVERTIBLE = (
    "name YAML or JSON of TRL, open-r1, axolotl or ms-swift (or say whose it is with "
    "--from trl|open-r1|axolotl|ms-swift), a Python script or notebook that makes a GRPOTrainer, or a shell "
    "script that starts `trl grpo` or `swift rlhf`"
)
"""The fix for a file that cannot be converted."""
EMPTY = "empty, so the default applies"
OFF = "off, as in a recipe"


@dataclass(frozen=True)
class Entry:
    """What became of one key of the source."""

    key: str
    """Dotted, as in the source."""
    location: Location
    target: str | None
    """Dotted key of the recipe; None if the key was dropped."""
    note: str
    """Why it was dropped, or how its value was translated; empty if it was copied."""

    def as_json(self) -> dict[str, Any]:
        """Return the entry as plain values, for `--json`."""
        line, note = self.location.line or None, self.note or None
        return {"key": self.key, "line": line, "target": self.target, "note": note}


class KeyReport:
    """The recipe under construction and an entry for each key of the source.

    Keys are those of `tree`; entries and comments name the keys of `source`.
    """

    def __init__(self, tree: Node, dialect: Dialect, signs: Sequence[str] = ()) -> None:
        """Start with an empty recipe for a config; `signs` are the keys by which its tool was recognised."""
        self.source = self.tree = tree
        self.dialect, self.signs = dialect, signs
        self.tool = "TRL" if dialect == "trl" else dialect
        self.recipe: dict[str, Any] = {}
        self.comments: dict[str, str] = {}
        """Dotted key of the recipe → where its value came from."""
        self.to_do: dict[str, str] = {}
        """Dotted key of the recipe → what the user has to write there."""
        self.defaults: dict[str, Any] = {}
        """Such a key → the value that it has in the source unless somebody gives another."""
        self.unread: set[str] = set()
        """Sections of the recipe about which the source says more than was read."""
        self.notes: dict[str, str] = {}
        """Key of the source → what differs by the version of its tool."""
        self.reader = ""
        """The script that gets the keys, if it was not found."""
        self._origins: dict[str, KeyPath] = {}
        self._entries: dict[KeyPath, Entry] = {}

    @property
    def entries(self) -> list[Entry]:
        """Every key that was decided, in the order of the source."""
        return sorted(self._entries.values(), key=lambda entry: entry.location)

    @property
    def dropped(self) -> list[Entry]:
        """The keys that have no effect in the recipe, with the reasons."""
        return [entry for entry in self.entries if entry.target is None]

    def rename(self, prefixes: Mapping[str, str], names: Mapping[str, str]) -> None:
        """Bring sections to one level, with a prefix before the names of their keys, under TRL's `names`."""
        sections = [name for name in prefixes if isinstance(self.get(name), dict)]
        keys: list[KeyPath] = [(name, key) for name in sections for key in self.get(name)]
        keys += [(key,) for key in self.source.value if key not in sections]
        flat: dict[str, Node] = {}
        for key in sorted(keys, key=lambda key: self.get(*key) is None):
            name = f"{prefixes[str(key[0])] if len(key) > 1 else ''}{key[-1]}"
            name = names.get(name, name)
            if name in flat:
                self.drop(key, f"`{dotted(self._origins[name])}` is set too and takes precedence")
            else:
                self._origins[name] = key
                flat[name] = cast(Node, self.node(*key))
        for name in sections:
            self.settle((name,), "training", "its keys")
        self.tree = Node(flat, self.source.location)

    def show_as(self, key: str, name: str) -> None:
        """Name a key of the source otherwise in entries and comments."""
        self.tree.value[name] = self.tree.value[key]
        self.tree.key_locations[name] = self.tree.key_locations[key]
        self._origins[key] = (name,)

    def section(self, name: str) -> list[str]:
        """Return the keys of `tree` that were brought up from a section."""
        return [key for key, origin in self._origins.items() if origin[0] == name]

    def node(self, *key: str | int) -> Node | None:
        """Return the node of a key, or None."""
        return self.tree.find(key)

    def get(self, *key: str | int) -> Any:
        """Return the plain value of a key, or None."""
        node = self.node(*key)
        return None if node is None else node.plain()

    def is_on(self, *key: str | int) -> bool:
        """Return whether a switch is on."""
        return _is_on(self.get(*key))

    def keep(self, key: KeyPath, target: str, value: Any, note: str = "") -> None:
        """Put a value into the recipe, with a comment, and record the key that it came from."""
        if target == "generation.top_k" and value == -1:
            value, note = 0, "-1, as vLLM writes off"
        put(self.recipe, target, value)
        self.settle(key, target, note)
        origin = self.origin(key)
        same = str(origin[-1]).removeprefix("vllm_") == target.rpartition(".")[2]
        self.comment(target, "" if same else dotted(origin), note)

    def comment(self, target: str, *texts: str) -> None:
        """Add to the comment of a key of the recipe."""
        if parts := [text for text in (self.comments.get(target, ""), *texts) if text]:
            self.comments[target] = "; ".join(parts)

    def settle(self, key: KeyPath, target: str | None, note: str = "") -> None:
        """Record a key of which nothing is written: the recipe does so anyway or, without a target, cannot."""
        origin = self.origin(key)
        location = locate(self.source, origin, key=True)
        self._entries[origin] = Entry(dotted(origin), location, target, note)

    def replace_value(self, target: str, value: Any, note: str) -> None:
        """Put another value into the recipe than the source has, with the reason."""
        self.add(target, value, note)
        for key, entry in self._entries.items():
            if entry.target == target:
                self._entries[key] = replace(entry, note=note)

    def drop(self, key: KeyPath, reason: str) -> None:
        """Record a key without a place in a recipe."""
        self.settle(key, None, reason)

    def note(self, text: str, where: Location, reason: str) -> None:
        """Record a part of the source that is not a key, and has no place in a recipe."""
        cell = where.source.rpartition(", ")[2]
        line = f" ({f'{cell}:' if cell.startswith('code cell ') else 'line '}{where.line})"
        while text in self.tree.value:
            text += f":{where.column}" if line in text else line
        self.tree.value[text] = Node(None, where)
        self.tree.key_locations[text] = where
        self.drop((text,), reason)

    def add_to_do(self, target: str, text: str, unread: Iterable[str] = ()) -> None:
        """Add to what the user has to write; `unread` are sections about which the source says more."""
        self.unread |= {*unread}
        before = self.to_do.get(target)
        if before is None:
            self.to_do[target] = text
        elif text.partition("\n")[0] not in before:
            first, _, example = before.partition("\n")
            more, _, other = text.partition("\n")
            self.to_do[target] = "\n".join(filter(None, (f"{first}. {more}", example, other)))

    def drop_all(self, names: Iterable[str], reason: str) -> None:
        """Drop those of some keys that the source has, for one reason."""
        for name in names:
            if self.node(name) is not None:
                self.drop((name,), reason)

    def drop_unknown(self, key: KeyPath, known: Iterable[str]) -> None:
        """Drop a key without a counterpart, with the name that may have been meant."""
        close = nearest(str(key[-1]), {*known} - {str(key[-1])})
        hint = f"; did you mean `{close}`?" if close else ""
        what = (
            f"an argument of `{self.reader}`" if self.reader else "has no counterpart in a recipe"
        )
        self.drop(key, f"{what}{hint}")

    def add(self, target: str, value: Any, note: str) -> None:
        """Put a value that the source leaves to its tool's defaults into the recipe."""
        put(self.recipe, target, value)
        self.comments[target] = note

    def add_missing(self, target: str, value: Any, note: str) -> None:
        """Put such a value into the recipe unless it has one, or the user has to write it."""
        is_open = target.partition(".")[0] in self.unread or target in self.to_do
        if find(self.recipe, target) is None and not is_open:
            self.add(target, value, note)

    def rest(self, *inside: str | int) -> list[str]:
        """Return the keys of a mapping of the source that have no entry yet."""
        node = self.node(*inside)
        keys = node.value if node is not None and isinstance(node.value, dict) else ()
        return [key for key in keys if self.origin((*inside, key)) not in self._entries]

    def take(self, table: "Table", *inside: str | int) -> None:
        """Decide the keys of a mapping that a table knows, in the order of the table."""
        for name, rule in table.items():
            key, value = (*inside, name), self.get(*inside, name)
            if self.node(*key) is None or self.origin(key) in self._entries:
                continue
            if value is None:
                self.drop(key, EMPTY)
            elif isinstance(rule, str):
                self.keep(key, rule, value)
            else:
                rule(self, key, value)

    def origin(self, key: KeyPath) -> KeyPath:
        """Return the key of the source that a key was brought up from."""
        return (*self._origins.get(str(key[0]), key[:1]), *key[1:])


Rule = str | Callable[[KeyReport, KeyPath, Any], None]
"""The key of the recipe that takes a value as it is, or a function that decides a key with a value."""
Table = Mapping[str, Rule]
"""Keys of a tool and where they go; a key without a value is dropped as empty."""


@cache
def load_keys() -> dict[str, dict[str, Any]]:
    """Return `keys.yaml`."""
    text = resources.files("grpo_cli.convert").joinpath("keys.yaml").read_text("utf-8")
    return dict(yaml.safe_load(text))


def read_keys(name: str) -> dict[str, Any]:
    """Return a part of `keys.yaml`."""
    return load_keys()[name]


def read_words(name: str) -> dict[str, tuple[str, ...]]:
    """Return a part of `keys.yaml` whose values are names with spaces between them."""
    return {key: tuple(words.split()) for key, words in read_keys(name).items()}


def by_key(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reason of each key, from the keys of each reason."""
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


def read_table(name: str) -> Table:
    """Return a part of `keys.yaml` as rules."""
    parts = read_keys(name)
    switches = {key: switch(*rule) for key, rule in parts.get("switch", {}).items()}
    drops = {key: dropped(reason) for key, reason in by_key(parts.get("drop", {})).items()}
    if_on = {key: dropped(reason, OFF) for key, reason in by_key(parts.get("if-on", {})).items()}
    return {**parts.get("keep", {}), **switches, **drops, **if_on}


def dropped(reason: str, off: str = "") -> Rule:
    """Return a rule that drops a key; of a switch that is off, for the reason `off` if that is given."""
    return lambda report, key, value: report.drop(key, reason if _is_on(value) else off or reason)


def settled(target: str, note: str = "") -> Rule:
    """Return a rule for a key whose value is what the recipe does anyway."""
    return lambda report, key, value: report.settle(key, target, note)


def switch(target: str, value: Any = True, note: str = "") -> Rule:
    """Return a rule that writes a value if a switch is on, and nothing if it is off."""

    def take(report: KeyReport, key: KeyPath, on: Any) -> None:
        if _is_on(on):
            report.keep(key, target, value, note)
        else:
            report.settle(key, target, "off")

    return take


def _is_on(value: Any) -> bool:
    """Return whether a switch is on; other tools also read `yes`, `on` and 1 as true."""
    return str(value).lower() in ("yes", "on", "true", "1")


def put(tree: dict[str, Any], target: str, value: Any) -> None:
    """Set the value at a dotted key, making the mappings on the way."""
    *parents, last = target.split(".")
    for step in parents:
        tree = tree.setdefault(step, {})
    tree[last] = deepcopy(value)


def find(tree: dict[str, Any], target: str) -> Any:
    """Return the value at a dotted key, or None."""
    node: Any = tree
    for step in target.split("."):
        node = node.get(step) if isinstance(node, dict) else None
    return node


_WIDTH = 100
_SECTIONS = frozenset(
    """model model.lora dataset dataset.prompt generation generation.vllm generation.vllm.server_args
    training training.early_stopping launch logging""".split()
)
"""Mappings whose keys get comments of their own; others are values."""


def write_recipe(report: KeyReport, source: str) -> str:
    """Return the recipe as YAML: comments name the sources, and what was dropped is listed last."""
    head = (
        f"From {source}, a config of {report.tool}, by `grpo convert`. Comments name the key that a "
        "value came from if it had another name there; what was not taken over is listed at the end. "
        "Other values are the defaults of the installed TRL."
    )
    parts = [_comment(head)]
    for key in Recipe.model_fields:
        lines = list(_write_entry(report, key, report.recipe[key])) if key in report.recipe else []
        parts.append([*lines, *_write_to_do(report, "", key)])
    dropped = [(entry.key, entry.note) for entry in report.dropped]
    notes = list_lines("Different in earlier versions of TRL:", report.notes.items())
    return join_parts([*parts, notes, list_lines("Not taken over:", dropped)])


def join_parts(parts: Iterable[list[str]]) -> str:
    """Return parts of a YAML file with empty lines between them."""
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def list_lines(title: str, items: Iterable[tuple[str, str]]) -> list[str]:
    """Return comment lines with a title, and name and reason of each item; none without items."""
    lines = [f"#   {_flatten(f'{name}: {reason}')}" for name, reason in items]
    return [f"# {title}", *lines] if lines else []


def dump_lines(key: str, value: Any) -> list[str]:
    """Return the lines of a key's YAML; lists and mappings without others in them take one line."""
    text = write_plain({key: value}, compact=isinstance(value, dict | list))
    return text.rstrip("\n").split("\n")


def write_value(key: str, value: Any) -> str:
    """Return a key and its value as one line of YAML, or `key: …` if they need more."""
    lines = dump_lines(key, value)
    return lines[0] if len(lines) == 1 else f"{key}: …"


def _write_entry(report: KeyReport, target: str, value: Any, pad: str = "") -> Iterator[str]:
    key, comment = target.rpartition(".")[2], report.comments.get(target, "")
    if target in _SECTIONS and isinstance(value, dict) and value:
        yield from _comment(comment, pad)
        yield f"{pad}{key}:"
        for name, inner in value.items():
            yield from _write_entry(report, f"{target}.{name}", inner, f"{pad}  ")
        yield from _write_to_do(report, target, pad=f"{pad}  ")
    elif target == "rewards":
        yield "rewards:"
        for index, reward in enumerate(value):
            yield from _comment(report.comments.get(f"rewards.{index}", ""), "  ")
            text = write_plain([reward], compact=True).rstrip("\n")
            yield textwrap.indent(text, "  ")
        yield from _write_to_do(report, "rewards", pad="  ")
    else:
        lines = dump_lines(key, value)
        beside = f"   # {_flatten(comment)}" if comment and len(lines) == 1 else ""
        yield from [] if beside else _comment(comment, pad)
        yield from (f"{pad}{line}{beside}" for line in lines)


def _write_to_do(report: KeyReport, section: str, key: str = "", pad: str = "") -> Iterator[str]:
    """Yield what is to do in a section, or for a key of the recipe, below sections that are missing."""
    opened: set[str] = set()
    for target, text in report.to_do.items():
        steps = target.split(".")
        parents = [".".join(steps[:number]) for number in range(1, len(steps))]
        written = [each for each in parents if _is_block(report, each)]
        if (written or [""])[-1] != section or (key or steps[0]) != steps[0]:
            continue
        what, *example = text.split("\n")
        part = " (in part)" if find(report.recipe, target) is not None else ""
        yield from _comment(f"TO DO: {target}{part}: {what}{', such as:' if example else ''}", pad)
        for depth, parent in enumerate(parents[len(written) :] if example else ()):
            if parent not in opened:
                opened.add(parent)
                yield f"{pad}# {'  ' * depth}{steps[len(written) + depth]}:"
        indent = "  " * (len(parents) - len(written))
        yield from (f"{pad}# {indent}{_flatten(line)}" for line in example)


def _is_block(report: KeyReport, target: str) -> bool:
    """Return whether a section of the recipe is written with a line for each key."""
    return target in (*_SECTIONS, "rewards") and bool(find(report.recipe, target))


def _comment(text: str, pad: str = "") -> list[str]:
    width = _WIDTH - len(pad) - 2
    lines = textwrap.wrap(_flatten(text), width, break_long_words=False, break_on_hyphens=False)
    return [f"{pad}# {line}" for line in lines]


def _flatten(text: str) -> str:
    """Return the text on one line: values of the source may hold what ends a comment in YAML."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
