"""The environment of a Python script (names, objects, branches), and the values of its expressions."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_cli.convert.script_values import (
    MISSING,
    OPERATORS,
    Choice,
    Class,
    Frame,
    Function,
    Literal,
    Object,
    Value,
    choose,
    code_of,
    compute,
    default_of,
    literal,
    merge,
    negate,
    plain,
    unset,
)

_MOST_STEPS = 40_000
_MOST_ITEMS = 64


@dataclass(frozen=True, eq=False)
class Assignment:
    """An attribute or an item of an object that is set after the object was made."""

    owner: Value
    name: str
    """As in `config.use_cache`, or `[key]`."""
    value: Value
    node: ast.AST
    condition: str


class TooLongError(Exception):
    """The script has more steps than are read."""


class Expressions:
    """Evaluates expressions, and keeps what branches change apart until they meet."""

    def __init__(self) -> None:
        self.module = Frame({"__name__": literal(ast.Constant("__main__"), "__main__")})
        self.made: list[Object] = []
        """Every call of something that the script does not define, in order."""
        self.assignments: list[Assignment] = []
        self._conditions: list[str] = []
        self._undo: list[dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]]] = []
        """For each open branch, what it changed: mapping, key and the value before."""
        self._steps = 0

    def call(self, node: ast.Call, frame: Frame) -> Value:
        """Return the result of a call."""
        raise NotImplementedError

    def call_value(
        self, node: ast.AST, function: Value, positional: list[Value], keywords: dict[str, Value]
    ) -> Value:
        """Return the result of a function for arguments."""
        raise NotImplementedError

    # The environment.

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
                    _put(target, key, before)
            signals.append(signal)
            if signal is None:
                ends.append((condition, after))
                touched |= {place: each[:2] for place, each in undo.items()}
        for place, (target, key) in touched.items():
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
            filled = [(test, unset(node) if each is MISSING else each) for test, each in options]
            self.store(target, key, choose(node, filled))
        elif key == "data" and all(isinstance(value, dict) for value in values):
            self.store(target, key, merge(node, options))
        elif key == "rest":
            self.store(target, key, (*dict.fromkeys(each for value in values for each in value),))
        else:
            self.store(target, "is_open", True)
            if key == "data":
                self.store(target, key, max(values, key=len))

    def store(self, target: dict[Any, Any], key: Any, value: Any, depth: int = 0) -> None:
        """Set an item of the environment so that a branch can be undone.

        Args:
            depth: The number of branches inside which the target was made: the others cannot see it.
        """
        if len(self._undo) > depth:
            before = target.get(key, MISSING)
            self._undo[-1].setdefault((id(target), key), (target, key, before))
        _put(target, key, value)

    def set_attribute(self, owner: Value, name: str, value: Value, node: ast.AST) -> None:
        """Set an attribute of an object, and record it."""
        match owner:
            case Object(args=args, attrs=attrs):
                if args is not None and name in args and name not in attrs:
                    attrs[name] = args[name]  # what it is in a branch that does not set it
                self.record(owner, name, name, value, node)
            case Class():
                self.store(owner.attrs, name, value)

    def record(self, owner: Object, key: Any, name: str, value: Value, node: ast.AST) -> None:
        """Set an attribute or item of an object, and record the assignment."""
        self.store(owner.attrs, key, value, owner.depth)
        self.assignments.append(Assignment(owner, name, value, node, self.condition))

    def make(
        self, node: ast.AST, name: str, args: dict[str, Value], owner: Value | None = None
    ) -> Object:
        """Record the call of something that the script does not define."""
        made = Object(node, name, owner, {key: _freeze(value) for key, value in args.items()})
        made.condition, made.depth = self.condition, len(self._undo)
        self.made.append(made)
        return made

    # Expressions.

    def evaluate(self, node: ast.expr, frame: Frame) -> Value:
        """Return the value of an expression."""
        self.count_step()
        match node:
            case ast.Constant(value=value):
                return Literal(node, value)
            case ast.Name(id=name):
                return self._look_up(node, name, frame)
            case ast.Call():
                return self.call(node, frame)
            case ast.Attribute(value=owner, attr=name):
                return self.get_attribute(node, self.evaluate(owner, frame), name)
            case ast.Subscript(value=owner, slice=key):
                return self.get_item(node, self.evaluate(owner, frame), self.evaluate(key, frame))
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                items, rest = self.collect(elements, frame)
                return Literal(
                    node, tuple(items) if isinstance(node, ast.Tuple) else items, rest=rest
                )
            case ast.Dict():
                return self._collect_mapping(node, frame)
            case ast.JoinedStr(values=pieces):
                texts = [self.evaluate(piece, frame) for piece in pieces]
                return self.lift(node, lambda *values: "".join(map(str, values)), texts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.evaluate(value, frame)
            case ast.BinOp(left=left, op=operator, right=right):
                return self.operate(
                    node, operator, self.evaluate(left, frame), self.evaluate(right, frame)
                )
            case ast.UnaryOp(op=operator, operand=operand):
                inner = self.evaluate(operand, frame)
                return self.lift(node, OPERATORS.get(type(operator)), [inner])
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                return self._compare(node, operator, left, right, frame)
            case ast.BoolOp(op=operator, values=values):
                return self._combine(node, isinstance(operator, ast.Or), values, frame)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                data, code = plain(self.evaluate(test, frame)), code_of(test)
                if data is not MISSING:
                    return self.evaluate(body if data else orelse, frame)
                arms = [
                    (code, self.evaluate(body, frame)),
                    (negate(code), self.evaluate(orelse, frame)),
                ]
                return choose(node, arms)
            case ast.Lambda():
                return Function(node, frame=frame)
            case ast.NamedExpr(target=target, value=value):
                result = self.evaluate(value, frame)
                self.assign(target, result, frame, node)
                return result
            case ast.Await(value=value) | ast.Starred(value=value):
                return self.evaluate(value, frame)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehend(node, frame)
        children = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        return Object(node, parts=tuple(self.evaluate(each, frame) for each in children))

    def _look_up(self, node: ast.AST, name: str, frame: Frame | None) -> Value:
        """Return the value of a name; one that the script does not define stands for itself."""
        while frame is not None:
            value = frame.names.get(name, MISSING)
            if value is not MISSING:
                return value
            frame = frame.parent
        return Object(node, name=name)

    def lift(
        self, node: ast.AST, function: Callable[..., Any] | None, values: Sequence[Value]
    ) -> Value:
        """Return the result of a pure function; unknown if one of the values is."""
        default = MISSING
        if function is not None:
            result = compute(function, [plain(value) for value in values])
            if result is not MISSING:
                return literal(node, result)
            default = compute(function, [default_of(value) for value in values])
        return Object(node, parts=tuple(values), default=default)

    def items_of(self, value: Value) -> list[Value] | None:
        """Return the items of a list or the keys of a mapping that is known, or None."""
        match value:
            case Literal(is_complete=True, data=list() | tuple() | set() as data):
                return [*data]
            case Literal(is_complete=True, data=dict() as data):
                return [literal(value.node, key) for key in data]
        return None

    def collect(
        self, elements: list[ast.expr], frame: Frame
    ) -> tuple[list[Value], tuple[Value, ...]]:
        """Return the items of a list or the arguments of a call, and the values of `*` that are not known."""
        items: list[Value] = []
        rest: tuple[Value, ...] = ()
        for element in elements:
            value = self.evaluate(element, frame)
            inner = self.items_of(value) if isinstance(element, ast.Starred) else [value]
            items += inner or []
            rest += () if inner is not None else (value,)
        return items, rest

    def _collect_mapping(self, node: ast.Dict, frame: Frame) -> Value:
        mapping = Literal(node, {})
        for key, value in zip(node.keys, node.values, strict=True):
            item = self.evaluate(value, frame)
            name = plain(self.evaluate(key, frame)) if key is not None else MISSING
            if key is None:
                mapping = self.spread(mapping, item)
            elif _is_key(name):
                mapping.data[name] = item
            else:
                mapping.rest += (item,)
        return mapping

    def spread(self, mapping: Literal, value: Value) -> Literal:
        """Return a mapping with the items of another value, of which one or more may be known."""
        node, rest, is_open = mapping.node, mapping.rest, mapping.is_open
        options = value.options if isinstance(value, Choice) else (("", value),)
        merged: list[tuple[str, dict[Any, Value]]] = []
        for test, option in options:
            inner = self.mapping_of(option)
            if inner is not None:
                is_open = is_open or inner.is_open
                rest += inner.rest or ((value,) if inner.is_open else ())
            elif plain(option) is not None and getattr(option, "name", "") != "unset":
                rest += (value,)
            merged.append((test, {**mapping.data, **(inner.data if inner else {})}))
        return Literal(node, merge(value.node, merged), is_open, (*dict.fromkeys(rest),))

    def operate(self, node: ast.AST, operator: ast.operator, left: Value, right: Value) -> Value:
        """Return the result of an operator; of `|`, what is known of the mapping."""
        mapping = self.mapping_of(left) if isinstance(operator, ast.BitOr) else None
        if mapping is not None:
            return self.spread(Literal(node, mapping.data, mapping.is_open, mapping.rest), right)
        return self.lift(node, OPERATORS.get(type(operator)), [left, right])

    def mapping_of(self, value: Value) -> Literal | None:
        """Return the mapping that `**` passes on of a value, or None."""
        match value:
            case Literal(data=dict()):
                return value
            case Object(cls=Class() as cls, attrs=attrs):
                names = dict.fromkeys(
                    each for each in (*cls.fields, *attrs) if isinstance(each, str)
                )
                data = {name: self.get_attribute(value.node, value, name) for name in names}
                return Literal(value.node, data)
        return None

    def _compare(
        self, node: ast.AST, operator: ast.cmpop, left: ast.expr, right: ast.expr, frame: Frame
    ) -> Value:
        pair = [self.evaluate(left, frame), self.evaluate(right, frame)]
        is_value = isinstance(pair[0], Function | Class) or (
            isinstance(pair[0], Literal) and pair[0].data is not None
        )
        if isinstance(operator, ast.Is | ast.IsNot) and plain(pair[1]) is None and is_value:
            return literal(node, isinstance(operator, ast.IsNot))
        return self.lift(node, OPERATORS.get(type(operator)), pair)

    def _combine(self, node: ast.AST, is_or: bool, values: list[ast.expr], frame: Frame) -> Value:
        results: list[Value] = []
        for value in values:
            result = self.evaluate(value, frame)
            data = plain(result)
            is_end = data is not MISSING and bool(data) == is_or
            if data is MISSING or is_end or value is values[-1]:
                results.append(result)
            if is_end:
                break
        if len(results) == 1:
            return results[0]

        def pick(*operands: Any) -> Any:
            return next((each for each in operands if bool(each) == is_or), operands[-1])

        return self.lift(node, pick, results)

    def _comprehend(self, node: ast.AST, frame: Frame) -> Value:
        """Return the items of a list over known items; of anything else, what it is computed from."""
        generators = node.generators  # type: ignore[attr-defined]
        source = self.evaluate(generators[0].iter, frame)
        items = self.items_of(source)
        inside = Frame({}, parent=frame)
        is_list = isinstance(node, ast.ListComp) and len(generators) == 1
        if is_list and items is not None and len(items) <= _MOST_ITEMS:
            results: list[Value] = []
            for item in items:
                self.assign(generators[0].target, item, inside, node)
                tests = [plain(self.evaluate(test, inside)) for test in generators[0].ifs]
                if MISSING in tests:
                    return Object(node, parts=(source,))
                results += [self.evaluate(node.elt, inside)] if all(tests) else []  # type: ignore[attr-defined]
            return Literal(node, results)
        for generator in generators:
            unknown = Object(generator.target, parts=(source,))
            self.assign(generator.target, unknown, inside, node)
        elements = [node.value] if isinstance(node, ast.DictComp) else [node.elt]  # type: ignore[attr-defined]
        return Object(node, parts=(source, *(self.evaluate(each, inside) for each in elements)))

    def get_attribute(self, node: ast.AST, owner: Value, name: str) -> Value:
        """Return an attribute of a value."""
        match owner:
            case Class():
                pair = owner.find(name)
                return pair[1] if pair else Object(node, name=name, owner=owner.outside_base)
            case Object():
                return self._get_of_object(node, owner, name)
        return Object(node, name=name, owner=owner)

    def _get_of_object(self, node: ast.AST, owner: Object, name: str) -> Value:
        if name in owner.attrs:
            return owner.attrs[name]
        if owner.cls is not None and (pair := owner.cls.find(name)) is not None:
            cls, value = pair
            if not isinstance(value, Function):
                return value
            marks = [code_of(each) for each in getattr(value.node, "decorator_list", [])]
            if "staticmethod" in marks:
                return value
            bound = Function(value.node, frame=value.frame, positional=(owner,), cls=cls)
            is_property = any(mark.endswith("property") for mark in marks)
            return self.call_value(node, bound, [], {}) if is_property else bound
        if owner.args is not None and name in owner.args and owner.owner is None:
            return owner.args[name]
        if owner.is_import:
            return Object(node, name=f"{owner.name}.{name}")
        owner.attrs[name] = Object(node, name=name, owner=owner)
        return owner.attrs[name]

    def get_item(self, node: ast.AST, owner: Value, key: Value) -> Value:
        """Return an item of a value."""
        index = plain(key)
        match owner:
            case Literal(data=dict() as data) if _is_key(index) and index in data:
                return data[index]
            case Literal(data=list() | tuple() as data, is_complete=True) if isinstance(index, int):
                if -len(data) <= index < len(data):
                    return data[index]
            case Object():
                name = repr(index) if _is_key(index) else code_of(key.node)
                if ("item", name) not in owner.attrs:
                    item = Object(node, name=f"[{name}]", owner=owner, parts=(key,))
                    owner.attrs["item", name] = item
                return owner.attrs["item", name]
        return Object(node, parts=(owner, key))

    # Targets of assignments.

    def assign(self, target: ast.expr, value: Value, frame: Frame, node: ast.AST) -> None:
        """Bind a target of an assignment."""
        match target:
            case ast.Name(id=name):
                home = self.module if name in frame.globals and frame.parent else frame
                self.store(home.names, name, value)
            case ast.Starred(value=inner):
                self.assign(inner, value, frame, node)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                self._unpack(targets, value, frame, node)
            case ast.Attribute(value=owner, attr=name):
                self.set_attribute(self.evaluate(owner, frame), name, value, node)
            case ast.Subscript(value=owner, slice=key):
                self._set_item(self.evaluate(owner, frame), self.evaluate(key, frame), value, node)

    def _unpack(self, targets: list[ast.expr], value: Value, frame: Frame, node: ast.AST) -> None:
        items = self.items_of(value)
        starred = [index for index, each in enumerate(targets) if isinstance(each, ast.Starred)]
        if items is not None and starred:
            start, end = starred[0], len(items) - (len(targets) - starred[0] - 1)
            items = [*items[:start], Literal(node, items[start:end]), *items[end:]]
        for index, target in enumerate(targets):
            is_known = items is not None and len(items) == len(targets)
            item = items[index] if is_known and items else None
            item = item or self.get_item(target, value, literal(target, index))
            self.assign(target, item, frame, node)

    def _set_item(self, owner: Value, key: Value, value: Value, node: ast.AST) -> None:
        index = plain(key)
        match owner:
            case Literal(data=dict() as data) if _is_key(index):
                self.store(owner.__dict__, "data", {**data, index: value})
            case Literal():
                self.store(owner.__dict__, "is_open", True)
            case Object():
                name = repr(index) if _is_key(index) else code_of(key.node)
                self.record(owner, ("item", name), f"[{name}]", value, node)


def _freeze(value: Value) -> Value:
    """Return a list or mapping as it is now: the script may change it later."""
    if isinstance(value, Literal) and isinstance(value.data, list):
        return replace(value, data=[*map(_freeze, value.data)])
    if isinstance(value, Literal) and isinstance(value.data, dict):
        items = {key: _freeze(item) for key, item in value.data.items()}
        return replace(value, data=items)
    return value


def _put(target: dict[Any, Any], key: Any, value: Any) -> None:
    if value is MISSING:
        target.pop(key, None)
    else:
        target[key] = value


def _is_key(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None) and value is not MISSING
