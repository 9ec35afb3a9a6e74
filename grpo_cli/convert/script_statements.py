"""Reads the statements of a Python script in order, without running it, and records what it makes and changes.

Branches of conditions that are not known are both read; what differs after them is a choice of values. Functions
of the script are followed where it calls them.
"""

import ast
from collections.abc import Sequence

from grpo_cli.convert.script_calls import Calls
from grpo_cli.convert.script_expressions import MOST_ITEMS
from grpo_cli.convert.script_values import (
    MISSING,
    OPERATORS,
    Class,
    Frame,
    Function,
    Known,
    Object,
    code_of,
    default_of,
    known,
    negate,
    plain,
)

_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")
_EXITS = ("sys.exit", "exit", "quit", "os._exit")


class Evaluator(Calls):
    """Evaluates statements with an environment of known and unknown values."""

    def execute(self, body: Sequence[ast.stmt], frame: Frame) -> str | None:
        """Read statements in order; return why they end early: `return`, `raise` or `loop`, or None."""
        for index, statement in enumerate(body):
            self.count_step()
            if isinstance(statement, ast.If):
                test = plain(self.evaluate(statement.test, frame))
                if test is MISSING and not _is_main(statement.test):
                    return self._fork(statement, frame, body[index + 1 :])
                chosen = statement.body if test else statement.orelse
                if _is_main(statement.test):
                    chosen = statement.body
                signal = self.execute(chosen, frame)
            else:
                signal = self._execute_one(statement, frame)
            if signal is not None:
                return signal
        return None

    def _fork(self, statement: ast.If, frame: Frame, rest: Sequence[ast.stmt]) -> str | None:
        """Read both branches of a condition; where one ends early, the rest belongs to the other."""
        signals: list[str | None] = []
        has_read_rest = False

        def read(body: Sequence[ast.stmt], other_ends: bool) -> str | None:
            nonlocal has_read_rest
            signal = self.execute(body, frame)
            if signal is None and other_ends:
                has_read_rest = True
                signal = self.execute(rest, frame)
            return signal

        ends = [_ends_early(body) for body in (statement.body, statement.orelse)]
        code = code_of(statement.test)
        default = default_of(self.evaluate(statement.test, frame))
        arms = [
            (code, lambda: read(statement.body, ends[1])),
            (negate(code), lambda: read(statement.orelse, ends[0])),
        ]
        signals = self.branch(statement, arms, default)
        if has_read_rest:
            kept = [signal for signal in signals if signal != "raise"]
            return kept[0] if kept and all(signal == kept[0] for signal in kept) else None
        if all(signals):
            return "return" if "return" in signals else signals[0]
        return self.execute(rest, frame)

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
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self.assign(target, self.evaluate(value, frame), frame, statement)
            case ast.AugAssign(target=target, op=operator, value=value):
                before = self.evaluate(_as_load(target), frame)
                changed = self.lift(
                    statement, OPERATORS.get(type(operator)), [before, self.evaluate(value, frame)]
                )
                self.assign(target, changed, frame, statement)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define_function(statement, frame)
            case ast.ClassDef():
                self._define_class(statement, frame)
            case ast.Return(value=value):
                result = self.evaluate(value, frame) if value else known(statement, None)
                frame.returns.append((self.condition, result))
                return "return"
            case ast.Raise():
                return "raise"
            case ast.Break() | ast.Continue():
                return "loop"
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._execute_loop(statement, frame)
            case ast.With() | ast.AsyncWith():
                return self._execute_with(statement, frame)
            case ast.Try() | ast.TryStar():
                return self._execute_try(statement, frame)
            case ast.Match():
                return self._execute_match(statement, frame)
            case ast.Import(names=aliases):
                for alias in aliases:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.store(frame.names, alias.asname or name, Object(statement, name=name))
            case ast.ImportFrom(module=module, names=aliases, level=level):
                start = "." * level + (f"{module}." if module else "")
                for alias in aliases:
                    imported = Object(statement, name=f"{start}{alias.name}")
                    self.store(frame.names, alias.asname or alias.name, imported)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                frame.globals.update(names)
            case ast.Delete(targets=targets):
                for target in targets:
                    self._delete(target, frame)
        return None

    def _execute_with(self, statement: ast.With | ast.AsyncWith, frame: Frame) -> str | None:
        for item in statement.items:
            entered = self.evaluate(item.context_expr, frame)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, entered, frame, statement)
        return self.execute(statement.body, frame)

    def _execute_match(self, statement: ast.Match, frame: Frame) -> str | None:
        self.evaluate(statement.subject, frame)
        arms = [
            (code_of(case.pattern), lambda body=case.body: self.execute(body, frame))
            for case in statement.cases
        ]
        signals = self.branch(statement, [*arms, ("", lambda: None)])
        return signals[0] if len(set(signals)) == 1 else None

    def _delete(self, target: ast.expr, frame: Frame) -> None:
        match target:
            case ast.Name(id=name):
                self.store(frame.names, name, MISSING)
            case ast.Subscript(value=owner):
                if isinstance(value := self.evaluate(owner, frame), Known):
                    self.store(value.__dict__, "is_open", True)

    def _execute_loop(
        self, statement: ast.For | ast.AsyncFor | ast.While, frame: Frame
    ) -> str | None:
        if isinstance(statement, ast.While):
            self.evaluate(statement.test, frame)
            items = None
        else:
            items = self.items_of(self.evaluate(statement.iter, frame))
        if items is None or len(items) > MOST_ITEMS or self.is_half_read:
            body = list(statement.body)

            def read() -> str | None:
                if not isinstance(statement, ast.While):
                    unknown = Object(statement.target, parts=())
                    self.assign(statement.target, unknown, frame, statement)
                self.execute(body, frame)
                return None

            self.branch(
                statement, [(f"in the loop of line {statement.lineno}", read), ("", lambda: None)]
            )
            return self.execute(statement.orelse, frame)
        for item in items:
            self.assign(statement.target, item, frame, statement)  # type: ignore[union-attr]
            signal = self.execute(statement.body, frame)
            if signal in ("return", "raise"):
                return signal
            if signal == "loop" and _has_break(statement.body):
                return None
        return self.execute(statement.orelse, frame)

    def _execute_try(self, statement: ast.Try | ast.TryStar, frame: Frame) -> str | None:
        signal = self.execute(statement.body, frame)
        if signal is None:
            signal = self.execute(statement.orelse, frame)
        for handler in statement.handlers:
            # A package is taken to be installed.
            if handler.type is not None and code_of(handler.type) in _IMPORT_ERRORS:
                continue

            def read(
                body: Sequence[ast.stmt] = handler.body, name: str | None = handler.name
            ) -> str | None:
                if name:
                    self.store(frame.names, name, Object(statement, name=name, parts=()))
                return self.execute(body, frame)

            condition = f"after an error in line {statement.lineno}"
            ends = self.branch(statement, [("without an error", lambda: None), (condition, read)])
            if signal == "raise" and ends[1] != "raise":
                signal = None
        return self.execute(statement.finalbody, frame) or signal

    def _define_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> None:
        function = Function(node, frame=frame)
        self.functions.append(function)
        for decorator in node.decorator_list:
            self.evaluate(decorator, frame)
        self.store(frame.names, node.name, function)

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


def _is_main(test: ast.expr) -> bool:
    """Return whether a condition is `__name__ == "__main__"`, in any order."""
    return isinstance(test, ast.Compare) and "__name__" in code_of(test)


def _ends_early(body: Sequence[ast.stmt]) -> bool:
    """Return whether statements certainly end the block they are in."""
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return _ends_early(last.body) and _ends_early(last.orelse)
    is_exit = isinstance(last, ast.Expr) and code_of(last).partition("(")[0] in _EXITS
    return is_exit or isinstance(last, ast.Return | ast.Raise | ast.Break | ast.Continue)


def _has_break(body: Sequence[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Break) for each in body for node in ast.walk(each))


def _as_load(target: ast.expr) -> ast.expr:
    """Return the target of an assignment as an expression that is read."""
    match target:
        case ast.Name(id=name):
            return ast.copy_location(ast.Name(name, ast.Load()), target)
        case ast.Attribute(value=owner, attr=name):
            return ast.copy_location(ast.Attribute(owner, name, ast.Load()), target)
    return target
