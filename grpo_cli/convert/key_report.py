"""The account of a conversion: what became of every key of the source, and the recipe that grows.

Owns bookkeeping alone. Which key means what is for the dialects; how it is written is `writing.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_cli.errors import Location
from grpo_cli.recipe.explanation import Path, dotted, locate
from grpo_cli.recipe.yaml_tree import Node


@dataclass(frozen=True)
class Entry:
    """What became of one key of the source."""

    key: str
    """Dotted, as in the source."""
    location: Location
    target: str | None
    """Dotted key of the recipe; None where the key was dropped."""
    note: str
    """Why it was dropped, or how its value was translated; empty where it was taken as it is."""

    def as_json(self) -> dict[str, Any]:
        """The entry as plain values, for `--json`."""
        return {
            "key": self.key,
            "line": self.location.line or None,
            "target": self.target,
            "note": self.note or None,
        }


class Ledger:
    """A recipe in the making, beside the account of its source's keys."""

    def __init__(self, tree: Node, tool: str) -> None:
        """Starts with nothing taken.

        Args:
            tree: The source as read.
            tool: What its tool is called in messages.
        """
        self.tree = tree
        self.tool = tool
        self.recipe: dict[str, Any] = {}
        self.comments: dict[str, str] = {}
        """Dotted key of the recipe → where its value came from."""
        self.to_do: dict[str, str] = {}
        """Dotted key of the recipe → what a person has to write there."""
        self._entries: dict[Path, Entry] = {}

    @property
    def entries(self) -> list[Entry]:
        """Every key that was accounted for, in the order of the source."""
        return sorted(self._entries.values(), key=lambda entry: entry.location)

    def node(self, *key: str | int) -> Node | None:
        """What stands under a key of the source."""
        node: Node | None = self.tree
        for step in key:
            node = node.child(step) if node is not None else None
        return node

    def get(self, *key: str | int) -> Any:
        """The plain value under a key of the source; None where there is none."""
        node = self.node(*key)
        return None if node is None else node.plain()

    def is_on(self, *key: str | int) -> bool:
        """Whether a switch of the source is on; other tools' readers take `yes`, `on` and 1 for true."""
        value = self.get(*key)
        return value is True or str(value).lower() in ("yes", "on", "true", "1")

    def done(self, *key: str | int) -> bool:
        """Whether a key has been accounted for."""
        return key in self._entries

    def keep(self, key: Path, target: str, value: Any, note: str = "") -> None:
        """Puts a value into the recipe and says which key it came from."""
        put(self.recipe, target, value)
        self.credit(key, target, note)

    def credit(self, key: Path, target: str, note: str = "") -> None:
        """Accounts for a key that has its effect at `target`."""
        self._entries[key] = Entry(dotted(key), locate(self.tree, key, key=True), target, note)
        same = str(key[-1]).removeprefix("vllm_") == target.rpartition(".")[2]
        said = "" if same else dotted(key)
        text = "; ".join(part for part in (said, note) if part)
        if text:
            before = self.comments.get(target)
            self.comments[target] = f"{before}; {text}" if before else text

    def settle(self, key: Path, target: str, note: str) -> None:
        """Accounts for a key whose value is what a recipe does anyway; nothing is written for it."""
        self._entries[key] = Entry(dotted(key), locate(self.tree, key, key=True), target, note)

    def drop(self, key: Path, reason: str) -> None:
        """Accounts for a key that has no place in a recipe."""
        self._entries[key] = Entry(dotted(key), locate(self.tree, key, key=True), None, reason)

    def add(self, target: str, value: Any, note: str) -> None:
        """Puts in what the source leaves to its tool's defaults, where ours is another."""
        put(self.recipe, target, value)
        self.comments[target] = note

    def rest(self, *inside: str | int) -> Iterator[str]:
        """The keys of a mapping of the source that are still unaccounted for."""
        node = self.node(*inside)
        if node is not None and isinstance(node.value, dict):
            yield from (key for key in list(node.value) if not self.done(*inside, key))


def put(tree: dict[str, Any], target: str, value: Any) -> None:
    """Sets the value at a dotted key, making the mappings on the way."""
    *parents, last = target.split(".")
    for step in parents:
        tree = tree.setdefault(step, {})
    tree[last] = value


def find(tree: dict[str, Any], target: str) -> Any:
    """The value at a dotted key; None where there is none."""
    node: Any = tree
    for step in target.split("."):
        node = node.get(step) if isinstance(node, dict) else None
    return node
