"""The environment that a script is read in: names, what is made and changed, and branches that can be undone."""

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from grpo_cli.convert.script_values import (
    MISSING,
    Choice,
    Class,
    Frame,
    Function,
    Known,
    Object,
    Value,
    choose,
    default_of,
    known,
    unset,
)

_MOST_STEPS = 40_000
_DEEPEST = 24
"""Calls of functions inside each other that are followed."""


@dataclass(frozen=True)
class Assignment:
    """An attribute or an item of an object that is set after it was made."""

    owner: Object
    name: str
    """As in `config.use_cache`, or `[key]`."""
    value: Value
    node: ast.AST
    condition: str


class TooLongError(Exception):
    """The script has more steps than are read."""


class Environment:
    """Names and objects, and what each branch of a condition makes of them."""

    def __init__(self) -> None:
        self.module = Frame({"__name__": known(ast.Constant("__main__"), "__main__")})
        self.made: list[Object] = []
        """Every call of something that the script does not define, in order."""
        self.assignments: list[Assignment] = []
        self.functions: list[Function] = []
        """Functions of the script, in the order of their definitions."""
        self.entered: set[ast.AST] = set()
        """Functions that were called."""
        self._active: list[ast.AST] = []
        self._conditions: list[str] = []
        self._branches: list[tuple[int, int]] = []
        self._undo: list[dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]]] = []
        self._depths: dict[int, tuple[int, dict[Any, Any]]] = {}
        """How deep in branches an object was made, by the id of its attributes, which are kept."""
        self._steps = 0
        self._forks = 0

    @property
    def condition(self) -> str:
        """The conditions of the branch that is read."""
        return " and ".join(filter(None, self._conditions))

    @property
    def is_half_read(self) -> bool:
        """Whether so much has been read that loops are no longer read item by item."""
        return self._steps > _MOST_STEPS // 2

    def count_step(self) -> None:
        """Count what is read; raise TooLongError if it is too much."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise TooLongError

    def branch(
        self,
        node: ast.AST,
        arms: Sequence[tuple[str, Callable[[], str | None]]],
        default: Any = MISSING,
    ) -> list[str | None]:
        """Read branches of which one is taken; names that differ after them stand for a choice."""
        self._forks += 1
        fork, signals, results = self._forks, [], []
        for number, (condition, arm) in enumerate(arms):
            self._undo.append({})
            self._conditions.append(condition)
            self._branches.append((fork, number))
            try:
                signals.append(arm())
            finally:
                self._branches.pop()
                self._conditions.pop()
                undo = self._undo.pop()
                after = {
                    place: (target, key, target.get(key, MISSING))
                    for place, (target, key, _) in undo.items()
                }
                for target, key, value in undo.values():
                    _put(target, key, value)
            results.append((condition, after))
        alive = [
            result for result, signal in zip(results, signals, strict=True) if signal != "raise"
        ]
        touched = {place: found[:2] for _, after in alive for place, found in after.items()}
        for place, (target, key) in touched.items():
            before = target.get(key, MISSING)
            values = [
                (name, after[place][2] if place in after else before) for name, after in alive
            ]
            self._merge(node, target, key, values, default if len(alive) == len(arms) else MISSING)
        return signals

    def _merge(
        self,
        node: ast.AST,
        target: dict[Any, Any],
        key: Any,
        values: list[tuple[str, Any]],
        default: Any,
    ) -> None:
        if all(value is values[0][1] for _, value in values):
            self.store(target, key, values[0][1])
            return
        if key == "data" and all(isinstance(value, dict) for _, value in values):
            names = dict.fromkeys(name for _, value in values for name in value)
            self.store(
                target,
                key,
                {
                    name: choose(
                        node, [(test, value.get(name) or unset(node)) for test, value in values]
                    )
                    for name in names
                },
            )
            return
        if key in ("data", "is_open") and "is_open" in target:
            self.store(target, "is_open", True)
            if key == "data":
                self.store(target, key, max((value for _, value in values), key=len))
            return
        options = [(name, unset(node) if value is MISSING else value) for name, value in values]
        chosen = default_of(options[0 if default else -1][1]) if default is not MISSING else MISSING
        self.store(target, key, choose(node, options, chosen))

    def store(self, target: dict[Any, Any], key: Any, value: Any) -> None:
        """Set an item of the environment so that a branch can be undone."""
        # An object that was made in this branch is in no other one.
        if len(self._undo) > self._depths.get(id(target), (0,))[0]:
            self._undo[-1].setdefault((id(target), key), (target, key, target.get(key, MISSING)))
        _put(target, key, value)

    def set_attribute(self, owner: Value, name: str, value: Value, node: ast.AST) -> None:
        """Set an attribute of an object, and record it."""
        match owner:
            case Object():
                self.record(owner, name, name, value, node)
            case Class():
                self.store(owner.attrs, name, value)
            case Choice(options=options):
                for condition, option in options:
                    self._conditions.append(condition)
                    self.set_attribute(option, name, value, node)
                    self._conditions.pop()

    def record(self, owner: Object, key: Any, name: str, value: Value, node: ast.AST) -> None:
        """Set an attribute or item of an object, and record the assignment."""
        if name in (owner.args or {}) and key not in owner.attrs:
            # What it is in a branch that does not set it.
            owner.attrs[key] = (owner.args or {})[name]
        self.store(owner.attrs, key, value)
        self.assignments.append(Assignment(owner, name, value, node, self.condition))

    def make(
        self,
        node: ast.AST,
        name: str,
        args: dict[str, Value],
        owner: Value | None = None,
        **fields: Any,
    ) -> Object:
        """Record the call of something that the script does not define."""
        args = {key: _freeze(value) for key, value in args.items()}
        made = Object(node, name=name, args=args, owner=owner, **fields)
        made.condition, made.branches = self.condition, tuple(self._branches)
        self.made.append(made)
        self.place_in_branch(made)
        return made

    def place_in_branch(self, made: Object) -> None:
        """Record the branch that an object is made in."""
        self._depths[id(made.attrs)] = len(self._undo), made.attrs

    @contextmanager
    def enter(self, node: ast.AST) -> Iterator[bool]:
        """Enter a function; give whether it is followed: not if it calls itself, or too deep."""
        is_followed = node not in self._active and len(self._active) < _DEEPEST
        self.entered.add(node)
        self._active.append(node)
        try:
            yield is_followed
        finally:
            self._active.pop()


def _freeze(value: Value) -> Value:
    """Return a list or mapping as it is now: the script may change it later."""
    if isinstance(value, Known) and isinstance(value.data, list):
        return Known(value.node, [*map(_freeze, value.data)], value.is_open)
    if isinstance(value, Known) and isinstance(value.data, dict):
        items = {key: _freeze(item) for key, item in value.data.items()}
        return Known(value.node, items, value.is_open)
    return value


def _put(target: dict[Any, Any], key: Any, value: Any) -> None:
    if value is MISSING:
        target.pop(key, None)
    else:
        target[key] = value
