"""The values of expressions in a Python script."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo_cli.convert.script_environment import Environment
from grpo_cli.convert.script_values import (
    MISSING,
    NAMES,
    OPERATORS,
    Choice,
    Class,
    Frame,
    Function,
    Literal,
    Object,
    Value,
    code_of,
    compute,
    default_of,
    negate,
    plain,
    reachable,
)
from grpo_cli.recipe.grpo_fields import read_grpo_fields

MOST_ITEMS = 64


class Expressions(Environment):
    """Evaluates expressions; calls and variables of the environment are its children's."""

    call: Callable[[ast.Call, Frame], Value]
    call_value: Callable[[ast.AST, Value, list[Value], dict[str, Value]], Value]
    read_variable: Callable[[ast.AST, Value, Value | None], Value]

    def evaluate(self, node: ast.expr, frame: Frame) -> Value:
        """Return the value of an expression, and register it."""
        self.count_step()
        value = self._evaluate(node, frame)
        self.values.setdefault(node, []).append(value)
        return value

    def _evaluate(self, node: ast.expr, frame: Frame) -> Value:
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
                data = tuple(items) if isinstance(node, ast.Tuple) else items
                return Literal(node, data, rest)
            case ast.Dict():
                return self._collect_mapping(node, frame)
            case ast.JoinedStr(values=pieces):
                texts = [self.evaluate(piece, frame) for piece in pieces]
                return self.lift(node, lambda *values: "".join(map(str, values)), texts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.evaluate(value, frame)
            case ast.BinOp(left=left, op=op, right=right):
                return self.operate(
                    node, op, self.evaluate(left, frame), self.evaluate(right, frame)
                )
            case ast.UnaryOp(op=op, operand=inner):
                return self.lift(node, OPERATORS.get(type(op)), [self.evaluate(inner, frame)])
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                return self._compare(node, operator, left, right, frame)
            case ast.BoolOp(op=operator, values=values):
                return self._combine(node, isinstance(operator, ast.Or), values, frame)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                code = code_of(test)
                self.tests[code] = self.evaluate(test, frame)
                if (data := plain(self.tests[code])) is not MISSING:
                    return self.evaluate(body if data else orelse, frame)
                arms = []
                for condition, arm in ((code, body), (negate(code), orelse)):
                    self._conditions.append(condition)
                    arms.append((condition, self.evaluate(arm, frame)))
                    self._conditions.pop()
                return Choice.of(node, arms)
            case ast.Lambda():
                return Function(node, frame=frame)
            case ast.NamedExpr(target=target, value=value):
                result = self.evaluate(value, frame)
                self.assign(target, result, frame, node)
                return result
            case ast.Await(value=value) | ast.Starred(value=value):
                return self.evaluate(value, frame)
            case ast.Yield(value=ast.expr() as value):
                frame.yields.append((self.condition, self.evaluate(value, frame)))
                return Object(node)
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
                return Literal.of(node, result)
            default = compute(function, [default_of(value) for value in values])
        return Object(node, parts=tuple(values), default=default)

    def items_of(self, value: Value) -> list[Value] | None:
        """Return the items of a list or the keys of a mapping that is known, or None."""
        match value:
            case Literal(is_complete=True, data=list() | tuple() | set() as data):
                return [*data]
            case Literal(is_complete=True, data=dict() as data):
                return [Literal.of(value.node, key) for key in data]
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

    def spread(self, mapping: Literal, value: Value, *, replaces: bool = True) -> Literal:
        """Return a mapping with what is known of another; with `replaces`, that may have the same keys."""
        node, rest = mapping.node, mapping.rest
        options = value.options if isinstance(value, Choice) else (("", value),)
        merged: list[tuple[str, dict[Any, Value]]] = []
        for test, option in options:
            inner = self.mapping_of(option)
            if inner is None and not Choice.is_unset(option) and plain(option) is not None:
                inner = _known_items(option)
            rest += inner.rest if inner else ()
            known = dict(mapping.data)
            if inner and inner.rest and replaces:
                known = {key: make_uncertain(item, inner.rest) for key, item in known.items()}
            merged.append((test, {**known, **(inner.data if inner else {})}))
        return Literal(node, Choice.merge(value.node, merged), (*dict.fromkeys(rest),))

    def operate(self, node: ast.AST, operator: ast.operator, left: Value, right: Value) -> Value:
        """Return the result of an operator; of `|`, what is known of the mapping."""
        if isinstance(left, Choice) and has_mapping(left):
            results = [
                (test, self.operate(node, operator, each, right)) for test, each in left.options
            ]
            return Choice.of(node, results)
        mapping = self.mapping_of(left) if isinstance(operator, ast.BitOr) else None
        if mapping is not None:
            return self.spread(Literal(node, mapping.data, mapping.rest), right)
        return self.lift(node, OPERATORS.get(type(operator)), [left, right])

    def mapping_of(self, value: Value) -> Literal | None:
        """Return the mapping that `**` passes on of a value, or None."""
        match value:
            case Literal(data=dict()):
                return value
            case Literal(data=list() | tuple() as items) if items and all(map(_is_pair, items)):
                pairs = [each.data for each in items]
                return Literal(value.node, {plain(key): item for key, item in pairs}, value.rest)
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
        if isinstance(operator, ast.In | ast.NotIn) and self._is_field(*pair):
            return Literal.of(node, isinstance(operator, ast.In))
        is_value = isinstance(pair[0], Function | Class) or (
            isinstance(pair[0], Literal) and pair[0].data is not None
        )
        if isinstance(operator, ast.Is | ast.IsNot) and plain(pair[1]) is None and is_value:
            return Literal.of(node, isinstance(operator, ast.IsNot))
        return self.lift(node, OPERATORS.get(type(operator)), pair)

    @staticmethod
    def _is_field(name: Value, names: Value) -> bool:
        """Return whether a value is one of names that are computed from the fields of `GRPOConfig`."""
        sources = [each.name for each in reachable(names) if isinstance(each, Object)]
        is_config = any(re.search(r"\bGRPOConfig\b", each) for each in sources)
        return is_config and plain(names) is MISSING and plain(name) in read_grpo_fields()

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
        inside = Frame({}, parent=frame)
        rest = source.rest if isinstance(source, Literal) else ()
        items = self.items_of(replace(source, rest=()) if isinstance(source, Literal) else source)
        if len(generators) == 1 and items is not None and len(items) <= MOST_ITEMS:
            pairs = self._comprehend_items(node, generators[0], items, inside)
            if isinstance(node, ast.DictComp):
                known = {plain(key): value for key, value in pairs if _is_key(plain(key))}
                rest += tuple(
                    Object(node, parts=each) for each in pairs if plain(each[0]) not in known
                )
                return Literal(node, known, rest)
            if not rest and not any(
                isinstance(each, Choice) and any(map(Choice.is_unset, each.parts))
                for _, each in pairs
            ):
                return Literal(node, [each for _, each in pairs])
        for generator in generators:
            unknown = Object(generator.target, parts=(source,))
            self.assign(generator.target, unknown, inside, node)
        elements = [node.value] if isinstance(node, ast.DictComp) else [node.elt]  # type: ignore[attr-defined]
        return Object(node, parts=(source, *(self.evaluate(each, inside) for each in elements)))

    def _comprehend_items(
        self, node: Any, generator: ast.comprehension, items: list[Value], inside: Frame
    ) -> list[tuple[Value, Value]]:
        """Return the key (if it has one) and value of each item; one of an unknown test may not be set."""
        pairs: list[tuple[Value, Value]] = []
        for item in items:
            self.assign(generator.target, item, inside, node)
            tests = {code_of(each): plain(self.evaluate(each, inside)) for each in generator.ifs}
            if not all(each is MISSING or each for each in tests.values()):
                continue
            key = self.evaluate(getattr(node, "key", None) or ast.Constant(None), inside)
            value = self.evaluate(getattr(node, "value", None) or node.elt, inside)
            code = " and ".join(test for test, each in tests.items() if each is MISSING)
            if code:
                value = Choice.of(value.node, [(code, value), (negate(code), Choice.unset(node))])
            pairs.append((key, value))
        return pairs

    def get_attribute(self, node: ast.AST, owner: Value, name: str) -> Value:
        """Return an attribute of a value."""
        match owner := Choice.only(owner):
            case Class():
                pair = owner.find(name)
                return pair[1] if pair else Object(node, name=name, owner=owner.outside_base)
            case Object():
                return self._get_of_object(node, owner, name)
        return Object(node, name=name, owner=owner)

    def _get_of_object(self, node: ast.AST, owner: Object, name: str) -> Value:
        if owner.name == "super" and owner.cls is not None:
            pair = next(filter(None, (_own(cls, name) for cls in owner.cls.ancestry()[1:])), None)
            if pair is None or not isinstance(pair[1], Function):
                return Object(node, name=name, owner=owner)
            init = pair[1]
            return Function(init.node, frame=init.frame, positional=(*owner.parts,), cls=pair[0])
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
        if owner.args is not None and owner.owner is None:
            is_trainer = owner.last_name.endswith("Trainer")
            place = name
            if is_trainer and name in NAMES["trainer-parameters"] and name not in owner.args:
                place = str(NAMES["trainer-parameters"].index(name))
            if place in owner.args and not (is_trainer and isinstance(owner.args[place], Literal)):
                return owner.args[place]
        if owner.is_import:
            return Object(node, name=f"{owner.name}.{name}")
        owner.attrs[name] = Object(node, name=name, owner=owner)
        return owner.attrs[name]

    def get_item(self, node: ast.AST, owner: Value, key: Value) -> Value:
        """Return an item of a value."""
        index = plain(key)
        match owner:
            case Object(name="os.environ"):
                return self.read_variable(node, key, None)
            case Literal(data=dict() as data) if _is_key(index) and index in data:
                return data[index]
            case Literal(data=list() | tuple() as data, is_complete=True) if isinstance(index, int):
                if -len(data) <= index < len(data):
                    return data[index]
            case Choice(options=options) if has_mapping(owner):
                return Choice.of(
                    node, [(test, self.get_item(node, each, key)) for test, each in options]
                )
            case Object():
                place, name = _place_of(key)
                if place not in owner.attrs:
                    owner.attrs[place] = Object(node, name=name, owner=owner, parts=(key,))
                return owner.attrs[place]
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
            item = item or self.get_item(target, value, Literal.of(target, index))
            self.assign(target, item, frame, node)

    def _set_item(self, owner: Value, key: Value, value: Value, node: ast.AST) -> None:
        index = plain(key)
        match owner:
            case Literal(data=dict() as data) if _is_key(index):
                self.store(owner.__dict__, "data", {**data, index: value})
            case Literal():
                self.add_unknown(owner, Object(node, parts=(key, value)))
            case Choice(parts=parts) if has_mapping(owner):
                for each in parts:
                    self._set_item(each, key, value, node)
            case Object():
                self.record(owner, *_place_of(key), value, node)

    def add_unknown(self, owner: Literal | Object, change: Object) -> None:
        """Add a change that is not known to a list, a mapping or an unknown value."""
        if isinstance(owner, Literal):
            self.store(owner.__dict__, "rest", (*owner.rest, change))
        else:
            self.store(owner.attrs, ("change", change.node), change, owner.depth)


def has_mapping(value: Choice) -> bool:
    """Return whether one of the values is a list or mapping of the script, which it may change."""
    return any(
        isinstance(each, Literal) and isinstance(each.data, dict | list | tuple)
        for each in value.parts
    )


def make_uncertain(value: Value, rest: tuple[Value, ...]) -> Value:
    """Return a value that what is not known may replace."""
    if Choice.is_unset(value):
        return value
    if isinstance(value, Object) and value.cls is not None and not value.is_call:
        attrs = {name: make_uncertain(each, rest) for name, each in value.attrs.items()}
        return replace(value, attrs=attrs)
    is_open = isinstance(value, Object) and value.name == "replaceable"
    parts = (*value.parts, *rest) if is_open else (value, *rest)  # type: ignore[attr-defined]
    return Object(value.node, "replaceable", parts=parts, default=default_of(value))


def _own(cls: Value, name: str) -> tuple[Class, Value] | None:
    return (cls, cls.attrs[name]) if isinstance(cls, Class) and name in cls.attrs else None


def _place_of(key: Value) -> tuple[tuple[str, Any], str]:
    """Return where an object has an item, and how that is written."""
    index = plain(key)
    place = ("item", index) if _is_key(index) else ("part", code_of(key.node))
    return place, f"[{index!r}]" if _is_key(index) else f"[{place[1]}]"


def _known_items(value: Value) -> Literal:
    """Return what a script sets on a value that is not known, and that value and its other changes as rest."""
    known: dict[Any, Value] = {}
    rest: tuple[Value, ...] = (value,)
    for place, item in value.attrs.items() if isinstance(value, Object) else ():
        is_read = isinstance(item, Object) and item.owner is value
        if not isinstance(place, tuple) or is_read:
            continue
        options = item.parts if isinstance(item, Choice) else (item,)
        if place[0] == "item" and not Choice.is_unset(item):
            known[place[1]] = item
        elif place[0] == "part":
            rest += tuple(Object(each.node, parts=(each,)) for each in options)
        elif place[0] == "change":
            rest += tuple(each for each in options if not Choice.is_unset(each))
    return Literal(value.node, known, rest)


def _is_pair(value: Value) -> bool:
    items = value.data if isinstance(value, Literal) else None
    return isinstance(items, tuple) and len(items) == 2 and _is_key(plain(items[0]))


def _is_key(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None) and value is not MISSING
