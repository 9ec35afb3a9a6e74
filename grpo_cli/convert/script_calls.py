"""Calls in a Python script: its own functions and classes, arguments of the command line, other packages."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_cli.convert.script_expressions import Expressions
from grpo_cli.convert.script_values import (
    FUNCTIONS,
    METHODS,
    MISSING,
    Choice,
    Class,
    Frame,
    Function,
    Known,
    Object,
    Value,
    call_method,
    change_items,
    choose,
    default_of,
    known,
    plain,
    root_of,
)
from grpo_cli.recipe.yaml_tree import read_scalar

_PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
_COPIES = (
    "copy.copy",
    "copy.deepcopy",
    "dataclasses.asdict",
    "asdict",
    "vars",
    "accelerator.prepare",
)
"""Functions whose result has what their first argument has."""
_ENVIRONMENT = ("os.environ.get", "os.getenv", "os.environ.setdefault", "os.environ.pop")


class Calls(Expressions):
    """Evaluates calls; statements of functions are its child's."""

    def __init__(self, flags: Mapping[str, Any] | None) -> None:
        super().__init__()
        self._flags = flags or {}
        """Arguments of the command line that are given, by name."""
        self._knows_flags = flags is not None

    def execute(self, body: Sequence[ast.stmt], frame: Frame) -> str | None:
        """Read statements in order; return why they end early, or None."""
        raise NotImplementedError

    def call(self, node: ast.Call, frame: Frame) -> Value:
        """Return what a call returns."""
        function = self.evaluate(node.func, frame)
        positional: list[Value] = []
        keywords: dict[str, Value] = {}
        for each in node.args:
            value = self.evaluate(each, frame)
            if not isinstance(each, ast.Starred):
                positional.append(value)
            elif (items := self.items_of(value)) is not None:
                positional += items
            else:
                keywords["*"] = value
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            mapping = self.mapping_of(value) if keyword.arg is None else None
            if mapping is not None:
                keywords |= {str(name): each for name, each in mapping.data.items()}
                keywords |= {"**": value} if mapping.is_open else {}
            else:
                keywords[keyword.arg or "**"] = value
        if isinstance(function, Object) and function.name == "super":
            return self._make_super(node, frame)
        return self.call_value(node, function, positional, keywords)

    def call_value(
        self, node: ast.AST, function: Value, positional: list[Value], keywords: dict[str, Value]
    ) -> Value:
        """Return what a function returns for arguments."""
        match function:
            case Choice(options=options):
                results = [
                    (test, self.call_value(node, option, positional, keywords))
                    for test, option in options
                    if plain(option) is not None
                ]
                return choose(node, results) if results else Object(node)
            case Function(target=Value() as target):
                merged = {**function.keywords, **keywords}
                return self.call_value(node, target, [*function.positional, *positional], merged)
            case Function():
                return self._call_function(node, function, positional, keywords)
            case Class():
                return self._instantiate(node, function, positional, keywords)
            case Object(owner=Known() as owner):
                return self._call_method(node, function, owner, positional, keywords)
            case Object():
                return self._call_outside(node, function, positional, keywords)
        return Object(node, parts=(function, *positional, *keywords.values()))

    # Functions and classes of the script.

    def _call_function(
        self, node: ast.AST, function: Function, positional: list[Value], keywords: dict[str, Value]
    ) -> Value:
        definition = function.node
        with self.enter(definition) as is_followed:
            everything = (*positional, *keywords.values())
            if not is_followed or not isinstance(
                definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            ):
                return Object(node, parts=everything)
            frame = Frame({}, parent=function.frame, function=function)
            self._bind(definition, function, [*function.positional, *positional], keywords, frame)
            if isinstance(definition, ast.Lambda):
                return self.evaluate(definition.body, frame)
            self.execute(definition.body, frame)
        if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(definition)):
            return Object(node, parts=everything)
        return choose(node, frame.returns) if frame.returns else known(node, None)

    def _bind(
        self,
        definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        function: Function,
        positional: list[Value],
        keywords: dict[str, Value],
        frame: Frame,
    ) -> None:
        spec, left = definition.args, dict(keywords)
        is_open = bool({"*", "**"} & left.keys())
        names = [*spec.posonlyargs, *spec.args]
        defaults = dict(zip([each.arg for each in names][::-1], spec.defaults[::-1], strict=False))
        pairs = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
        defaults |= {each.arg: value for each, value in pairs if value is not None}
        for index, each in enumerate([*names, *spec.kwonlyargs]):
            name = each.arg
            if index < min(len(positional), len(names)):
                value = positional[index]
            elif name in left:
                value = left.pop(name)
            elif name in defaults:
                value = self.evaluate(defaults[name], function.frame or self.module)
                if is_open:
                    value = Object(each, name=name, parts=(value,), default=default_of(value))
            else:
                value = Object(each, name=name, parts=(Object(each),))
            frame.names[name] = value
        if spec.vararg:
            rest = Known(spec.vararg, tuple(positional[len(names) :]), "*" in left)
            frame.names[spec.vararg.arg] = rest
        if spec.kwarg:
            is_open = "**" in left
            more = {name: value for name, value in left.items() if name not in ("*", "**")}
            frame.names[spec.kwarg.arg] = Known(spec.kwarg, more, is_open)

    def _instantiate(
        self, node: ast.AST, cls: Class, positional: list[Value], keywords: dict[str, Value]
    ) -> Value:
        base, pair = cls.outside_base, cls.find("__init__")
        instance = Object(node, name=cls.name, cls=cls, parts=(*positional, *keywords.values()))
        self.place_in_branch(instance)
        if pair is not None and isinstance(pair[1], Function):
            instance.parts = ()
            bound = Function(pair[1].node, frame=pair[1].frame, positional=(instance,), cls=pair[0])
            self.call_value(node, bound, positional, keywords)
            instance.parts = (*positional, *keywords.values())
            return instance
        for name in cls.fields:
            if (field := cls.find(name)) is not None:
                instance.attrs[name] = self._default_of_field(field[1])
        given = {**dict(zip(cls.fields, positional, strict=False)), **keywords}
        instance.attrs |= {name: value for name, value in given.items() if name not in ("*", "**")}
        if base is not None:
            args = {str(index): value for index, value in enumerate(positional)}
            fields = {name: value for name, value in instance.attrs.items() if name in cls.fields}
            return self._build(instance, base, {**fields, **args, **keywords})
        return instance

    def _build(self, instance: Object, base: Object, args: dict[str, Value]) -> Object:
        """Make an instance of a class of the script the object that another package's class makes."""
        made = self.make(instance.node, base.name, args)
        instance.name, instance.args, instance.parts = base.name, args, ()
        instance.condition, instance.branches = made.condition, made.branches
        self.made[-1] = instance
        return instance

    def _default_of_field(self, value: Value) -> Value:
        """Return the default in `field(default=…)`, or a value itself."""
        if isinstance(value, Object) and value.last_name in (
            "field",
            "Field",
            "Option",
            "Argument",
        ):
            args = value.args or {}
            if "default_factory" in args:
                return self.call_value(value.node, args["default_factory"], [], {})
            return args.get("default") or args.get("0") or Object(value.node, parts=(value,))
        return value

    def _make_super(self, node: ast.Call, frame: Frame) -> Value:
        inside: Frame | None = frame
        while inside is not None and (inside.function is None or inside.function.cls is None):
            inside = inside.parent
        function = inside.function if inside else None
        if function is None or function.cls is None or not function.positional:
            return Object(node, name="super", args={})
        above = function.cls.ancestry()[1:]
        return Object(node, name="parent", owner=function.positional[0], parts=(*above,))

    # Other packages.

    def _call_method(
        self,
        node: ast.AST,
        method: Object,
        owner: Known,
        positional: list[Value],
        keywords: dict[str, Value],
    ) -> Value:
        name = method.name
        if isinstance(owner.data, list | dict) and (
            changed := change_items(owner, name, positional, keywords)
        ):
            items, result = changed
            if items is None:
                self.store(owner.__dict__, "is_open", True)
            else:
                self.store(owner.__dict__, "data", items)
            return result or known(node, None)
        if isinstance(owner.data, dict) and name in ("get", "pop", "setdefault") and positional:
            key = plain(positional[0])
            if key is not MISSING and key in owner.data:
                return owner.data[key]
            if key is not MISSING and not owner.is_open:
                return positional[1] if len(positional) > 1 else known(node, None)
        if (
            isinstance(owner.data, dict)
            and name in ("items", "values", "keys")
            and not owner.is_open
        ):
            pairs = {
                "items": lambda key, value: (
                    known(node, (key,)) and Known(node, (known(node, key), value))
                ),
                "values": lambda key, value: value,
                "keys": lambda key, value: known(node, key),
            }[name]
            return Known(node, [pairs(key, value) for key, value in owner.data.items()])
        if name == "copy" and isinstance(owner.data, list | dict):
            return Known(node, owner.data.copy(), owner.is_open)
        if name in METHODS and "*" not in keywords and "**" not in keywords:
            names = [*keywords]
            count = len(positional)
            return self.lift(
                node,
                lambda data, *values: call_method(
                    data, name, [*values[:count]], dict(zip(names, values[count:], strict=True))
                ),
                [owner, *positional, *keywords.values()],
            )
        return Object(node, parts=(owner, *positional, *keywords.values()))

    def _call_outside(
        self, node: ast.AST, function: Object, positional: list[Value], keywords: dict[str, Value]
    ) -> Value:
        name, owner = function.name, function.owner
        args = {**{str(index): value for index, value in enumerate(positional)}, **keywords}
        if isinstance(owner, Object) and owner.name == "parent" and not owner.is_call:
            return self._call_parent(node, owner, name, positional, keywords)
        if owner is None and function.is_import:
            special = self._call_builtin(node, name, positional, keywords)
            if special is not None:
                return special
        if (
            isinstance(owner, Object)
            and (parsed := self._parse(node, owner, name, args)) is not None
        ):
            return parsed
        if function.is_call:
            return self.make(node, "__call__", args, function)
        return self.make(node, name, args, owner)

    def _call_parent(
        self,
        node: ast.AST,
        parent: Object,
        name: str,
        positional: list[Value],
        keywords: dict[str, Value],
    ) -> Value:
        """Call a method of `super()`."""
        instance = parent.owner
        if not isinstance(instance, Object):
            return Object(node)
        for base in parent.parts:
            method = base.attrs.get(name) if isinstance(base, Class) else None
            if isinstance(base, Class) and isinstance(method, Function):
                bound = Function(method.node, frame=method.frame, positional=(instance,), cls=base)
                return self.call_value(node, bound, positional, keywords)
            if isinstance(base, Object) and name == "__init__":
                args = {str(index): value for index, value in enumerate(positional)}
                return self._build(instance, base, {**args, **keywords})
        return Object(node, name=name, owner=instance, args={})

    def _call_builtin(
        self, node: ast.AST, name: str, positional: list[Value], keywords: dict[str, Value]
    ) -> Value | None:
        first = positional[0] if positional else None
        if name in _ENVIRONMENT:
            given = positional[1] if len(positional) > 1 else keywords.get("default")
            return Object(
                node, parts=(*positional,), default=default_of(given) if given else MISSING
            )
        if name == "dict" and not positional:
            data = {key: value for key, value in keywords.items() if key != "**"}
            return Known(node, data, "**" in keywords)
        if first is None:
            return None
        if name == "dict" and (mapping := self.mapping_of(first)) is not None:
            return Known(node, {**mapping.data, **keywords}, mapping.is_open)
        if name in ("functools.partial", "partial"):
            return Function(node, target=first, positional=(*positional[1:],), keywords=keywords)
        if name in _COPIES and len(positional) == 1:
            return self.mapping_of(first) or first
        if name in ("dataclasses.replace", "replace") and isinstance(first, Object):
            copy = Object(node, first.name, first.owner, first.args, first.cls, {**first.attrs})
            for key, value in keywords.items():
                self.set_attribute(copy, key, value, node)
            return copy
        if name in ("getattr", "setattr") and len(positional) > 1:
            attribute = plain(positional[1])
            if isinstance(attribute, str) and name == "getattr":
                return self.get_attribute(node, first, attribute)
            if isinstance(attribute, str) and len(positional) > 2:
                self.set_attribute(first, attribute, positional[2], node)
                return known(node, None)
        if name in FUNCTIONS and not keywords:
            if name in ("list", "tuple", "reversed", "zip", "enumerate") and all(
                self.items_of(each) is not None for each in positional
            ):
                return self._gather(node, name, positional)
            return self.lift(node, FUNCTIONS[name], positional)
        return None

    def _gather(self, node: ast.AST, name: str, positional: list[Value]) -> Value:
        lists = [self.items_of(each) or [] for each in positional]
        if name == "zip":
            return Known(node, [Known(node, items) for items in zip(*lists, strict=False)])
        if name == "enumerate":
            numbered = enumerate(lists[0])
            return Known(
                node, [Known(node, (known(node, index), item)) for index, item in numbered]
            )
        items = lists[0][::-1] if name == "reversed" else lists[0]
        return Known(node, tuple(items) if name == "tuple" else items)

    # Arguments of the command line.

    def _parse(
        self, node: ast.AST, owner: Object, name: str, args: dict[str, Value]
    ) -> Value | None:
        """Return what a parser of the command line gives, if this is one."""
        if not owner.is_call:
            return None
        if name in ("parse_args", "parse_known_args") and owner.last_name.endswith(
            "ArgumentParser"
        ):
            parsed = Object(node, name="arguments", args={}, owner=owner)
            parsed.attrs = {"": Object(node)} | dict(self._list_arguments(node, owner))
            return parsed if name == "parse_args" else Known(node, (parsed, Object(node)))
        if owner.last_name in _PARSERS and name.startswith("parse_"):
            listed = (owner.args or {}).get("0") or (owner.args or {}).get("dataclass_types")
            types = self.items_of(listed) if isinstance(listed, Known) else [listed]
            made = [
                self._parse_class(node, each, owner) for each in types or () if each is not None
            ]
            return Known(node, tuple(made))
        return None

    def _list_arguments(self, node: ast.AST, parser: Object) -> Iterator[tuple[str, Value]]:
        """Yield the names of `add_argument`, each with what the command line gives it."""
        presets = [
            made for made in self.made if made.name == "set_defaults" and root_of(made) is parser
        ]
        for made in [made for made in self.made if made.name == "add_argument"]:
            if root_of(made) is not parser or not isinstance(made.args, dict):
                continue
            flags = [plain(made.args[key]) for key in made.args if key.isdigit()]
            texts = [flag for flag in flags if isinstance(flag, str)]
            if not texts:
                continue
            long = next((flag for flag in texts if flag.startswith("--")), texts[0])
            name = plain(made.args.get("dest"))
            name = name if isinstance(name, str) else long.lstrip("-").replace("-", "_")
            action = plain(made.args.get("action"))
            default = made.args.get("default")
            if default is None and action in ("store_true", "store_false"):
                default = known(made.node, action == "store_false")
            for preset in presets:
                default = (preset.args or {}).get(name, default)
            kind = made.args.get("type")
            yield (
                name,
                self._argument(
                    made.node, name, default, kind.name if isinstance(kind, Object) else ""
                ),
            )

    def _argument(self, node: ast.AST, name: str, default: Value | None, kind: str = "") -> Value:
        is_unset = name in self._flags and self._flags[name] is MISSING
        if name in self._flags and not is_unset:
            value = self._flags[name]
            return known(node, str(value) if kind == "str" else value)
        value = default_of(default) if default is not None else MISSING
        if isinstance(value, str) and kind in ("int", "float"):
            value = read_scalar(value)
        if self._knows_flags and value is not MISSING and not is_unset:
            return known(node, value)
        parts = (default,) if default is not None else (Object(node),)
        return Object(node, name=f"--{name}", parts=parts, default=value)

    def _parse_class(self, node: ast.AST, kind: Value, parser: Object) -> Value:
        """Return an instance of a dataclass whose fields the command line gives."""
        if not isinstance(kind, Class):
            name = kind.name if isinstance(kind, Object) else ""
            return self.make(node, name, self._list_given(node, parser))
        instance = Object(node, name=kind.name, cls=kind, parts=(parser,))
        for cls in reversed(kind.ancestry()):
            for name in cls.fields if isinstance(cls, Class) else ():
                pair = kind.find(name)
                default = self._default_of_field(pair[1]) if pair else None
                instance.attrs[name] = self._argument(node, name, default)
        if (base := kind.outside_base) is not None:
            fields = {key: value for key, value in instance.attrs.items() if isinstance(key, str)}
            return self._build(instance, base, {**fields, **self._list_given(node, parser)})
        return instance

    def _list_given(self, node: ast.AST, parser: Object) -> dict[str, Value]:
        """Return what the command line gives; `**` stands for it if it is not known."""
        given: dict[str, Value] = {
            name: Object(node, name=f"--{name}") if value is MISSING else known(node, value)
            for name, value in self._flags.items()
        }
        unknown = Object(node, name="flags", parts=(parser,))
        return given if self._knows_flags else {**given, "**": unknown}
