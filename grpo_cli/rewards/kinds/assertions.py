"""The code of tests: statements become checks, each with what it takes from the program and from the library."""

import ast
import builtins
import importlib
import re
import symtable
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_cli.rewards.kinds.assertion_counts import count_assertions
from grpo_cli.rewards.sandbox.child import MODULE
from grpo_cli.rewards.sandbox.runner import Check
from grpo_cli.rewards.sandbox.unit_tests import COUNTER

_CONSTRUCTORS: Mapping[str, Any] = {
    each.__name__: each for each in (set, frozenset, tuple, list, dict, sorted, float)
}
"""What may be called in an expected value."""
_LIBRARY = {
    **{
        name: name
        for name in "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math "
        "numpy operator os pytest random re statistics string sys time typing unittest".split()
    },
    "np": "numpy",
}
"""Modules that tests use without importing them, as their programs do, by the names they have there."""
_HELPERS = {
    name: module
    for module, names in {
        "collections": "Counter OrderedDict defaultdict deque namedtuple",
        "copy": "copy deepcopy",
        "dataclasses": "dataclass",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "functools": "reduce",
        "itertools": "chain islice",
        "math": "ceil fabs floor inf isclose isfinite isinf isnan nan pi sqrt",
        "pytest": "approx raises",
        "typing": "Any Callable Dict Iterable Iterator List Optional Sequence Set Tuple Union",
        "unittest": "TestCase",
    }.items()
    for name in names.split()
}
"""What tests compare with and do not import; a program's would be its own judge."""
_PROGRAM = frozenset(
    "solution solutions program main submission answer implementation module my_module your_module".split()
)
"""Modules that tests import what they test from."""


@dataclass(frozen=True)
class ProgramTest:
    """One test."""

    expected: Any = None
    """What has to equal the check's value, which is None of statements; without a check, what is printed."""
    check: Check | None = None
    stdin: str = ""


def read_doctest(text: str) -> str:
    """Return a session of Python's prompt as assertions."""
    from doctest import DocTestParser

    lines = []
    for example in DocTestParser().get_examples(text):
        source, want = example.source.strip(), example.want.strip()
        if example.exc_msg:
            lines.append(f"with raises({example.exc_msg.partition(':')[0].strip()}):\n    {source}")
        elif not want:
            lines.append(source)
        else:
            try:
                ast.literal_eval(want)
                lines.append(f"assert ({source}) == {want}")
            except (ValueError, SyntaxError):
                lines.append(f"assert repr({source}) == {want!r}")
    return "\n".join(lines)


class Runnable(ast.NodeTransformer):
    """Makes a test file run as one text: the program's module is `solution`, and no test runner is started."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Read `from package.main import f` as `from solution import f`."""
        if node.level or (node.module or "").rpartition(".")[2] in _PROGRAM:
            return ast.ImportFrom(MODULE, node.names, 0)
        return node

    def visit_Import(self, node: ast.Import) -> Any:
        """Read `import main` as `import solution as main`."""
        for each in node.names:
            if each.name in _PROGRAM:
                each.asname, each.name = each.asname or each.name, MODULE
        return node

    def visit_If(self, node: ast.If) -> Any:
        """Take what runs if the file is run."""
        self.generic_visit(node)
        match node.test:
            case ast.Compare(left=ast.Name(id="__name__")):
                return node.body
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        """Leave out `unittest.main()`."""
        is_runner = re.match(r"(unittest|pytest|doctest)\.(main|testmod)\(", ast.unparse(node))
        return ast.Pass() if is_runner else self.generic_visit(node)


def _collect(body: Sequence[ast.stmt]) -> list[str]:
    """Return the test functions and classes that nothing in the file calls."""
    used = _names(_executed(body), ast.Load)
    return [
        part.name
        for part in body
        if isinstance(part, ast.FunctionDef | ast.ClassDef)
        and part.name not in used
        and (part.name.lower().startswith("test") or _is_case(part))
        and (isinstance(part, ast.FunctionDef) or any(_is_test(each) for each in part.body))
    ]


def _is_case(part: ast.stmt) -> bool:
    return isinstance(part, ast.ClassDef) and any(
        ast.unparse(base).endswith("TestCase") for base in part.bases
    )


def _is_test(part: ast.stmt) -> bool:
    return isinstance(part, ast.FunctionDef) and part.name.startswith("test")


def _executed(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return what is more than definitions."""
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [part for part in body if not isinstance(part, definitions)]


def read_code(body: list[ast.stmt], function: str | None) -> list[ProgramTest]:
    """Read one test per assertion if all else between them is preparation; else one in all."""
    defined = {part.name for part in body if isinstance(part, ast.FunctionDef)}
    if function and "check" in defined:
        # HumanEval's `check(candidate)`, which somebody else has to call.
        body = [part for part in body if ast.unparse(part) != f"check({function})"]
        if not any("check(" in ast.unparse(part) for part in body if isinstance(part, ast.Expr)):
            call = f"import {MODULE} as _program\ncheck(_program.{function})"
            body = [*body, *ast.parse(call).body]
    elif function in {*dir(builtins), *_HELPERS} & _names(body, ast.Load) - _find_requested(body):
        # Not taken from a program unless this is asked for.
        body = [*ast.parse(f"from {MODULE} import {function}").body, *body]
    tests = []
    setup: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Assert):
            tests.append(_read_assertion(setup, statement))
            setup += repeat(setup, [statement])
        else:
            setup.append(statement)
    collected = _collect(body)
    if tests and isinstance(body[-1], ast.Assert) and not collected:
        return tests
    check = _isolate(body, collected=collected)
    asserts = COUNTER in check.setup and (collected or _runs_something(body))
    return [ProgramTest(check=check)] if asserts else []


def _names(body: Sequence[ast.AST], context: type[ast.expr_context]) -> set[str]:
    nodes = (node for node in _walk(body) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, context)}


def repeat(setup: Sequence[ast.stmt], body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements that evaluate again, whatever comes of it, what is asserted of objects that `setup` made.

    `assert s.pop() == 2` changes what the next assertion sees.
    """
    anything = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
    made = _names(setup, ast.Store)
    return [
        ast.Try([ast.Expr(each.test)], [anything], [], [])
        for each in body
        if isinstance(each, ast.Assert) and made & _names([each.test], ast.Load)
    ]


def _runs_something(body: Sequence[ast.stmt]) -> bool:
    """Return whether more than definitions is run: a function that asserts and is never called tests nothing."""
    run = _walk(_executed(body))
    return any(isinstance(node, ast.Call | ast.Assert | ast.Raise) for node in run)


def _read_assertion(setup: list[ast.stmt], statement: ast.Assert) -> ProgramTest:
    match statement.test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            for expression, expected in ((left, right), (right, left)):
                known, value = compute(expected)
                if known:
                    check = replace(_isolate(setup, expression), expected=ast.unparse(expected))
                    return ProgramTest(value, check)
    return ProgramTest(check=_isolate([*setup, statement]))


def _walk(body: Sequence[ast.AST]) -> list[ast.AST]:
    return [node for part in body for node in ast.walk(part)]


def _isolate(
    body: Sequence[ast.stmt], expression: ast.expr | None = None, collected: Sequence[str] = ()
) -> Check:
    """Return a check that imports what it uses of the library, and takes from the program what is left."""
    value = ast.unparse(expression) if expression else ""
    setup = ast.unparse(ast.Module(body=list(body), type_ignores=[]))
    missing = _find_undefined(f"{setup}\n{value}")
    imports = {}
    parts = [*body, expression] if expression else body
    requested = _find_requested(parts)
    for node in _walk(parts):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in missing:
                if name in _LIBRARY and _has(_LIBRARY[name], attribute):
                    imports[name] = f"import {_LIBRARY[name]} as {name}\n"
    missing -= imports.keys()
    if requested or missing - _HELPERS.keys():
        helpers = missing & _HELPERS.keys()
        imports |= {name: f"from {_HELPERS[name]} import {name}\n" for name in helpers}
    lines = "".join(imports[name] for name in sorted(imports))
    return Check(
        names=sorted(requested | missing - imports.keys()),
        setup=lines + (setup if expression else count_assertions(setup)),
        collected=list(collected),
        expression=value,
    )


def _find_requested(body: Sequence[ast.AST]) -> set[str]:
    """Return the names that code imports from the program, or reads of its module."""
    nodes = _walk(body)
    imported = [each for node in nodes if isinstance(node, ast.Import) for each in node.names]
    modules = {each.asname for each in imported if each.name == MODULE}
    requested = set()
    for node in nodes:
        match node:
            case ast.ImportFrom(module=module, names=names) if module == MODULE:
                requested |= {each.name for each in names} - {"*"}
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                requested.add(attribute)
    return requested


def _has(module: str, attribute: str) -> bool:
    try:
        return module == "pytest" or hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def _find_undefined(code: str) -> set[str]:
    """Return the names that code uses and neither it nor Python defines."""
    used: set[str] = set()
    defined = {*dir(builtins), "exit", "quit"}
    tables = [symtable.symtable(code, "test.py", "exec")]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() == "module" or symbol.is_global():
                is_defined = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
                (defined if is_defined else used).add(symbol.get_name())
    return {name for name in used - defined if not name.startswith("__")}


def compute(node: ast.expr) -> tuple[bool, Any]:
    """Return whether a node is a literal, or a call such as `set([1, 2])`, and its value."""
    try:
        match node:
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CONSTRUCTORS:
                parts = [compute(argument) for argument in args]
                if all(known for known, _ in parts):
                    return True, _CONSTRUCTORS[name](*(value for _, value in parts))
                return False, None
        return True, ast.literal_eval(node)
    except (ValueError, TypeError):
        return False, None
