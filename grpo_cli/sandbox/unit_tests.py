"""Runs test functions and classes, which import this module as `pytest`: it has what they use of that."""

import sys
from itertools import product

from grpo_cli.sandbox.peer import Remote
from grpo_cli.sandbox.results import find_difference, find_result_difference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from grpo_cli.sandbox.rules import TestPeer


COUNTER = "__counter__"
"""The name by which a test counts its assertions."""
RESULTS = "__results__"
"""The name by which it looks at results, and discards them."""
_EXPRESSION = frozenset(
    "Expression Constant BinOp UnaryOp BoolOp Compare IfExp Tuple List Dict Set Subscript Slice Load".split()
)
_EVALUATED = frozenset(
    "abs bool complex divmod float int len max min pow round sorted str sum".split()
)
"""Functions that an evaluated expression may call."""


class Assertions:
    """Counts the assertions of a test as they run, and remembers whether one failed.

    Some functions of Python's are its own, as theirs would pass over an empty result of the program.
    """

    def __init__(self, compare: str, peer: "TestPeer") -> None:
        self.count_returned, self.discard = peer.count_returned, peer.discard
        self.count = 0
        self.has_failed = False
        self._is_empty = False
        """Whether the last loop was over no items."""
        self.difference = ""
        self._compare = compare

    def start(self) -> int:
        """Forget the failures of an earlier test; return the assertions until now."""
        self.has_failed = False
        return self.count

    def checked(self, value: "Any") -> "Any":
        """Count a condition, unless the last loop before it was over nothing."""
        self.count += not self._is_empty
        self._is_empty = False
        return value

    def look(self, items: "Any") -> "Any":
        """Yield the items that a loop is over."""
        is_empty = True
        for item in items:
            is_empty = self._is_empty = False
            yield item
        self._is_empty = is_empty

    def all(self, items: "Any") -> bool:
        """Return whether all items are true."""
        return all(self.look(items))

    def any(self, items: "Any") -> bool:
        """Return whether one of the items is true."""
        return any(self.look(items))

    def map(self, function: "Any", *items: "Any") -> "Any":
        """Yield the results of a function; one that the program's iterator ends is an error."""
        for row in self.look(zip(*items, strict=False)):
            yield function(*row)

    def filter(self, function: "Any", items: "Any") -> "Any":
        """Yield the items of which a function is true, or that are."""
        for item in self.look(items):
            if function(item) if function else item:
                yield item

    def eval(self, source: "Any", *scopes: "Any") -> "Any":
        """Evaluate an expression of plain values, and of names in `scopes`; other code may be the program's."""
        import ast

        tree = ast.parse(source.strip(), mode="eval")
        known = _EVALUATED.union(*scopes)
        signs = ast.operator | ast.unaryop | ast.cmpop | ast.boolop
        for node in ast.walk(tree):
            called = getattr(node, "func", node)
            is_known = isinstance(called, ast.Name) and called.id in known
            if not (is_known or isinstance(node, signs) or type(node).__name__ in _EXPRESSION):
                raise AssertionError(f"`eval` of {source!r:.60} would run the program's code")
        value = eval(compile(tree, "test.py", "eval"), *scopes)
        if value != value:
            raise AssertionError(f"`eval` of {source!r:.60} is not a number")
        return value

    def zip(self, *items: "Any", strict: bool = False) -> "Any":
        """Yield rows; that there are none where several are expected fails the test."""
        is_empty = True
        for row in zip(*items, strict=strict):
            is_empty = False
            yield row
        # Not of `zip(items, items[1:])` with one item.
        sizes = [len(each) for each in items if type(each) in (list, tuple, dict, str, range)]
        if is_empty and max(sizes, default=0) > 1:
            raise AssertionError("expected items, got none")

    def reached(self) -> None:
        """Count that the test came this far."""
        self.count += 1

    def equal(self, value: "Any", expected: "Any") -> bool:
        """Count a comparison, and keep what to say of it."""
        self.count += 1
        self._is_empty = False
        self.difference = find_difference(value, expected, self._compare)
        return not self.difference

    def returned(self, value: "Any", expected: "Any", is_wrapped: bool) -> None:
        """Count a call, whose result was written as JSON."""
        self.count += 1
        if fault := find_result_difference(value, expected, self._compare, is_wrapped):
            raise AssertionError(fault)

    def asserting(self, function: "Any") -> "Any":
        """Return a function with its calls counted; one of the test's has assertions of its own."""
        if not callable(function) or isinstance(function, type | Remote):
            return function
        if getattr(function, "__module__", None) == "test":
            return function

        def call(*args: "Any", **kwargs: "Any") -> "Any":
            if getattr(function, "__name__", "") not in ("assertTrue", "assertFalse"):
                self._is_empty = False
            # What fails within is expected, as in `assertRaises(AssertionError, check, 3)`.
            with self.watch(BaseException, True):
                return self.checked(function(*args, **kwargs))

        return call

    def watch(self, failure: "type[BaseException]", is_expecting: bool = False) -> "_Watch":
        """Return a context that fails the test if this exception leaves it, even if the test catches it.

        If it is `is_expecting` an exception, assertions within may fail.
        """
        return _Watch(self, failure, is_expecting)

    def require(self, before: int, function: "Any" = None) -> None:
        """Raise an exception if none ran since `count` was that; a function may be one without assertions."""
        code = getattr(function, "__code__", None)
        if self.count == before and (function is None or (code and _has_assertions(code))):
            raise AssertionError("none of the test's assertions ran")

    def require_no_failure(self) -> None:
        """Raise an exception if an assertion failed and the test caught that."""
        if self.has_failed:
            raise AssertionError("an assertion failed, and the test caught its exception")


class _Watch:
    def __init__(self, assertions: Assertions, failure: "type[BaseException]", is_expecting: bool):
        self.assertions, self.before = assertions, assertions.has_failed
        self.failure, self.is_expecting = failure, is_expecting

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: "Any", *_: object) -> None:
        if kind and issubclass(kind, self.failure):
            self.assertions.has_failed = True
        elif self.is_expecting:
            self.assertions.has_failed = self.before


def _has_assertions(code: "Any") -> bool:
    inner = [each for each in code.co_consts if hasattr(each, "co_names")]
    counted = COUNTER in code.co_names and not {
        "checked",
        "equal",
        "asserting",
        "reached",
    }.isdisjoint(code.co_names)
    return counted or any(map(_has_assertions, inner))


def run(names: "dict[str, Any]", collected: "list[str]") -> None:
    """Run functions and classes of tests; raises what the first that fails raises."""
    module = sys.modules["test"]
    if collected:
        _call_hook(module, "setup_module", module)
    values: dict[str, dict[str, Any]] = {}
    values["module"] = values["package"] = values["session"] = {}
    for target in map(names.__getitem__, collected):
        values["class"] = {}
        if not isinstance(target, type):
            _call_hook(module, "setup_function", target)
            _run_function(target, names, values)
            _call_hook(module, "teardown_function", target)
        elif hasattr(target, "assertEqual"):
            _run_case(target, names[COUNTER])
        else:
            _call_hook(target, "setup_class", target)
            for method in [each for each in dir(target) if each.startswith("test")]:
                _run_function(getattr(target, method), names, values, target)
            _call_hook(target, "teardown_class", target)
    if collected:
        _call_hook(module, "teardown_module", module)


def _call_hook(owner: "Any", name: str, *args: object) -> None:
    """Call a function such as `setup_module`, if there is one, with as many arguments as it takes."""
    if hook := getattr(owner, name, None):
        hook(*args[: len(_parameters(hook))])


def _parameters(function: "Any") -> "list[str]":
    """Return the names of a function's parameters that have no default."""
    plain = getattr(function, "__func__", function)
    count = plain.__code__.co_argcount - len(plain.__defaults__ or ())
    return list(plain.__code__.co_varnames[plain is not function : count])


def _run_case(case: "Any", assertions: Assertions) -> None:
    import unittest

    class Result(unittest.TestResult):
        def startTest(self, test: "Any") -> None:  # noqa: N802
            super().startTest(test)
            self.before, self.had_failed = assertions.count, assertions.has_failed

        def addExpectedFailure(self, test: "Any", error: "Any") -> None:  # noqa: N802
            super().addExpectedFailure(test, error)
            assertions.has_failed = self.had_failed

        def addSuccess(self, test: "Any") -> None:  # noqa: N802
            assertions.require(self.before, getattr(test, test.id().rpartition(".")[2]))

    result = Result()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    if failures := [*result.failures, *result.errors]:
        raise AssertionError(failures[0][1].strip().rpartition("\n")[2])
    if result.unexpectedSuccesses or result.testsRun == len(result.skipped):
        raise AssertionError(f"no test of {case.__name__} passed")


def _run_function(
    function: "Any", names: "dict[str, Any]", values: "dict[str, Any]", owner: "Any" = None
) -> None:
    """Run a test function, or a method of the class `owner`, with each row of its parameters."""
    assertions = names[COUNTER]
    before = assertions.count
    rows = list(product(*getattr(function, "parameters", []), *getattr(owner, "parameters", [])))
    if not rows:
        raise AssertionError("a test without parameters was not run")
    for parts in rows:
        instance = owner and owner()
        bound = getattr(instance, function.__name__) if owner else function
        row = {name: value for part in parts for name, value in part.items()}
        fixtures = {name: value for name, value in names.items() if _is_fixture(value)}
        for name in dir(owner) if owner else ():
            if _is_fixture(getattr(owner, name)):
                fixtures[name] = getattr(instance, name)
        _call_hook(instance, "setup_method", bound)
        _Fixtures(fixtures, {**values, "function": row}).run(bound)
        _call_hook(instance, "teardown_method", bound)
    assertions.require(before, function)


def _is_fixture(value: "Any") -> bool:
    # A program's object is not asked for an attribute.
    return type(value) is type(run) and hasattr(value, "scope")


class _Fixtures:
    """The values of a test's parameters, by scope."""

    def __init__(self, functions: "dict[str, Any]", values: "dict[str, dict[str, Any]]") -> None:
        self.values = values
        self._functions = functions
        self._generators: list[Any] = []

    def run(self, test: "Any") -> None:
        """Call a test, between its fixtures' setup and teardown."""
        for name, function in self._functions.items():
            if function.is_autouse:
                self._find(name)
        self._call(test)
        for generator in reversed(self._generators):
            next(generator, None)

    def _call(self, function: "Any") -> "Any":
        return function(**{name: self._find(name) for name in _parameters(function)})

    def _find(self, name: str) -> "Any":
        """Return the value of a parameter: of `parametrize`, or of a fixture."""
        if name in self.values["function"]:
            return self.values["function"][name]
        if name not in self._functions:
            raise LookupError(f"the fixture {name!r} is not available in the sandbox")
        function = self._functions[name]
        values = self.values[function.scope]
        if name not in values:
            value = self._call(function)
            if type(value).__name__ == "generator":
                if function.scope == "function":
                    self._generators.append(value)
                value = next(value)
            values[name] = value
        return values[name]


def fixture(
    function: "Any" = None, *, scope: str = "function", autouse: bool = False, **_: object
) -> "Any":
    """Mark a function whose result is passed to tests."""

    def decorate(function: "Any") -> "Any":
        function.scope, function.is_autouse = scope, autouse
        return function

    return decorate(function) if function else decorate


class _Marks:
    """Decorators of tests, of which only `parametrize` matters."""

    def parametrize(self, argnames: "Any", argvalues: "Any", **_: object) -> "Callable[[Any], Any]":
        """Run a test, or those of a class, with each of these values."""
        is_text = isinstance(argnames, str)
        keys = [each.strip() for each in argnames.split(",")] if is_text else argnames
        is_one = is_text and len(keys) == 1
        rows = [[each] if is_one and type(each) is not _Parameters else each for each in argvalues]

        def decorate(function: "Any") -> "Any":
            named = [dict(zip(keys, row, strict=True)) for row in rows]
            function.parameters = [named, *getattr(function, "parameters", [])]
            return function

        return decorate

    def __getattr__(self, name: str) -> "Any":
        return lambda *args, **_: args[0] if args and callable(args[0]) else lambda target: target


mark = _Marks()


class _Parameters(tuple[object, ...]):
    """One row of `parametrize`."""


def param(*values: object, **_: object) -> _Parameters:
    """Return one row of `parametrize`."""
    return _Parameters(values)


class _Raises:
    """The context in which an exception has to be raised."""

    def __init__(self, expected: "Any", match: str) -> None:
        self.expected, self.pattern, self.value = expected, match, None

    def __enter__(self) -> "Any":
        return self

    def __exit__(self, kind: "Any", error: "Any", _: object) -> bool:
        if kind is None:
            raise AssertionError(f"{self.expected} was not raised")
        self.type, self.value = kind, error
        if not issubclass(kind, self.expected):
            return False
        return not self.pattern or self.match(self.pattern)

    def match(self, pattern: str) -> bool:
        """Raise an exception unless the pattern is in the text of the exception that was raised."""
        if not __import__("re").search(pattern, str(self.value)):
            raise AssertionError(f"{str(self.value)!r} does not match {pattern!r}")
        return True


def raises(expected: "Any", *call: "Any", match: str = "", **kwargs: "Any") -> _Raises:
    """Return the context, in which a function is called if there is one."""
    context = _Raises(expected, match)
    if call:
        with context:
            call[0](*call[1:], **kwargs)
    return context


class approx:  # noqa: N801
    """A number, or a list, tuple, dict or array of them, that equals what is nearly the same, as pytest has it."""

    def __init__(
        self, expected: "Any", rel: "Any" = None, abs: "Any" = None, nan_ok: bool = False
    ) -> None:
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, other: object) -> bool:
        return self._is_near(other, self.expected)

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    __hash__ = None  # type: ignore[assignment]

    def _is_near(self, value: "Any", expected: "Any") -> bool:
        value, expected = (
            each.tolist() if type(each).__module__ == "numpy" else each
            for each in (value, expected)
        )
        if isinstance(expected, dict):
            keys = isinstance(value, dict) and value.keys() == expected.keys()
            return keys and all(self._is_near(value[key], expected[key]) for key in expected)
        if isinstance(expected, list | tuple):
            same = isinstance(value, list | tuple) and len(value) == len(expected)
            return same and all(map(self._is_near, value, expected))
        return value == expected or self._is_close(value, expected)

    def _is_close(self, value: "Any", expected: "Any") -> bool:
        from cmath import isinf, isnan
        from numbers import Number

        if not isinstance(value, Number) or not isinstance(expected, Number):
            return False
        kind: Any = complex if complex in (type(value), type(expected)) else float
        value, expected = kind(value), kind(expected)
        if isnan(expected) or isinf(expected):
            return self.nan_ok and isnan(expected) and isnan(value)
        absolute = 1e-12 if self.abs is None else self.abs
        relative = self.rel if self.rel is not None or self.abs is not None else 1e-6
        return abs(value - expected) <= max(absolute, (relative or 0) * abs(expected))


def fail(reason: str = "", **_: object) -> None:
    """Fail the test."""
    raise AssertionError(reason)


def main(*_: object, **__: object) -> int:
    """Do nothing: all tests are run anyway."""
    return 0
