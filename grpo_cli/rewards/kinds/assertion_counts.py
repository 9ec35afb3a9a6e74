"""Makes a test count its assertions as they run: a loop over an empty list runs none of those that it holds."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_cli.sandbox.unit_tests import COUNTER, RESULTS

_ASSERTING = re.compile(r"_*(assert(?!ionerror)|raises|warns)", re.IGNORECASE)
"""Names of functions that assert: `assertEqual`, `assert_allclose`, `pytest.raises`."""
_EXPECTING = re.compile(r"\b(raises|assertRaises(Regex)?)\)?\(")
"""Contexts that expect an exception, which an assertion within may raise."""
_FAILING = frozenset("fail exit quit _exit abort".split())
"""Names of functions that fail a test by being called: `self.fail`, `pytest.fail`, `sys.exit`."""
_CONDITIONS = (ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.Match, ast.Try, ast.ExceptHandler)
_SIMPLE = (ast.Assert, ast.Expr, ast.Assign, ast.Return, ast.Raise)


def count_assertions(code: str) -> str:
    """Return the code of a test with its assertions counted; the same code if it cannot fail.

    Assertions are `assert` and calls of functions that assert. In code without any that fails in another way
    (`raise`, `assert False`, `self.fail()`, `sys.exit()`), conditions count; without these, its end does.
    """
    counter = _Counter(ast.parse(code))
    may_fail = any(
        isinstance(each, ast.Assert) or _is_failure(each) for each in ast.walk(counter.tree)
    )
    counted = ast.unparse(ast.fix_missing_locations(counter.tree))
    return f"{counted}\n{COUNTER}.reached()" if may_fail and not counter.count else counted


class _Counter(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        self.count = 0
        self._must_raise = False
        self._conditions: set[ast.AST] = set()
        scopes = [each for each in ast.walk(tree) if isinstance(each, ast.Module | ast.FunctionDef)]
        for nodes in (list(_walk(each.body)) for each in scopes):
            if any(map(_is_failure, nodes)) and not any(map(_asserts, nodes)):
                self._conditions |= {each for each in nodes if isinstance(each, _CONDITIONS)}
        self.tree = self.visit(tree)

    def visit(self, node: ast.AST) -> ast.AST:
        """Count what a part of the test asserts, and watch for exceptions that it should not raise."""
        is_condition, before = node in self._conditions, self._must_raise
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple):
            # `assert (f(3) == 4, "four")` means something else, and is always true.
            node.test, node.msg = [*node.test.elts, None][:2]  # type: ignore[assignment]
        if isinstance(node, ast.Try):
            self._must_raise = any(map(_is_failure, [*node.body, *node.orelse]))
            if not self._must_raise and _hides_exceptions(node):
                node.body = [self._watch(node.body)]
        parts = list(_walk([node])) if isinstance(node, _SIMPLE) else []
        watched: Any = node
        if any(map(_asserts, parts)):
            watched = self._watch([node])
        elif any(map(_is_failure, parts)):
            watched = self._watch([node], "AssertionError")
        self.generic_visit(node)
        self._must_raise = before
        match node:
            case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
                is_literal = not any(isinstance(each, ast.Name) for each in ast.walk(left))
                node.test = self._call("equal", *([right, left] if is_literal else [left, right]))
                node.test = _discard(node.test)
                node.msg = node.msg or _attribute(COUNTER, "difference")
            case ast.Assert(test=test) if not isinstance(test, ast.Constant):
                node.test = _discard(self._call("checked", test))
            case ast.With(items=items):
                if any(_EXPECTING.search(ast.unparse(each.context_expr)) for each in items):
                    items.insert(0, _watch("BaseException", ast.Constant(True)))
            case ast.If() | ast.While() | ast.IfExp() if is_condition:
                node.test = self._call("checked", node.test)
            case ast.BoolOp() if is_condition:
                node.values[0] = self._call("checked", node.values[0])
            case ast.Match() if is_condition:
                node.subject = self._call("checked", node.subject)
            case ast.ExceptHandler() if is_condition:
                node.body.insert(0, self._mark())
            case ast.Try() if is_condition and node.handlers:
                node.orelse.insert(0, self._mark())
            case ast.For() | ast.comprehension():
                node.iter = _method("look", node.iter, owner=RESULTS)
            case ast.Expr(ast.Call() as call) if _is_chain(call):
                node.value = _discard(call)
            case ast.Name(ctx=ast.Load()) | ast.Attribute(ctx=ast.Load()) if _asserts(node):
                return self._call("asserting", node)
        return watched

    def _call(self, method: str, *values: ast.expr) -> ast.expr:
        self.count += 1
        return _method(method, *values)

    def _mark(self) -> ast.stmt:
        return ast.Expr(self._call("reached"))

    def _watch(self, body: Any, kind: str = "") -> ast.stmt:
        kind = kind or ("AssertionError" if self._must_raise else "BaseException")
        return ast.With([_watch(kind)], body)


def _watch(kind: str, *options: ast.expr) -> ast.withitem:
    return ast.withitem(_method("watch", ast.Name(kind, ast.Load()), *options))


def _method(name: str, *values: ast.expr, owner: str = COUNTER) -> ast.expr:
    return ast.Call(_attribute(owner, name), [*values], [])


def _discard(value: ast.expr) -> ast.expr:
    """Return a value that the test does not keep."""
    return _method("discard", _method("count_returned", owner=RESULTS), value, owner=RESULTS)


def _attribute(owner: str, name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(owner, ast.Load()), name, ast.Load())


def _is_chain(node: ast.AST) -> bool:
    """Return whether code calls methods of an object with nothing that calls: `t.add(5).add(x)`."""
    match node:
        case ast.Call(ast.Attribute(value=owner) as function, args):
            has_calls = any(isinstance(each, ast.Call) for each in _walk(args))
            return not has_calls and not _asserts(function) and _is_chain(owner)
        case ast.Attribute(value=owner):
            return _is_chain(owner)
    return isinstance(node, ast.Name)


def _walk(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of code, without those of the functions that it defines."""
    for node in body:
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from _walk(list(ast.iter_child_nodes(node)))


def _asserts(node: ast.AST) -> bool:
    match node:
        case ast.Assert(test=test):
            return not isinstance(test, ast.Constant)
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
            return bool(_ASSERTING.match(name))
    return False


def _hides_exceptions(node: ast.Try) -> bool:
    """Return whether a `try` asserts, and what handles a failed call catches everything and asserts nothing."""
    for handler in node.handlers:
        caught = ast.unparse(handler.type) if handler.type else "BaseException"
        if caught != "AssertionError":
            is_silent = not any(map(_asserts, _walk(handler.body)))
            is_broad = caught in ("Exception", "BaseException")
            return is_broad and is_silent and any(map(_asserts, _walk(node.body)))
    return False


def _is_failure(node: ast.AST) -> bool:
    """Return whether a part of a test fails it whenever it is run."""
    match node:
        case ast.Expr(value=value):
            return _is_failure(value)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _FAILING
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
    return isinstance(node, ast.Raise)
