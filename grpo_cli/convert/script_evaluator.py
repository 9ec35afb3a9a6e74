"""Reads a Python script statement by statement, without running it, and records its calls and assignments.

Both branches of an unknown condition are read; a value that differs between them is a choice. Functions and
classes of the script are followed where they are called.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_cli.convert.script_arguments import CommandLine
from grpo_cli.convert.script_values import (
    MISSING,
    Choice,
    Class,
    Frame,
    Function,
    Literal,
    Object,
    Value,
    choose,
    code_of,
    literal,
    negate,
    only_option,
    plain,
    reachable,
)
from grpo_cli.issues import Location

_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")
_EXITS = ("sys.exit", "exit", "quit", "os._exit")


_IMPORTS = (ast.Import, ast.ImportFrom)


class Evaluator(CommandLine):
    """Evaluates statements; its attributes are what the script makes and changes."""

    def __init__(
        self, flags: Mapping[str, Any] | None, places: Mapping[str, Location] | None = None
    ) -> None:
        super().__init__(flags, places)
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
                is_exit = isinstance(made, Object) and made.is_call and made.name in _EXITS
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
                result = self.evaluate(value, frame) if value else literal(statement, None)
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
        """Read the body of a loop once, as what may happen."""
        if isinstance(statement, ast.While):
            self.evaluate(statement.test, frame)
        else:
            unknown = Object(statement.target, "each", self.evaluate(statement.iter, frame))
            self.assign(statement.target, unknown, frame, statement)
        carried: dict[str, tuple[Value, Object]] = {}
        for name in _list_carried(statement):
            before = frame.names.get(name)
            if isinstance(before, Literal) and isinstance(before.data, int | float | str):
                carried[name] = (before, Object(statement))
                self.store(frame.names, name, carried[name][1])
        given = {name for name, value in frame.names.items() if plain(value) is not None}
        arms = [(f"in the loop of line {statement.lineno}", statement.body), ("", [])]
        self._loops += 1
        self._execute_arms(statement, arms, frame)
        self._loops -= 1
        for name in frame.names.keys() - given:
            # Its body is taken to run at least once.
            self.store(frame.names, name, only_option(frame.names[name]))
        for name, (before, unknown) in carried.items():
            value = frame.names[name]
            options = value.options if isinstance(value, Choice) else (("", value),)
            changed = [each for _, each in options if each is not unknown]
            open_ = [each for each in changed if unknown in reachable(each)]
            kept = [(test, before if each is unknown else each) for test, each in options]
            after = Object(open_[0].node, parts=(open_[0],)) if open_ else choose(value.node, kept)
            self.store(frame.names, name, after)
        return self.execute(statement.orelse, frame)

    def _execute_try(self, statement: ast.Try | ast.TryStar, frame: Frame) -> str | None:
        signal = self.execute(statement.body, frame) or self.execute(statement.orelse, frame)
        for handler in statement.handlers:
            # Imported packages are taken to be installed.
            is_import = handler.type is not None and code_of(handler.type) in _IMPORT_ERRORS
            if is_import and all(isinstance(each, _IMPORTS) for each in statement.body):
                continue
            if handler.name:
                self.store(frame.names, handler.name, Object(statement, name=handler.name))
            condition = f"after an error in line {statement.lineno}"
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


def _list_carried(loop: ast.stmt) -> set[str]:
    """Return the names that a turn of a loop may compute from those of the turn before."""
    names = [each for each in ast.walk(loop) if isinstance(each, ast.Name)]
    read = {each.id for each in names if isinstance(each.ctx, ast.Load)}
    return read & {each.id for each in names if isinstance(each.ctx, ast.Store)}
