"""Makes a test count its assertions as they run: a loop over an empty list runs none of those that it holds."""

import ast
import re
from collections.abc import Iterator, Sequence

from grpo_cli.sandbox.unit_tests import COUNTER

_ASSERTING = re.compile(r"_*(assert(?!ionerror)|raises|warns)", re.IGNORECASE)
"""Names of functions that assert: `assertEqual`, `assert_allclose`, `pytest.raises`."""
_EXPECTING = re.compile(r"\b(raises|assertRaises(Regex)?)\)?\(")
"""Contexts that expect an exception, which an assertion within may raise."""
_FAILING = frozenset("fail exit quit _exit abort".split())
"""Names of functions that fail a test by being called: `self.fail`, `pytest.fail`, `sys.exit`."""
_LEAVING = (ast.Return, ast.Continue, ast.Break)


def count_assertions(code: str) -> str:
    """Return the code of a test with its assertions counted; the same code if it cannot fail.

    Assertions are `assert`, calls of functions that assert, and decisions between going on and failing (`raise`,
    `assert False`, `self.fail()`, `sys.exit()`), which count when they are made. If nothing decides, as in a
    callback that must not be called, the end of the code counts.
    """
    counter = _Counter(ast.parse(code))
    if counter.count:
        return ast.unparse(counter.tree)
    may_fail = any(
        isinstance(each, ast.Assert) or _is_failure(each) for each in ast.walk(counter.tree)
    )
    return f"{code}\n{COUNTER}.checked(True)" if may_fail else code


class _Counter(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        self.count = 0
        self._decisions = set(_find_decisions(tree))
        self.tree = self.visit(tree)

    def visit(self, node: ast.AST) -> ast.AST:
        """Count what a part of the test asserts."""
        is_decision = node in self._decisions
        self.generic_visit(node)
        match node:
            case ast.Assert(test=ast.Constant(value=value)):
                if not value:
                    node.test = self._call("failing", node.test)
                    self.count -= 1
            case ast.Assert():
                node.test = self._call("asserted", node.test)
            case ast.With(items=items):
                if any(_EXPECTING.search(ast.unparse(each.context_expr)) for each in items):
                    expecting = ast.Attribute(
                        ast.Name(COUNTER, ast.Load()), "expecting", ast.Load()
                    )
                    items.insert(0, ast.withitem(ast.Call(expecting, [], [])))
            case ast.If() | ast.While() | ast.IfExp() if is_decision:
                node.test = self._call("checked", node.test)
            case ast.BoolOp() if is_decision:
                node.values[0] = self._call("checked", node.values[0])
            case ast.Match() if is_decision:
                node.subject = self._call("checked", node.subject)
            case ast.ExceptHandler() if is_decision:
                node.body.insert(0, self._mark())
            case ast.Try() | ast.For() if is_decision:
                node.orelse.insert(0, self._mark())
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                if _ASSERTING.match(name):
                    return self._call("asserting", node)
        return node

    def _call(self, method: str, value: ast.expr) -> ast.expr:
        self.count += 1
        counter = ast.Name(COUNTER, ast.Load())
        return ast.Call(ast.Attribute(counter, method, ast.Load()), [value], [])

    def _mark(self) -> ast.stmt:
        return ast.Expr(self._call("checked", ast.Constant(None)))


def _find_decisions(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what decides whether a test fails: conditions, handlers, and statements whose `else` means success."""
    for node in ast.walk(tree):
        match node:
            case ast.If() | ast.IfExp() | ast.While() | ast.BoolOp() if _decides(node):
                yield node
            case ast.Match(cases=cases) if any(_fails(case.body) for case in cases):
                yield node
            case ast.Try(body=body, handlers=handlers, orelse=orelse):
                failing = [each for each in handlers if _fails(each.body)]
                if _fails(body) or _fails(orelse):
                    yield from (each for each in handlers if each not in failing)
                if failing:
                    yield node
            case ast.For(body=body, orelse=orelse):
                if body and _is_failure(body[0]):
                    yield node
                if _fails(orelse):
                    yield from _find_exits(body)
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(block, list):
                ends = [index for index, each in enumerate(block) if _is_failure(each)]
                yield from _find_exits(block[: ends[0]] if ends else [])


def _decides(node: ast.AST) -> bool:
    match node:
        case ast.If(body=body, orelse=orelse) | ast.While(body=body, orelse=orelse):
            is_chain = len(orelse) == 1 and isinstance(orelse[0], ast.If) and _decides(orelse[0])
            return _fails(body) or _fails(orelse) or is_chain
        case ast.IfExp(body=value, orelse=other):
            return _fails([value, other])
        case ast.BoolOp(values=[_, *rest]):
            return _fails(rest)
    return False


def _fails(block: Sequence[ast.AST]) -> bool:
    return any(map(_is_failure, block))


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


def _find_exits(block: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the conditions and handlers by which code leaves a block that fails at its end."""
    for node in (inner for part in block for inner in ast.walk(part)):
        if isinstance(node, ast.If | ast.ExceptHandler):
            parts = [*node.body, *getattr(node, "orelse", [])]
            if any(isinstance(each, _LEAVING) for each in parts):
                yield node
