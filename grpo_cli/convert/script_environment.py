"""The environment of a Python script: names, objects, branches, and what it makes and changes."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_cli.convert.script_values import MISSING, Choice, Class, Frame, Literal, Object, Value

_MOST_STEPS = 40_000


@dataclass(frozen=True, eq=False)
class Assignment:
    """An attribute or an item of an object that is set after the object was made."""

    owner: Value
    name: str
    """As in `config.use_cache`, or `[key]`."""
    key: Any
    """Where the object has the value."""
    value: Value
    node: ast.AST
    condition: str


class TooLongError(Exception):
    """The script has more steps than are read."""


class Environment:
    """Keeps what branches change apart until they meet, and records calls and assignments."""

    def __init__(self) -> None:
        self.module = Frame({"__name__": Literal.of(ast.Constant("__main__"), "__main__")})
        self.made: list[Object] = []
        """Every call of something that the script does not define, in order."""
        self.assignments: list[Assignment] = []
        self.values: dict[ast.AST, list[Value]] = {}
        """Every expression that was read, with the values that it had."""
        self.tests: dict[str, Value] = {}
        """Conditions of branches, as code, with their values."""
        self._conditions: list[str] = []
        self._undo: list[dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]]] = []
        """For each open branch, what it changed: mapping, key and the value before."""
        self._steps = 0

    @property
    def condition(self) -> str:
        """The conditions of the branch that is read."""
        return " and ".join(filter(None, self._conditions))

    def count_step(self) -> None:
        """Count what is read; raise TooLongError if it is too much."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise TooLongError

    def branch(
        self, node: ast.AST, arms: Sequence[tuple[str, Callable[[], str | None]]]
    ) -> list[str | None]:
        """Read branches, of which one is taken; what differs after those that go on is a choice."""
        signals: list[str | None] = []
        ends: list[tuple[str, dict[tuple[int, Any], Any]]] = []
        touched: dict[tuple[int, Any], tuple[dict[Any, Any], Any]] = {}
        for condition, arm in arms:
            self._undo.append({})
            self._conditions.append(condition)
            signal: str | None = "raise"
            try:
                signal = arm()
            finally:
                self._conditions.pop()
                undo = self._undo.pop()
                after = {place: each[0].get(each[1], MISSING) for place, each in undo.items()}
                for target, key, before in undo.values():
                    put_back(target, key, before)
            signals.append(signal)
            if signal in (None, "loop"):  # a loop that it leaves goes on after it
                ends.append((condition, after))
                touched |= {place: each[:2] for place, each in undo.items()}
        for place, (target, key) in sorted(touched.items(), key=lambda each: each[1][1] != "rest"):
            before = target.get(key, MISSING)
            options = [(condition, after.get(place, before)) for condition, after in ends]
            self._merge(node, target, key, options)
        return signals

    def _merge(
        self, node: ast.AST, target: dict[Any, Any], key: Any, options: list[tuple[str, Any]]
    ) -> None:
        """Set an item to what it may be: the value of a name, or the content of a list or mapping."""
        values = [value for _, value in options]
        if all(value is values[0] for value in values):
            self.store(target, key, values[0])
        elif all(isinstance(value, Value) or value is MISSING for value in values):
            filled = [
                (test, Choice.unset(node) if each is MISSING else each) for test, each in options
            ]
            self.store(target, key, Choice.of(node, filled))
        elif key == "data" and all(isinstance(value, dict) for value in values):
            self.store(target, key, Choice.merge(node, options))
        elif key == "rest":
            self.store(target, key, (*dict.fromkeys(each for value in values for each in value),))
        else:
            self.store(target, "rest", (*target["rest"], Object(node)))
            self.store(target, key, max(values, key=len))

    def store(self, target: dict[Any, Any], key: Any, value: Any, depth: int = 0) -> None:
        """Set an item of what was made inside `depth` branches, so that the others can be undone."""
        if len(self._undo) > depth:
            before = target.get(key, MISSING)
            self._undo[-1].setdefault((id(target), key), (target, key, before))
        put_back(target, key, value)

    def set_attribute(self, owner: Value, name: str, value: Value, node: ast.AST) -> None:
        """Set an attribute of an object, and record it."""
        match owner := Choice.only(owner):
            case Object(args=args, attrs=attrs):
                if args is not None and name in args and name not in attrs:
                    attrs[name] = args[name]  # what it is in a branch that does not set it
                self.record(owner, name, name, value, node)
            case Class():
                self.store(owner.attrs, name, value)

    def record(self, owner: Object, key: Any, name: str, value: Value, node: ast.AST) -> None:
        """Set an attribute or item of an object, and record the assignment."""
        self.store(owner.attrs, key, value, owner.depth)
        self.assignments.append(Assignment(owner, name, key, value, node, self.condition))

    def make(
        self, node: ast.AST, name: str, args: dict[str, Value], owner: Value | None = None
    ) -> Object:
        """Record the call of something that the script does not define."""
        made = Object(node, name, owner, {key: _freeze(value) for key, value in args.items()})
        made.condition, made.depth = self.condition, len(self._undo)
        self.made.append(made)
        return made


def _freeze(value: Value) -> Value:
    """Return a list or mapping as it is now: the script may change it later."""
    if isinstance(value, Literal) and isinstance(value.data, list):
        return replace(value, data=[*map(_freeze, value.data)])
    if isinstance(value, Literal) and isinstance(value.data, dict):
        items = {key: _freeze(item) for key, item in value.data.items()}
        return replace(value, data=items)
    return value


def put_back(target: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an item of the environment to what it was."""
    if value is MISSING:
        target.pop(key, None)
    else:
        target[key] = value
