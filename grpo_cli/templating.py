"""The sandbox in which Jinja runs: templates of prompts, conditions of rewards, and chat templates of models."""

import re
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial, update_wrapper
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_SIZE = 10_000_000
"""Characters and entries of one value, and of all that a template prints."""
_MOST_CPU_S = 2.0
_MULTIPLYING = frozenset(
    "center ljust rjust zfill expandtabs format indent join replace round".split()
)
"""Methods and filters whose result may be longer than what they get."""
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\*|\d{8})|\{[^{}]*([:<>^.]\d{8}|\{)")


class TemplateLimitError(ValueError):
    """A template makes more than any prompt needs."""


def _check_size(size: int) -> None:
    if size > MOST_SIZE:
        message = f"the template makes a value of more than {MOST_SIZE:,} characters or entries"
        raise TemplateLimitError(message)


def _check_time(context: Any) -> None:
    now = time.thread_time()
    if now > vars(context).setdefault("ends_at_s", now + _MOST_CPU_S):
        raise TemplateLimitError(f"the template takes more than {_MOST_CPU_S:g} s")


def _size(value: Any) -> int:
    """Return the characters and entries of a value and its parts; raises if a list has too many."""
    if not isinstance(value, list | tuple):
        return len(value) if isinstance(value, str) else 1
    size = 1
    for part in value:
        size += _size(part)
        _check_size(size)
    return size


def _check_call(name: str, value: Any, args: Iterable[Any]) -> None:
    """Refuse a call of a filter or method that could make 100 times as much as one value may hold."""
    width = _WIDTH.search(value) if name == "format" else None
    _check_size(MOST_SIZE + 1 if width and width[0][-1].isdigit() else 0)
    for each in args:
        if not isinstance(each, int):
            _check_size(_size(value) * _size(each) // 100)
        elif name != "format" or width:
            _check_size(max(each, _size(value) * each // 100))


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        _check_size({"*": bits + right.bit_length(), "**": bits * right}.get(operator, 0))
    elif operator == "%" and isinstance(left, str):
        _check_call("format", left, right if isinstance(right, tuple) else (right,))
    elif operator == "+" and isinstance(left, str | list | tuple):
        _check_size(len(left) + len(right))
    elif operator == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
        _check_size(_size(left) * right)
    elif operator == "*" and isinstance(left, int) and isinstance(right, str | list | tuple):
        _check_size(_size(right) * left)


def _make_generator() -> Any:
    """Return the compiler whose loops have a limit of time, and joined texts one of size."""
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator

    class Generator(CodeGenerator):
        def visit_For(self, node: nodes.For, frame: Any) -> None:  # noqa: N802
            timed: Any = nodes.EnvironmentAttribute("timed")
            node.iter = nodes.Call(timed, [nodes.ContextReference(), node.iter], [], None, None)
            super().visit_For(node, frame)

        def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
            self.write("environment.concat((")
            super().visit_Concat(node, frame)
            self.write(",))")

    return Generator


@lru_cache(maxsize=1)
def bounded_environment() -> "type[ImmutableSandboxedEnvironment]":
    """Return the class of Jinja's sandbox in which no template makes more than a prompt may need."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def call_filter(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        # Those that get the context or the environment have it before the value.
        value, *rest = args[1:] if hasattr(function, "jinja_pass_arg") else args
        _check_call(name, value, (*rest, *kwargs.values()))
        return function(*args, **kwargs)

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        code_generator_class = _make_generator()
        intercepted_binops = frozenset({"+", "*", "%", "**"})

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            del self.globals["lipsum"]
            for name in _MULTIPLYING & self.filters.keys():
                function = self.filters[name]
                self.filters[name] = update_wrapper(partial(call_filter, name, function), function)

        @staticmethod
        def timed(context: Any, values: Iterable[Any]) -> Iterator[Any]:
            for value in values:
                _check_time(context)
                yield value

        @staticmethod
        def concat(parts: Iterable[str]) -> str:
            size, texts = 0, []
            for part in parts:
                size += len(part)
                _check_size(size)
                texts.append(part)
            return "".join(texts)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            _check_time(context)
            # Jinja wraps `format`.
            method = getattr(function, "__wrapped__", function)
            text = getattr(method, "__self__", None)
            if isinstance(text, str) and method.__name__ in _MULTIPLYING:
                _check_call(method.__name__, text, (*args, *kwargs.values()))
            return super().call(context, function, *args, **kwargs)

    return BoundedEnvironment


@lru_cache(maxsize=1)
def environment() -> "ImmutableSandboxedEnvironment":
    """Return the sandbox: no files, no randomness, no undefined names, and no None printed as text."""
    from jinja2 import StrictUndefined

    sandbox = bounded_environment()(undefined=StrictUndefined, finalize=_refuse_unreadable)
    del sandbox.filters["random"]
    return sandbox


def is_unreadable(value: object) -> bool:
    """Return whether a value, printed as it is, would show a model Python's way of writing it."""
    messages = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    return value is None or messages or isinstance(value, dict)


def _refuse_unreadable(value: Any) -> Any:
    if not is_unreadable(value):
        # A list may hold itself many times over, which shows only when it is printed.
        _size(value)
        return value
    if value is None:
        raise ValueError("a value is empty (None) and would be printed as the word None")
    if isinstance(value, list):
        raise ValueError("a list of objects would be printed as Python's list")
    keys = ", ".join(map(str, value))
    raise ValueError(f"an object with the keys {keys} would be printed as Python's dict")
