"""What the expressions of a Python script stand for, as far as that can be told without running it."""

import ast
from collections.abc import Callable, Sequence
from typing import Any

from grpo_cli.convert.script_environment import Environment
from grpo_cli.convert.script_values import (
    MISSING,
    OPERATORS,
    Choice,
    Class,
    Frame,
    Function,
    Known,
    Object,
    Value,
    choose,
    code_of,
    compute,
    default_of,
    known,
    negate,
    plain,
)

MOST_ITEMS = 64
"""Items of a loop that are read one by one."""


class Expressions(Environment):
    """Evaluates expressions; calls are its child's."""

    def call(self, node: ast.Call, frame: Frame) -> Value:
        """Return what a call returns."""
        raise NotImplementedError

    def call_value(
        self, node: ast.AST, function: Value, positional: list[Value], keywords: dict[str, Value]
    ) -> Value:
        """Return what a function returns for arguments."""
        raise NotImplementedError

    def evaluate(self, node: ast.expr, frame: Frame) -> Value:
        """Return what an expression stands for."""
        self.count_step()
        match node:
            case ast.Constant(value=value):
                return Known(node, value)
            case ast.Name(id=name):
                return self.look_up(node, name, frame)
            case ast.Call():
                return self.call(node, frame)
            case ast.Attribute(value=owner, attr=name):
                return self.get_attribute(node, self.evaluate(owner, frame), name)
            case ast.Subscript(value=owner, slice=key):
                return self.get_item(node, self.evaluate(owner, frame), self.evaluate(key, frame))
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                items, is_open = self._collect(elements, frame)
                return Known(node, tuple(items) if isinstance(node, ast.Tuple) else items, is_open)
            case ast.Dict():
                return self._collect_mapping(node, frame)
            case ast.JoinedStr(values=pieces):
                texts = [self.evaluate(piece, frame) for piece in pieces]
                return self.lift(node, lambda *values: "".join(map(str, values)), texts)
            case ast.FormattedValue(value=value, conversion=conversion, format_spec=spec):
                inner = self.evaluate(value, frame)
                is_plain = conversion == -1 and spec is None
                return inner if is_plain else Object(node, parts=(inner,))
            case ast.BinOp(left=left, op=operator, right=right):
                pair = [self.evaluate(left, frame), self.evaluate(right, frame)]
                return self.lift(node, OPERATORS.get(type(operator)), pair)
            case ast.UnaryOp(op=operator, operand=operand):
                return self.lift(
                    node, OPERATORS.get(type(operator)), [self.evaluate(operand, frame)]
                )
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                pair = [self.evaluate(left, frame), self.evaluate(right, frame)]
                return self._compare(node, operator, pair)
            case ast.BoolOp(op=operator, values=values):
                return self._combine(node, isinstance(operator, ast.Or), values, frame)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._evaluate_condition(node, test, body, orelse, frame)
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

    def look_up(self, node: ast.AST, name: str, frame: Frame | None) -> Value:
        """Return what a name stands for; one that the script does not define stands for itself."""
        while frame is not None:
            value = frame.names.get(name, MISSING)
            if value is not MISSING:
                return value
            frame = frame.parent
        return Object(node, name=name)

    def lift(
        self, node: ast.AST, function: Callable[..., Any] | None, values: Sequence[Value]
    ) -> Value:
        """Return what a pure function makes of values, as far as they are known."""
        if function is not None:
            result = compute(function, [plain(value) for value in values])
            if result is not MISSING:
                return known(node, result)
            default = compute(function, [default_of(value) for value in values])
            return Object(node, parts=tuple(values), default=default)
        return Object(node, parts=tuple(values))

    def items_of(self, value: Value) -> list[Value] | None:
        """Return the items of a list or the keys of a mapping that is known, or None."""
        match value:
            case Known(is_open=False, data=list() | tuple() | set() as data):
                return [*data]
            case Known(is_open=False, data=dict() as data):
                return [known(value.node, key) for key in data]
        return None

    def _collect(self, elements: list[ast.expr], frame: Frame) -> tuple[list[Value], bool]:
        items: list[Value] = []
        is_open = False
        for element in elements:
            value = self.evaluate(element, frame)
            if not isinstance(element, ast.Starred):
                items.append(value)
            elif (inner := self.items_of(value)) is not None:
                items += inner
            else:
                is_open = True
        return items, is_open

    def _collect_mapping(self, node: ast.Dict, frame: Frame) -> Value:
        data: dict[Any, Value] = {}
        is_open = False
        for key, value in zip(node.keys, node.values, strict=True):
            item = self.evaluate(value, frame)
            name = plain(self.evaluate(key, frame)) if key is not None else MISSING
            if _is_key(name):
                data[name] = item
            elif key is None and (inner := self.mapping_of(item)) is not None:
                data |= inner.data
                is_open = is_open or inner.is_open
            else:
                is_open = True
        return Known(node, data, is_open)

    def mapping_of(self, value: Value) -> Known | None:
        """Return what `**` passes on of a value, or None."""
        match value:
            case Known(data=dict()):
                return value
            case Object(cls=Class() as cls, attrs=attrs):
                names = [name for name in (*cls.fields, *attrs) if isinstance(name, str)]
                return Known(
                    value.node,
                    {name: self.get_attribute(value.node, value, name) for name in names},
                )
        return None

    def _compare(self, node: ast.AST, operator: ast.cmpop, pair: list[Value]) -> Value:
        if isinstance(operator, ast.Is | ast.IsNot) and plain(pair[1]) is None:
            is_thing = isinstance(pair[0], Function | Class) or (
                isinstance(pair[0], Known) and pair[0].data is not None
            )
            if is_thing:
                return known(node, isinstance(operator, ast.IsNot))
        return self.lift(node, OPERATORS.get(type(operator)), pair)

    def _combine(self, node: ast.AST, is_or: bool, values: list[ast.expr], frame: Frame) -> Value:
        results: list[Value] = []
        for value in values:
            result = self.evaluate(value, frame)
            data = plain(result)
            if data is not MISSING and bool(data) == is_or and not results:
                return result
            if data is MISSING or value is values[-1] or bool(data) == is_or:
                results.append(result)
            if data is not MISSING and bool(data) == is_or:
                break
        if len(results) == 1:
            return results[0]
        defaults = [default_of(result) for result in results]
        default = MISSING
        if MISSING not in defaults:
            hits = [value for value in defaults if bool(value) == is_or]
            default = hits[0] if hits else defaults[-1]
        return Object(node, parts=tuple(results), default=default)

    def _evaluate_condition(
        self, node: ast.AST, test: ast.expr, body: ast.expr, orelse: ast.expr, frame: Frame
    ) -> Value:
        value = self.evaluate(test, frame)
        if (data := plain(value)) is not MISSING:
            return self.evaluate(body if data else orelse, frame)
        options = [
            (code_of(test), self.evaluate(body, frame)),
            (negate(code_of(test)), self.evaluate(orelse, frame)),
        ]
        default = default_of(value)
        chosen = MISSING if default is MISSING else default_of(options[0 if default else 1][1])
        return choose(node, options, chosen)

    def _comprehend(self, node: ast.AST, frame: Frame) -> Value:
        generators = node.generators  # type: ignore[attr-defined]
        first = generators[0]
        source = self.evaluate(first.iter, frame)
        items = self.items_of(source)
        inside = Frame({}, parent=frame)
        is_mapping = isinstance(node, ast.DictComp)
        element = ast.Tuple([node.key, node.value], ast.Load()) if is_mapping else node.elt  # type: ignore[attr-defined]
        if items is None or len(generators) > 1 or len(items) > MOST_ITEMS:
            for generator in generators:
                unknown = Object(generator.target, parts=(source,))
                self.assign(generator.target, unknown, inside, node)
            return Object(node, parts=(source, self.evaluate(element, inside)))
        results: list[Value] = []
        for item in items:
            self.assign(first.target, item, inside, node)
            tests = [plain(self.evaluate(test, inside)) for test in first.ifs]
            if MISSING in tests:
                return Object(node, parts=(source,))
            if all(tests):
                results.append(self.evaluate(element, inside))
        if not is_mapping:
            return Known(node, results)
        pairs = [result.data for result in results if isinstance(result, Known)]
        data = {plain(pair[0]): pair[1] for pair in pairs if _is_key(plain(pair[0]))}
        return Known(node, data, is_open=len(data) < len(results))

    def get_attribute(self, node: ast.AST, owner: Value, name: str) -> Value:
        """Return an attribute of a value."""
        match owner:
            case Choice(options=options):
                return choose(
                    node, [(test, self.get_attribute(node, each, name)) for test, each in options]
                )
            case Class():
                pair = owner.find(name)
                return pair[1] if pair else Object(node, name=name, owner=owner.outside_base)
            case Object():
                return self._get_of_object(node, owner, name)
        return Object(node, name=name, owner=owner)

    def _get_of_object(self, node: ast.AST, owner: Object, name: str) -> Value:
        value = owner.attrs.get(name, MISSING)
        if value is not MISSING:
            return value
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
        member = Object(node, name=name, owner=owner)
        owner.attrs[name] = member
        return member

    def get_item(self, node: ast.AST, owner: Value, key: Value) -> Value:
        """Return an item of a value."""
        index = plain(key)
        match owner:
            case Known(data=dict() as data) if _is_key(index) and index in data:
                return data[index]
            case Known(data=list() | tuple() as data, is_open=False) if isinstance(index, int):
                if -len(data) <= index < len(data):
                    return data[index]
            case Known(data=str() as data) if isinstance(index, int):
                return self.lift(node, lambda: data[index], [])
            case Choice(options=options):
                return choose(
                    node, [(test, self.get_item(node, each, key)) for test, each in options]
                )
            case Object():
                name = repr(index) if _is_key(index) else code_of(key.node)
                value = owner.attrs.get(("item", name), MISSING)
                if value is MISSING:
                    value = Object(node, name=f"[{name}]", owner=owner, parts=(key,))
                    owner.attrs["item", name] = value
                return value
        return Object(node, parts=(owner, key))

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
        items = self.items_of(value) if isinstance(value, Known) else None
        starred = [index for index, each in enumerate(targets) if isinstance(each, ast.Starred)]
        if items is not None and starred:
            start, end = starred[0], len(items) - (len(targets) - starred[0] - 1)
            items = [*items[:start], Known(node, items[start:end]), *items[end:]]
        for index, target in enumerate(targets):
            if items is not None and len(items) == len(targets):
                item = items[index]
            else:
                item = self.get_item(target, value, known(target, index))
            self.assign(target, item, frame, node)

    def _set_item(self, owner: Value, key: Value, value: Value, node: ast.AST) -> None:
        index = plain(key)
        match owner:
            case Known(data=dict() as data) if _is_key(index):
                self.store(owner.__dict__, "data", {**data, index: value})
            case Known(data=list() as data) if isinstance(index, int) and -len(data) <= index < len(
                data
            ):
                changed = [*data]
                changed[index] = value
                self.store(owner.__dict__, "data", changed)
            case Known():
                self.store(owner.__dict__, "is_open", True)
            case Object():
                name = repr(index) if _is_key(index) else code_of(key.node)
                self.record(owner, ("item", name), f"[{name}]", value, node)
            case Choice(options=options):
                for _, option in options:
                    self._set_item(option, key, value, node)


def _is_key(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None) and value is not MISSING
