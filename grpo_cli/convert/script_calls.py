"""Calls in a Python script: its functions and classes, other packages, and arguments of the command line."""

import ast
from collections.abc import Callable, Sequence
from typing import Any

from grpo_cli.convert.script_expressions import Expressions, has_mapping, make_uncertain
from grpo_cli.convert.script_values import (
    FUNCTIONS,
    MISSING,
    NAMES,
    Choice,
    Class,
    Frame,
    Function,
    Literal,
    Object,
    Value,
    default_of,
    plain,
    rest_of,
)

_DEEPEST = 24
"""Calls of functions inside each other that are followed."""
Arguments = dict[str, Value]


class Calls(Expressions):
    """Evaluates calls; the statements of functions and parsers of the command line are its child's."""

    execute: Callable[[Sequence[ast.stmt], Frame], str | None]
    parse: Callable[[ast.AST, Object, str, "Arguments"], Value | None]

    def __init__(self) -> None:
        super().__init__()
        self.entered: set[ast.AST] = set()
        """Functions that were called."""
        self._active: list[ast.AST] = []
        self._methods: list[tuple[Class | None, tuple[Value, ...]]] = []
        """The class and the first arguments of the functions that are read."""

    def call(self, node: ast.Call, frame: Frame) -> Value:
        """Return the result of a call."""
        function = self.evaluate(node.func, frame)
        positional, rest = self.collect(node.args, frame)
        mapping = Literal(node, _name_rest("*", rest))
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            if keyword.arg is None:
                mapping = self.spread(mapping, value, replaces=False)
            else:
                mapping.data[keyword.arg] = value
        keywords = {str(name): each for name, each in mapping.data.items()}
        return self.call_value(
            node, function, positional, keywords | _name_rest("**", mapping.rest)
        )

    def call_value(
        self, node: ast.AST, function: Value, positional: list[Value], keywords: Arguments
    ) -> Value:
        """Return the result of a function for arguments."""
        match function:
            case Function(target=Value() as target):
                merged = {**function.keywords, **keywords}
                return self.call_value(node, target, [*function.positional, *positional], merged)
            case Function():
                return self._call_function(node, function, positional, keywords)
            case Class():
                return self._instantiate(node, function, positional, keywords)
            case Choice(options=options):
                results = [
                    (test, self.call_value(node, option, positional, keywords))
                    for test, option in options
                    if plain(option) is not None
                ]
                return Choice.of(node, results) if results else Object(node)
            case Object(owner=Choice(options=options) as owner) if has_mapping(owner):
                results = [
                    (test, self.call_value(node, method, positional, keywords))
                    for test, option in options
                    for method in (Object(function.node, function.name, option),)
                ]
                return Choice.of(node, results)
            case Object(owner=Literal() as owner):
                return self._call_method(node, function.name, owner, positional, keywords)
            case Object():
                return self._call_outside(node, function, positional, keywords)
        return Object(node, parts=(function, *positional, *keywords.values()))

    # Functions and classes of the script.

    def _call_function(
        self, node: ast.AST, function: Function, positional: list[Value], keywords: Arguments
    ) -> Value:
        """Return the result of a function; unknown if it calls itself, or too deep."""
        definition = function.node
        self.entered.add(definition)
        is_code = isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if definition in self._active or len(self._active) >= _DEEPEST or not is_code:
            return Object(node, parts=(*positional, *keywords.values()))
        frame = Frame({}, parent=function.frame, function=function)
        self._active.append(definition)
        self._methods.append((function.cls, function.positional))
        try:
            self._bind(function, [*function.positional, *positional], keywords, frame)
            if isinstance(definition, ast.Lambda):
                return self.evaluate(definition.body, frame)
            self.execute(definition.body, frame)  # type: ignore[attr-defined]
        finally:
            self._methods.pop()
            self._active.pop()
        if frame.yields:
            # One in a branch or loop may come never, or several times.
            is_open = any(condition != self.condition for condition, _ in frame.yields)
            items = [value for _, value in frame.yields]
            return Literal(node, items, (Object(node, parts=(*items,)),) if is_open else ())
        return Choice.of(node, frame.returns) if frame.returns else Literal.of(node, None)

    def _bind(
        self, function: Function, positional: list[Value], keywords: Arguments, frame: Frame
    ) -> None:
        """Bind the parameters of a function; those that no argument is known for are unknown."""
        spec: ast.arguments = function.node.args  # type: ignore[attr-defined]
        left = dict(keywords)
        names = [*spec.posonlyargs, *spec.args]
        defaults = dict(zip([each.arg for each in names][::-1], spec.defaults[::-1], strict=False))
        pairs = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
        defaults |= {each.arg: value for each, value in pairs if value is not None}
        for index, each in enumerate([*names, *spec.kwonlyargs]):
            name, value = each.arg, left.pop(each.arg, None)
            if index < min(len(positional), len(names)):
                value = positional[index]
            elif name in defaults:
                default = self.evaluate(defaults[name], function.frame or self.module)
                is_missing, value = value is None, Choice.fill(value or default, default)
                if is_missing and {"*", "**"} & keywords.keys():
                    value = Object(each, name=name, parts=(value,), default=default_of(value))
            frame.names[name] = value or self._make_argument(each, function)
        if spec.vararg:
            rest = tuple(positional[len(names) :])
            more = rest_of(left.get("*"))
            frame.names[spec.vararg.arg] = Literal(spec.vararg, rest, rest=more)
        if spec.kwarg:
            more = rest_of(left.pop("**", None))
            left.pop("*", None)
            frame.names[spec.kwarg.arg] = Literal(spec.kwarg, left, rest=more)

    def _make_argument(self, node: ast.arg, function: Function) -> Value:
        """Return what is known of an argument that nothing is given for: the defaults of its dataclass."""
        unknown = Object(node, name=node.arg, parts=(Object(node),))
        frame = function.frame or self.module
        cls = self.evaluate(node.annotation, frame) if node.annotation else None
        if not isinstance(cls, Class) or not cls.fields or cls.outside_base or cls.find("__init__"):
            return unknown
        name = ast.copy_location(ast.Name(node.arg), node)
        return self._instantiate(node, cls, [], {"**": Object(name, parts=(unknown,))})

    def _instantiate(
        self, node: ast.AST, cls: Class, positional: list[Value], keywords: Arguments
    ) -> Value:
        base, pair = cls.outside_base, cls.find("__init__")
        instance = Object(node, name=cls.name, cls=cls, depth=len(self._undo))
        if pair is not None and isinstance(pair[1], Function):
            instance.parts = (*positional, *keywords.values())
            init = Function(pair[1].node, frame=pair[1].frame, positional=(instance,), cls=pair[0])
            self.call_value(node, init, positional, keywords)
            if base is not None and base.last_name.endswith(("Config", "Trainer")):
                return instance if instance.is_call else self.build(instance, base, {})
            return instance
        lines = [each.fields for each in reversed(cls.ancestry()) if isinstance(each, Class)]
        names = [*dict.fromkeys(name for line in lines for name in line)]
        for name in names:
            if (value := cls.find(name)) is not None:
                instance.attrs[name] = self.default_of_field(value[1])
        # The fields of a base outside of the script come first.
        values = {**dict(zip(names if base is None else (), positional, strict=False)), **keywords}
        if rest := {"*", "**"} & keywords.keys():
            for name, preset in instance.attrs.items():
                more = tuple(keywords[each] for each in rest)
                instance.attrs[name] = make_uncertain(preset, more)
        instance.attrs |= {
            name: Choice.fill(value, instance.attrs.get(name))
            for name, value in values.items()
            if name not in ("*", "**")
        }
        if base is None:
            instance.parts = (*positional, *keywords.values())
            return instance
        fields = {name: value for name, value in instance.attrs.items() if name in names}
        return self.build(instance, base, {**fields, **_number(positional), **keywords})

    def build(self, instance: Object, base: Object, args: Arguments) -> Object:
        """Make an instance of a class of the script the object that its base class makes."""
        made = self.make(instance.node, base.name, args)
        instance.name, instance.args, instance.condition = base.name, made.args, made.condition
        self.made[-1] = instance
        pair = instance.cls.find("__post_init__") if instance.cls is not None else None
        if pair is not None and isinstance(pair[1], Function):
            after = Function(pair[1].node, frame=pair[1].frame, positional=(instance,), cls=pair[0])
            self.call_value(instance.node, after, [], {})
        return instance

    def default_of_field(self, value: Value) -> Value:
        """Return the default in `field(default=…)`, or a value itself."""
        names = ("field", "Field", "Option", "Argument")
        if not isinstance(value, Object) or value.last_name not in names:
            return value
        args = value.args or {}
        if "default_factory" in args:
            return self.call_value(value.node, args["default_factory"], [], {})
        return args.get("default") or args.get("0") or Object(value.node, parts=(value,))

    # Methods of lists, mappings and text.

    def _call_method(
        self, node: ast.AST, name: str, owner: Literal, positional: list[Value], keywords: Arguments
    ) -> Value:
        data, count = owner.data, len(positional)
        if isinstance(data, list | dict) and name in NAMES["changes"]:
            return self._change_items(node, name, owner, positional, keywords)
        if isinstance(data, dict) and name == "get" and count:
            key = plain(positional[0])
            if key is not MISSING and key in data:
                return data[key]
            if key is not MISSING and owner.is_complete:
                return positional[1] if count > 1 else Literal.of(node, None)
        if name == "copy" and isinstance(data, list | dict):
            return Literal(node, data.copy(), owner.rest)
        if isinstance(data, dict) and name in ("items", "keys", "values"):
            keys = [Literal.of(node, key) for key in data]
            pairs = [Literal(node, pair) for pair in zip(keys, data.values(), strict=True)]
            views = {"items": pairs, "keys": keys, "values": [*data.values()]}
            return Literal(node, views[name], owner.rest)
        if name not in NAMES["methods"] or {"*", "**"} & keywords.keys():
            return Object(node, parts=(owner, *positional, *keywords.values()))

        def method(text: Any, *values: Any) -> Any:
            named = dict(zip(keywords, values[count:], strict=True))
            return getattr(text, name)(*values[:count], **named)

        return self.lift(node, method, [owner, *positional, *keywords.values()])

    def _change_items(
        self, node: ast.AST, name: str, owner: Literal, positional: list[Value], keywords: Arguments
    ) -> Value:
        """Change a list or a mapping; a change that is not known becomes a part of its rest."""
        items: Any = owner.data.copy()
        rest = owner.rest
        result: Value = Literal.of(node, None)
        key = plain(positional[0]) if positional else MISSING
        default = positional[1] if len(positional) > 1 else result
        is_key = isinstance(key, str) and (key in items or owner.is_complete)
        if name == "update":
            joined = self._join(owner, positional, keywords)
            items, rest = joined.data, joined.rest
        elif name == "clear":
            items, rest = type(items)(), ()
        elif name == "append" and positional:
            items.append(positional[0])
        elif name == "extend" and positional and (more := self.items_of(positional[0])) is not None:
            items.extend(more)
        elif name == "pop" and is_key and isinstance(items, dict):
            result = items.pop(key, default)
        elif name == "setdefault" and is_key:
            result = items[key] = Choice.fill(items.get(key) or default, default)
        else:
            self.add_unknown(owner, Object(node, parts=(*positional,)))
            return Object(node, parts=(owner, *positional))
        self.store(owner.__dict__, "rest", rest)
        self.store(owner.__dict__, "data", items)
        return result

    def change_unknown(
        self, node: ast.AST, name: str, owner: Object, positional: list[Value], keywords: Arguments
    ) -> None:
        """Record what the change of a value as a mapping sets, if the value is not known."""
        joined = Literal(node, {})
        if name == "update":
            joined = self._join(joined, positional, keywords)
        for key, value in joined.data.items():
            self.record(owner, ("item", key), f"[{key!r}]", value, node)
        if name == "pop" and positional and isinstance(plain(positional[0]), str):
            self.store(owner.attrs, ("item", plain(positional[0])), Choice.unset(node), owner.depth)
        if name != "update" or joined.rest:
            self.add_unknown(owner, Object(node, parts=joined.rest))

    def _join(self, mapping: Literal, positional: list[Value], keywords: Arguments) -> Literal:
        """Return a mapping with what `dict` or `update` adds to it."""
        stars = [keywords[star] for star in ("*", "**") if star in keywords]
        named = {name: value for name, value in keywords.items() if name not in ("*", "**")}
        for value in (*positional, Literal(mapping.node, named), *stars):
            mapping = self.spread(mapping, value)
        return mapping

    # Other packages.

    def _call_outside(
        self, node: ast.AST, function: Object, positional: list[Value], keywords: Arguments
    ) -> Value:
        name, owner = function.name, function.owner
        args = {**_number(positional), **keywords}
        result: Value | None = None
        first = positional[0] if positional else None
        if name.endswith(".__init__") and isinstance(first, Object) and first.cls is not None:
            made = Object(node, name=name.removesuffix(".__init__"))
            self.build(first, made, {**_number(positional[1:]), **keywords})
            result = Literal.of(node, None)
        elif function.is_import:
            result = self._call_builtin(node, name, positional, keywords)
        elif isinstance(owner, Object) and owner.name == "super" and name.startswith("__"):
            instance, cls = owner.owner, owner.cls
            base = cls.outside_base if cls is not None else None
            match name, instance, base:
                case "__init__", Object(args=None), Object():
                    self.build(instance, base, args)
            result = Literal.of(node, None)
        elif isinstance(owner, Object):
            if name in NAMES["mapping-changes"]:
                self.change_unknown(node, name, owner, positional, keywords)
            result = self.parse(node, owner, name, args) if owner.is_call else None
        if result is not None:
            return result
        if function.is_call or name.startswith("["):
            return self.make(node, "__call__", args, function)
        made = self.make(node, name, args, owner)
        if name in ("get", "getattr") and len(args) > 1:
            made.default = default_of([*args.values()][-1])
        return made

    def _call_builtin(
        self, node: ast.AST, name: str, positional: list[Value], keywords: Arguments
    ) -> Value | None:
        first = positional[0] if positional else None
        if name in NAMES["environment"] and first is not None:
            default = positional[1] if len(positional) > 1 else keywords.get("default")
            return self.read_variable(node, first, default)
        if name == "super" and self._methods and all(self._methods[-1]):
            cls, instance = self._methods[-1]
            return Object(node, "super", instance[0], cls=cls, parts=instance[:1])
        if name == "dict" and len(positional) < 2:
            return self._join(Literal(node, {}), positional, keywords)
        if first is None:
            return None
        if name in ("next", "iter") and isinstance(first, Literal) and isinstance(first.data, list):
            return first if name == "iter" or not first.data else first.data[0]
        if name == "zip" and all(self.items_of(each) is not None for each in positional):
            groups = zip(*(self.items_of(each) or [] for each in positional), strict=False)
            return Literal(node, [Literal(node, group) for group in groups])
        if name in ("functools.partial", "partial"):
            return Function(node, target=first, positional=(*positional[1:],), keywords=keywords)
        if name in NAMES["copies"] and len(positional) == 1:
            return self.mapping_of(first) or first
        attribute = plain(positional[1]) if len(positional) > 1 else None
        if isinstance(attribute, str) and isinstance(first, Object):
            is_sure = len(positional) == 2 or first.is_import
            if name == "getattr" and is_sure:
                return self.get_attribute(node, first, attribute)
            if name == "hasattr" and self._is_field(Literal(node, attribute), first):
                return Literal.of(node, True)
            if name == "setattr":
                self.set_attribute(first, attribute, positional[2], node)
                return Literal.of(node, None)
        if name in ("list", "tuple") and (items := self.items_of(first)) is not None:
            return Literal(node, tuple(items) if name == "tuple" else items)
        if name in FUNCTIONS and not keywords:
            return self.lift(node, FUNCTIONS[name], positional)
        return None


def _name_rest(star: str, rest: tuple[Value, ...]) -> Arguments:
    """Return the unknown values of `*` or `**` as one argument."""
    value = Literal(rest[0].node, {}, rest) if len(rest) > 1 else None
    return {star: value or rest[0]} if rest else {}


def _number(positional: list[Value]) -> Arguments:
    """Return positional arguments by their index."""
    return {str(index): value for index, value in enumerate(positional)}
