"""Runs test functions and classes, which import this module as `pytest`: it has what they use of that."""

from itertools import product

from grpo_cli.rewards.sandbox.peer import Remote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


COUNTER = "__assertions__"
"""The name by which a test counts its assertions."""


class Assertions:
    """Counts the assertions of a test as they run."""

    def __init__(self) -> None:
        self.count = 0

    def checked(self, value: "Any") -> "Any":
        """Count a condition."""
        self.count += 1
        return value

    def asserting(self, function: "Any") -> "Any":
        """Return a function with its calls counted; one of the test's has assertions of its own."""
        if not callable(function) or isinstance(function, type | Remote):
            return function
        if getattr(function, "__module__", None) == "test":
            return function
        return lambda *args, **kwargs: self.checked(function(*args, **kwargs))

    def require(self, before: int, function: "Any" = None) -> None:
        """Raise an exception if none ran since `count` was that; a function may be one without assertions."""
        code = getattr(function, "__code__", None)
        if self.count == before and (function is None or (code and _has_assertions(code))):
            raise AssertionError("none of the test's assertions ran")


def _has_assertions(code: "Any") -> bool:
    inner = [each for each in code.co_consts if hasattr(each, "co_names")]
    return COUNTER in code.co_names or any(map(_has_assertions, inner))


def run(names: "dict[str, Any]", collected: "list[str]") -> None:
    """Run functions and classes of tests; raises what the first that fails raises."""
    for name in collected:
        target = names[name]
        if not isinstance(target, type):
            _run_function(target, names)
        elif hasattr(target, "assertEqual"):
            _run_case(target, names[COUNTER])
        else:
            for method in [each for each in dir(target) if each.startswith("test")]:
                instance = target()
                if setup := getattr(instance, "setup_method", None):
                    setup(*[method] * len(_parameters(setup)))
                _run_function(getattr(instance, method), names)


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
            self.before = assertions.count

        def addSuccess(self, test: "Any") -> None:  # noqa: N802
            assertions.require(self.before, getattr(test, test.id().rpartition(".")[2]))

    result = Result()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    if failures := [*result.failures, *result.errors]:
        raise AssertionError(failures[0][1].strip().rpartition("\n")[2])
    if result.unexpectedSuccesses or result.testsRun == len(result.skipped):
        raise AssertionError(f"no test of {case.__name__} passed")


def _run_function(function: "Any", names: "dict[str, Any]") -> None:
    assertions = names[COUNTER]
    before = assertions.count
    rows = list(product(*getattr(function, "parameters", [])))
    if not rows:
        raise AssertionError("a test without parameters was not run")
    for parts in rows:
        _call(function, names, {name: value for part in parts for name, value in part.items()})
    assertions.require(before, function)


def _call(function: "Any", names: "dict[str, Any]", arguments: "dict[str, Any]") -> "Any":
    """Call a test or a fixture, with the fixtures that its parameters name."""
    for name in _parameters(function):
        if name not in arguments:
            if not hasattr(names.get(name), "is_fixture"):
                raise LookupError(f"the fixture {name!r} is not available in the sandbox")
            value = _call(names[name], names, {})
            arguments[name] = next(value) if type(value).__name__ == "generator" else value
    return function(**arguments)


def fixture(function: "Any" = None, **_: object) -> "Any":
    """Mark a function whose result is passed to tests."""
    if function is None:
        return fixture
    function.is_fixture = True
    return function


class _Marks:
    """Decorators of tests, of which only `parametrize` matters."""

    def parametrize(self, names: "Any", values: "Any", **_: object) -> "Callable[[Any], Any]":
        """Run a test with each of these values."""
        keys = [each.strip() for each in names.split(",")] if isinstance(names, str) else names
        is_one = isinstance(names, str) and len(keys) == 1
        rows = [[each] if is_one and type(each) is not _Parameters else each for each in values]

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
        self.expected, self.match, self.value = expected, match, None

    def __enter__(self) -> "Any":
        return self

    def __exit__(self, kind: "Any", error: "Any", _: object) -> bool:
        if kind is None:
            raise AssertionError(f"{self.expected} was not raised")
        self.type, self.value = kind, error
        if not issubclass(kind, self.expected):
            return False
        if self.match and not __import__("re").search(self.match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {self.match!r}")
        return True


def raises(expected: "Any", *call: "Any", match: str = "", **kwargs: "Any") -> _Raises:
    """Return the context, in which a function is called if there is one."""
    context = _Raises(expected, match)
    if call:
        with context:
            call[0](*call[1:], **kwargs)
    return context


class approx:  # noqa: N801
    """A number, or a list, tuple or dict of numbers, that equals what is nearly the same."""

    def __init__(self, expected: "Any", rel: float = 1e-6, abs: float = 1e-12) -> None:
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, other: object) -> bool:
        return self._is_near(other, self.expected)

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    __hash__ = None  # type: ignore[assignment]

    def _is_near(self, value: "Any", expected: "Any") -> bool:
        if isinstance(expected, dict):
            keys = isinstance(value, dict) and value.keys() == expected.keys()
            return keys and all(self._is_near(value[key], expected[key]) for key in expected)
        if isinstance(expected, list | tuple):
            same = isinstance(value, type(expected)) and len(value) == len(expected)
            return same and all(map(self._is_near, value, expected))
        if value == expected:
            return True
        if not isinstance(value, int | float | complex) or isinstance(expected, str | bytes | None):
            return False
        return bool(abs(value - expected) <= max(self.rel * abs(expected), self.abs))


def fail(reason: str = "", **_: object) -> None:
    """Fail the test."""
    raise AssertionError(reason)


def main(*_: object, **__: object) -> int:
    """Do nothing: all tests are run anyway."""
    return 0
