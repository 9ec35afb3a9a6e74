"""The code of tests: statements become checks, each with what it takes from the program and from the library."""

import ast
import builtins
import importlib
import re
import symtable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.errors import RewardError
from grpo_cli.rewards.kinds.assertion_counts import count_assertions
from grpo_cli.sandbox import unit_tests
from grpo_cli.sandbox.child import MODULE
from grpo_cli.sandbox.runner import Check, Step
from grpo_cli.sandbox.unit_tests import COUNTER

_LIBRARY = frozenset(
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator os "
    "pytest random re statistics string sys time typing unittest".split()
)
"""Modules that tests use without importing them, as their programs do."""
_PACKAGES = {
    **{name: name for name in "networkx numpy pandas scipy sklearn sympy tensorflow torch".split()},
    "np": "numpy",
    "nx": "networkx",
    "pd": "pandas",
    "plt": "matplotlib.pyplot",
    "sns": "seaborn",
    "sp": "sympy",
    "tf": "tensorflow",
}
"""Packages that tests use without importing them; what a program defines in their place would be its own judge."""
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
        "math": "ceil fabs floor isclose isfinite isinf isnan pi sqrt",
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

_UNSUPPORTED = frozenset(
    "usefixtures xfail assertWarns assertWarnsRegex assertLogs redirect_stdout redirect_stderr reload".split()
)
"""What tests call to no effect, or to none that reaches the program's process."""
_INSPECTED = frozenset(
    "getdoc getfullargspec getsource getsourcelines iscoroutinefunction isfunction isgeneratorfunction "
    "signature".split()
)
"""What tests ask of a program's functions, which the test's process does not have."""
_FIXTURES = frozenset(
    "cache capfd caplog capsys capsysbinary doctest_namespace mocker monkeypatch pytestconfig pytester recwarn "
    "request tmp_path tmp_path_factory tmpdir benchmark".split()
)
"""Fixtures that are pytest's own or its plugins'."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class ProgramTest:
    """A run of a program, with one test or more."""

    check: Check | None = None
    stdin: str = ""
    output: str = ""
    """What has to be printed, without a check."""


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


def find_unsupported(body: Sequence[ast.stmt]) -> str:
    """Return a form of tests that cannot be run; empty if there is none."""
    own = {part.name for part in body if isinstance(part, ast.FunctionDef)}
    for node in _walk(body):
        match node:
            case ast.AsyncFunctionDef() | ast.Attribute(value=ast.Name(id="asyncio")):
                return "coroutines (`async def`, `asyncio`)"
            case ast.Attribute(value=ast.Name(id="pytest"), attr=name):
                if not hasattr(unit_tests, name):
                    return f"`pytest.{name}`"
            case ast.ImportFrom(module="pytest", names=names):
                for each in names:
                    if not hasattr(unit_tests, each.name):
                        return f"`pytest.{each.name}`"
            case ast.Attribute(attr=name) | ast.alias(name=name) if name in _UNSUPPORTED:
                return f"`{name}`"
            case ast.Attribute(ast.Name("sys"), "stdin" | "stdout" | "stderr" as name, ast.Store()):
                return f"`sys.{name} = …`"
            case ast.Call(ast.Name("exec")) | ast.Attribute(
                ast.Name("pickle" | "dill" | "joblib"), "load" | "loads"
            ):
                return f"`{ast.unparse(node):.40}`, which would run the program's code in the test"
            case ast.Attribute(ast.Name("inspect"), name) if name in _INSPECTED:
                return f"`inspect.{name}`"
            case ast.ImportFrom() | ast.Attribute(attr="patch"):
                if re.search(r"\bmock\b.*\bpatch\b", ast.unparse(node)):
                    return "`mock.patch`"
            case ast.Call(func=function, keywords=keywords):
                if ast.unparse(node).endswith("catch_warnings(record=True)"):
                    return "`catch_warnings(record=True)`"
                if ast.unparse(function).endswith("fixture"):
                    for keyword in keywords:
                        if keyword.arg not in ("scope", "autouse"):
                            return f"`{keyword.arg}` of `pytest.fixture`"
            case ast.FunctionDef(args=args):
                decorators = "\n".join(map(ast.unparse, node.decorator_list))
                if _is_test(node) or "fixture" in decorators:
                    for arg in args.args:
                        if arg.arg in _FIXTURES - own and arg.arg not in decorators:
                            return f"the fixture `{arg.arg}`"
    return ""


def _executed(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return what is more than definitions."""
    return [part for part in body if not isinstance(part, _DEFINITIONS)]


def read_code(texts: Sequence[list[ast.stmt]], function: str | None) -> ProgramTest:
    """Return texts as one run: each assertion between statements that prepare is a test; else a text is one.

    Texts that assert nothing prepare the next ones.
    """
    steps: list[Step] = []
    whole: list[ast.stmt] = []
    asserting: set[str] = set()
    for text in texts:
        body = _add_function(text, function)
        whole += body
        collected = _collect(body)
        if body and isinstance(body[-1], ast.Assert) and not collected:
            codes = [count_assertions(ast.unparse(each)) for each in body]
            are_tests = [isinstance(each, ast.Assert) for each in body]
            steps += map(Step, codes, are_tests)
            continue
        code = count_assertions(_write(body))
        calls = asserting & _names(_executed(body), ast.Load)
        is_test = bool(collected or calls or (COUNTER in code and _runs_something(body)))
        steps.append(Step(code, asserts=is_test, collected=collected))
        if COUNTER in code or asserting & _names(body, ast.Load):
            asserting |= {each.name for each in body if isinstance(each, _DEFINITIONS)}
    if form := find_unsupported(whole):
        raise RewardError(
            f"the tests use {form}, which the sandbox does not have: {_write(whole)!r:.60}",
            "write these tests as assertions, or leave the row out",
        )
    names, imports = _find_names(whole)
    if name := _find_derived(whole, names):
        raise RewardError(
            f"the tests derive a class from the program's {name}, which the sandbox does not have: "
            f"{_write(whole)!r:.60}",
            "leave the row out",
        )
    assigned = sorted(_find_globals(_write(whole))[1].intersection(names))
    return ProgramTest(Check(names, assigned, [Step(imports), *steps]))


def _find_derived(body: Sequence[ast.stmt], names: Sequence[str]) -> str:
    """Return the program's class that one of the tests is derived from; exceptions may be."""
    classes = [node for node in _walk(body) if isinstance(node, ast.ClassDef)]
    bases = {
        ast.unparse(base).removeprefix(f"{MODULE}.") for each in classes for base in each.bases
    }
    found = sorted(bases.intersection(names))
    return next((name for name in found if not re.search("Err|Exc|Warn", name)), "")


def _add_function(body: list[ast.stmt], function: str | None) -> list[ast.stmt]:
    """Return a text that also calls HumanEval's `check(candidate)`, or imports the function that it tests."""
    defined = {part.name for part in body if isinstance(part, ast.FunctionDef)}
    if function and "check" in defined:
        # Which somebody else has to call.
        body = [part for part in body if ast.unparse(part) != f"check({function})"]
        if not any("check(" in ast.unparse(part) for part in body if isinstance(part, ast.Expr)):
            call = f"import {MODULE} as _program\ncheck(_program.{function})"
            body = [*body, *ast.parse(call).body]
    elif function in {*dir(builtins), *_HELPERS} & _names(body, ast.Load) - _find_requested(body):
        # Not taken from a program unless this is asked for.
        body = [*ast.parse(f"from {MODULE} import {function}").body, *body]
    return body


def _names(body: Sequence[ast.AST], context: type[ast.expr_context]) -> set[str]:
    nodes = (node for node in _walk(body) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, context)}


def _runs_something(body: Sequence[ast.stmt]) -> bool:
    """Return whether more than definitions is run: a function that asserts and is never called tests nothing."""
    run = _walk(_executed(body))
    return any(isinstance(node, ast.Call | ast.Assert | ast.Raise) for node in run)


def _walk(body: Sequence[ast.AST]) -> list[ast.AST]:
    return [node for part in body for node in ast.walk(part)]


def _write(body: Sequence[ast.stmt]) -> str:
    return ast.unparse(ast.Module(body=list(body), type_ignores=[]))


def _find_names(body: Sequence[ast.stmt]) -> tuple[list[str], str]:
    """Return the names that code takes from the program, and imports of what it uses of the library."""
    missing = _find_globals(_write(body))[0]
    imports = {}
    requested = _find_requested(body)
    for node in _walk(body):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in missing:
                if name in _PACKAGES:
                    imports[name] = f"import {_PACKAGES[name]} as {name}\n"
                elif name in _LIBRARY and _has(name, attribute):
                    imports[name] = f"import {name}\n"
    missing -= imports.keys()
    if requested or missing - _HELPERS.keys():
        # Otherwise they are what is tested.
        helpers = (missing & _HELPERS.keys()) - _find_own_helpers(body)
        imports |= {name: f"from {_HELPERS[name]} import {name}\n" for name in helpers}
    lines = "".join(imports[name] for name in sorted(imports))
    return sorted(requested | missing - imports.keys()), lines


def _find_own_helpers(body: Sequence[ast.AST]) -> set[str]:
    """Return the names of helpers whose results code uses as the library's have no use: `Counter().inc()`."""
    nodes = _walk(body)
    made = {}
    for node in nodes:
        match node:
            case ast.Assign([ast.Name(target)], ast.Call(ast.Name(name))) if name in _HELPERS:
                made[target] = name
    own = set()
    for node in nodes:
        match node:
            case ast.Attribute(ast.Call(ast.Name(name)), attribute) if name in _HELPERS:
                pass
            case ast.Attribute(ast.Name(target), attribute) if target in made:
                name = made[target]
            case _:
                continue
        kind = getattr(importlib.import_module(_HELPERS[name]), name)
        if isinstance(kind, type) and not hasattr(kind, attribute):
            own.add(name)
    return own


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


def _find_globals(code: str) -> tuple[set[str], set[str]]:
    """Return the names that code uses and neither it nor Python defines, and those that it assigns."""
    used: set[str] = set()
    assigned: set[str] = set()
    defined = {*dir(builtins), "exit", "quit"}
    tables = [symtable.symtable(code, "test.py", "exec")]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() == "module" or symbol.is_global():
                name = symbol.get_name()
                if symbol.is_assigned() or symbol.is_namespace():
                    assigned.add(name)
                (defined if name in assigned or symbol.is_imported() else used).add(name)
    return {name for name in used - defined if not name.startswith("__")}, assigned
