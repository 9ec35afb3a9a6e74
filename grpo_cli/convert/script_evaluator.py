"""Reads a Python script statement by statement, without running it, and records its calls and assignments.

Both branches of an unknown condition are read; a value that differs between them is a choice. Functions and
classes of the script are followed where they are called.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_cli.convert.key_report import read_keys
from grpo_cli.convert.script_calls import Arguments, Calls
from grpo_cli.convert.script_expressions import MOST_ITEMS
from grpo_cli.convert.script_values import (
    MISSING,
    NAMES,
    Choice,
    Class,
    Frame,
    Function,
    Literal,
    Object,
    Value,
    code_of,
    default_of,
    negate,
    plain,
    reachable,
    root_of,
)
from grpo_cli.issues import Location
from grpo_cli.recipe.grpo_fields import read_grpo_fields
from grpo_cli.recipe.yaml_tree import read_scalar


class Evaluator(Calls):
    """Evaluates statements; its attributes are what the script makes and changes."""

    def __init__(
        self,
        flags: Mapping[str, Any] | None,
        places: Mapping[str, Location] | None,
        name_line: Callable[[ast.AST], str],
    ) -> None:
        super().__init__()
        self._name_line = name_line
        self.flags = {name: each for name, each in (flags or {}).items() if name[0] != "$"}
        self._variables = {name: each for name, each in (flags or {}).items() if name[0] == "$"}
        """Variables that the shell script exports, by `$NAME`."""
        self.places = dict(places or {})
        """Where the arguments of the command line are written."""
        self._knows_flags = flags is not None
        self.used: set[str] = set()
        """Arguments of the command line that the script has."""
        self.own: set[str] = set()
        """Those that it defines itself."""
        self.functions: list[Function] = []
        """Functions and methods of the script, in the order of their definitions."""
        self._loops = 0
        """The loops that are read, inside each other."""

    def execute(self, body: Sequence[ast.stmt], frame: Frame) -> str | None:
        """Read statements in order; return why they end early: `return`, `raise` or `loop`, or None."""
        for statement in body:
            self.count_step()
            if (signal := self._execute_one(statement, frame)) is not None:
                return signal
        return None

    def _execute_one(self, statement: ast.stmt, frame: Frame) -> str | None:
        match statement:
            case ast.Expr(value=value):
                made = self.evaluate(value, frame)
                is_exit = isinstance(made, Object) and made.is_call and made.name in NAMES["exits"]
                return "raise" if is_exit else None
            case ast.Assign(targets=targets, value=value):
                result = self.evaluate(value, frame)
                for target in targets:
                    self.assign(target, result, frame, statement)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, self.evaluate(value, frame), frame, statement)
            case ast.AugAssign(target=target, op=operator, value=value):
                pair = self.evaluate(target, frame), self.evaluate(value, frame)
                # A loop computes it again and again.
                changed: Value = Object(statement, parts=pair)
                if not self._loops:
                    changed = self.operate(statement, operator, *pair)
                self.assign(target, changed, frame, statement)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                function = Function(statement, frame=frame)
                self.functions.append(function)
                for decorator in statement.decorator_list:
                    self.evaluate(decorator, frame)
                self.store(frame.names, statement.name, function)
            case ast.ClassDef():
                self._define_class(statement, frame)
            case ast.Return(value=value):
                result = self.evaluate(value, frame) if value else Literal.of(statement, None)
                frame.returns.append((self.condition, result))
                return "return"
            case ast.Raise():
                return "raise"
            case ast.Break() | ast.Continue():
                return "loop"
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                frame.globals.update(names)
            case ast.Import() | ast.ImportFrom():
                self._import(statement, frame)
            case ast.Delete(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Subscript):
                        owner = self.evaluate(target.value, frame)
                        key = self.evaluate(target.slice, frame)
                        pop = Object(statement, name="pop", owner=owner)
                        self.call_value(statement, pop, [key], {})
            case _:
                return self._execute_block(statement, frame)
        return None

    def _execute_block(self, statement: ast.stmt, frame: Frame) -> str | None:
        match statement:
            case ast.If(test=test, body=body, orelse=orelse):
                value = plain(self.evaluate(test, frame))
                if isinstance(test, ast.Compare) and "__name__" in code_of(test):
                    value = True
                if value is not MISSING:
                    return self.execute(body if value else orelse, frame)
                code = code_of(test)
                self.tests[code] = self.values[test][-1]
                arms = [(code, body), (negate(code), orelse)]
                return self._execute_arms(statement, arms, frame)
            case ast.Match(subject=subject, cases=cases):
                self.evaluate(subject, frame)
                arms = [(code_of(case.pattern), case.body) for case in cases]
                return self._execute_arms(statement, [*arms, ("no case fits", [])], frame)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._execute_loop(statement, frame)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    entered = self.evaluate(item.context_expr, frame)
                    if isinstance(entered, Literal) and isinstance(entered.data, list):
                        entered = (entered.data or [entered])[0]  # of `@contextmanager`
                    if item.optional_vars is not None:
                        self.assign(item.optional_vars, entered, frame, statement)
                return self.execute(body, frame)
            case ast.Try() | ast.TryStar():
                return self._execute_try(statement, frame)
        return None

    def _execute_arms(
        self, node: ast.AST, arms: Sequence[tuple[str, Sequence[ast.stmt]]], frame: Frame
    ) -> str | None:
        readers: list[tuple[str, Callable[[], str | None]]] = [
            (condition, partial(self.execute, body, frame)) for condition, body in arms
        ]
        signals = self.branch(node, readers)
        if None in signals:
            return None
        return next((signal for signal in signals if signal != "raise"), "raise")

    def _execute_loop(
        self, statement: ast.For | ast.AsyncFor | ast.While, frame: Frame
    ) -> str | None:
        """Read the body of a loop for each item that is known; otherwise once, as what may happen."""
        if isinstance(statement, ast.While):
            self.evaluate(statement.test, frame)
        else:
            source = self.evaluate(statement.iter, frame)
            items = self.items_of(source) or []
            if 0 < len(items) <= MOST_ITEMS and _is_plain_loop(statement):
                for item in items:
                    self.assign(statement.target, item, frame, statement)
                    if (signal := self.execute(statement.body, frame)) is not None:
                        return signal
                return self.execute(statement.orelse, frame)
            each = Object(statement.target, "each", source)
            values = Choice.of(statement.target, [("", item) for item in items or [each]])
            self.assign(statement.target, values, frame, statement)
        carried: dict[str, tuple[Value, Object]] = {}
        for name in _list_carried(statement):
            before = frame.names.get(name)
            if isinstance(before, Literal) and isinstance(before.data, int | float | str):
                carried[name] = (before, Object(statement))
                self.store(frame.names, name, carried[name][1])
        given = {name for name, value in frame.names.items() if plain(value) is not None}
        arms = [(f"in the loop of {self._name_line(statement)}", statement.body), ("", [])]
        self._loops += 1
        self._execute_arms(statement, arms, frame)
        self._loops -= 1
        for name in frame.names.keys() - given:
            # Its body is taken to run at least once.
            self.store(frame.names, name, Choice.only(frame.names[name]))
        for name, (before, unknown) in carried.items():
            value = frame.names[name]
            options = value.options if isinstance(value, Choice) else (("", value),)
            kept = [(test, before if each is unknown else each) for test, each in options]
            open_ = [each for _, each in kept if unknown in reachable(each)]
            after = [Object(each.node, parts=(each,)) for each in open_]
            self.store(frame.names, name, after[0] if after else Choice.of(value.node, kept))
        return self.execute(statement.orelse, frame)

    def _execute_try(self, statement: ast.Try | ast.TryStar, frame: Frame) -> str | None:
        signal = self.execute(statement.body, frame) or self.execute(statement.orelse, frame)
        for handler in statement.handlers:
            # Imported packages are taken to be installed.
            is_import = handler.type is not None and code_of(handler.type) in NAMES["import-errors"]
            if is_import and all(
                isinstance(each, ast.Import | ast.ImportFrom) for each in statement.body
            ):
                continue
            if handler.name:
                self.store(frame.names, handler.name, Object(statement, name=handler.name))
            condition = f"after an error in {self._name_line(statement)}"
            arms = [("without an error", []), (condition, handler.body)]
            if self._execute_arms(statement, arms, frame) is None and signal == "raise":
                signal = None
        return self.execute(statement.finalbody, frame) or signal

    def _define_class(self, node: ast.ClassDef, frame: Frame) -> None:
        inside = Frame({}, parent=frame)
        bases = [self.evaluate(base, frame) for base in node.bases]
        cls = Class(node, node.name, bases, inside.names)
        cls.fields = [
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        self.execute(node.body, inside)
        for value in inside.names.values():
            if isinstance(value, Function) and value.cls is None:
                value.cls = cls
        self.store(frame.names, node.name, cls)

    def _import(self, statement: ast.Import | ast.ImportFrom, frame: Frame) -> None:
        start = ""
        if isinstance(statement, ast.ImportFrom):
            start = "." * statement.level + (f"{statement.module}." if statement.module else "")
        for alias in statement.names:
            is_whole = bool(start or alias.asname)
            name = alias.name if is_whole else alias.name.partition(".")[0]
            value = Object(statement, name=f"{start}{name}")
            self.store(frame.names, alias.asname or name, value)

    # The command line.

    def parse(self, node: ast.AST, parser: Object, name: str, args: Arguments) -> Value | None:
        """Return what a parser of the command line returns, if this is one."""
        kind = parser.last_name
        if name in ("parse_args", "parse_known_args") and kind.endswith("ArgumentParser"):
            attrs = dict(self._list_arguments(parser))
            parsed = Object(node, name="arguments", args={}, owner=parser, attrs=attrs)
            return parsed if name == "parse_args" else Literal(node, (parsed, Object(node)))
        if kind in NAMES["parsers"] and name.startswith("parse_"):
            listed = (parser.args or {}).get("0") or (parser.args or {}).get("dataclass_types")
            types = self.items_of(listed) if isinstance(listed, Literal) else [listed]
            own = dict(self._list_arguments(parser))
            made = [self._parse_class(node, each, parser, own) for each in types or () if each]
            rest = Object(node, name="arguments", args={}, owner=parser, attrs=own)
            return Literal(node, (*made, rest) if own else tuple(made))
        return None

    def _list_arguments(self, parser: Object) -> Iterator[tuple[str, Value]]:
        """Yield the name of each `add_argument`, with the value that the command line gives it."""
        calls = [made for made in self.made if made.owner is not None and root_of(made) is parser]
        presets = [made.args or {} for made in calls if made.name == "set_defaults"]
        added = [(_name_argument(made), made) for made in calls if made.name == "add_argument"]
        self._expand_flags([name for name, _ in added])
        for name, made in [pair for pair in added if pair[0]]:
            args = made.args or {}
            action = plain(args.get("action"))
            default = args.get("default")
            if default is None and action in ("store_true", "store_false"):
                default = Literal.of(made.node, action == "store_false")
            for preset in presets:
                default = preset.get(name, default)
            kind = args.get("type")
            kind_name = kind.name if isinstance(kind, Object) else ""
            texts = [plain(each) for each in args.values()]
            written = next((each for each in texts if str(each).startswith("--")), f"--{name}")
            yield name, self._argument(made.node, name, default, kind_name, written)

    def _expand_flags(self, names: list[str]) -> None:
        """Give flags that are the beginning of one argument's name that name, as argparse does."""
        for flag in self.flags.keys() - {*names}:
            longer = [each for each in names if each.startswith(flag)]
            if len(longer) == 1 and longer[0] not in self.flags:
                self.flags[longer[0]] = self.flags.pop(flag)
                self.places |= {longer[0]: self.places[flag]} if flag in self.places else {}

    def _argument(
        self, node: ast.AST, name: str, default: Value | None, kind: str = "", written: str = ""
    ) -> Value:
        flag = self.flags.get(name, MISSING)
        self.used.add(name)
        is_unset = name in self.flags and flag is MISSING
        if flag is not MISSING:
            self.own.add(name)
            return Literal.of(self._mark(node, name), str(flag) if kind == "str" else flag)
        value = default_of(default)
        if isinstance(value, str) and kind in ("int", "float"):
            value = read_scalar(value)
        if self._knows_flags and value is not MISSING and not is_unset:
            return Literal.of(node, value)
        parts = (default if default is not None else Object(node),)
        return Object(node, name=written or f"--{name}", parts=parts, default=value)

    def read_variable(self, node: ast.AST, key: Value, default: Value | None) -> Value:
        """Return a variable of the environment: the shell script's, or its default."""
        name, parts = f"${plain(key)}", (key, default) if default is not None else (key,)
        if self._variables.get(name, MISSING) is not MISSING:
            return Literal.of(self._mark(node, name), self._variables[name])
        is_set = name in self._variables or default is None
        return Object(node, name, parts=parts, default=MISSING if is_set else default_of(default))

    def _mark(self, node: ast.AST, name: str) -> ast.AST:
        """Return the code of an argument of the command line, with the place where it is written."""
        marked = ast.copy_location(ast.Name(f"--{name}"), node)
        marked.place = self.places.get(name)  # type: ignore[attr-defined]
        return marked if name in self.places else node

    def _parse_class(self, node: ast.AST, kind: Value, parser: Object, own: Arguments) -> Value:
        """Return an instance of a dataclass whose fields the command line gives; `own` are other arguments."""
        flags: Arguments = {
            name: Object(self._mark(node, name), name=f"--{name}")
            if value is MISSING
            else Literal.of(self._mark(node, name), value)
            for name, value in self.flags.items()
            if name not in own and not (name.startswith("no_") and name[3:] in self.flags)
        }
        if not self._knows_flags:
            flags["**"] = Object(node, name="flags", parts=(parser,))
        base = kind.outside_base if isinstance(kind, Class) else kind
        self.used |= self.flags.keys() if base is not None else set()
        if not isinstance(kind, Class):
            made = self.make(node, kind.name if isinstance(kind, Object) else "", flags)
            return self._add_defaults(made)
        instance = Object(node, name=kind.name, cls=kind, parts=(parser,), depth=len(self._undo))
        for cls in reversed(kind.ancestry()):
            for name in cls.fields if isinstance(cls, Class) else ():
                pair = kind.find(name)
                default = self.default_of_field(pair[1]) if pair else None
                instance.attrs[name] = self._argument(node, name, default)
        if isinstance(base, Object):
            return self._add_defaults(self.build(instance, base, {**instance.attrs, **flags}))
        return instance

    def _add_defaults(self, made: Object) -> Object:
        """Add the defaults of TRL's classes to what a known command line gives them."""
        if self._knows_flags and made.name.startswith("trl."):
            defaults = {name: each.default for name, each in read_grpo_fields().items()}
            listed = read_keys("trl-arguments").get(made.last_name, defaults)
            for name, other in (("dtype", "torch_dtype"), ("torch_dtype", "dtype")):
                if other in (made.args or {}):
                    made.attrs[name] = (made.args or {})[other]
            for name in listed.keys() - (made.args or {}).keys() - made.attrs.keys():
                made.attrs[name] = Literal.of(made.node, listed[name])
        return made


def _name_argument(made: Object) -> str:
    """Return the name of the value that `add_argument` adds; empty if it is not known."""
    args = made.args or {}
    flags = [plain(args[key]) for key in args if key.isdigit()]
    texts = [flag for flag in flags if isinstance(flag, str)]
    long = next((flag for flag in texts if flag.startswith("--")), "".join(texts[:1]))
    dest = plain(args.get("dest"))
    return dest if isinstance(dest, str) else long.lstrip("-").replace("-", "_")


def _is_plain_loop(loop: ast.For | ast.AsyncFor) -> bool:
    """Return whether a loop has a turn for each item, and none makes a training of its own."""
    inside = [node for each in loop.body for node in ast.walk(each)]
    names = {code_of(node.func).rpartition(".")[2] for node in inside if isinstance(node, ast.Call)}
    makes = any(name.endswith(("Config", "Trainer")) or name == "from_pretrained" for name in names)
    return not makes and not any(isinstance(node, ast.Break | ast.Continue) for node in inside)


def _list_carried(loop: ast.stmt) -> set[str]:
    """Return the names that a turn of a loop may compute from those of the turn before."""
    names = [each for each in ast.walk(loop) if isinstance(each, ast.Name)]
    read = {each.id for each in names if isinstance(each.ctx, ast.Load)}
    return read & {each.id for each in names if isinstance(each.ctx, ast.Store)}
