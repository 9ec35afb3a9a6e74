"""The sandbox in which a recipe's Jinja runs: the templates of prompts, the conditions of rewards.

What may be called there, and how much a template may make, is decided here; chat templates of models have the same
limits. What is written in it, and what its failures are called, is for the rooms that use it.
"""

import re
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_SIZE = 10_000_000
"""Characters and entries of one value, and of all that a template prints."""
_MOST_WORK = 100_000_000
"""Characters and entries that the operations of a template make together."""
_STEP_WORK = 400
"""Of a step of a loop: 250,000 of them are allowed."""
_CALL_WORK = 5 * _STEP_WORK
"""Of a call of a macro, a filter or a method."""
_MOST_CPU_S = 2.0
_CLOCK_STEPS = 16
"""Between two looks at the clock."""
_MOST_BITS = 1_000_000
_MOST_DIGITS = 1000
"""Decimals that `round` computes with."""
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")


class TemplateLimitError(ValueError):
    """A template makes more than any prompt needs."""


class _Work(threading.local):
    """What the template that is being rendered on this thread has made so far."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Count from nothing."""
        self.made = self.printed = self.count = 0
        self.ends_at_s = time.thread_time() + _MOST_CPU_S
        # With the values, so that no id is used again.
        self.sizes: dict[int, tuple[Any, int]] = {}

    def add(self, amount: int) -> None:
        """Count what is about to be made, or was made."""
        _check_size(amount)
        self.made += amount
        if self.made > _MOST_WORK:
            raise TemplateLimitError("the template loops too often, or makes too much text")
        self.count += 1
        if self.count % _CLOCK_STEPS == 0 and time.thread_time() > self.ends_at_s:
            raise TemplateLimitError(f"the template takes more than {_MOST_CPU_S:g} s")

    def print(self, value: Any) -> None:
        """Count what is printed."""
        self.printed += self.measure(value)
        _check_size(self.printed)

    def measure(self, value: Any, *, is_part: bool = True) -> int:
        """Return the characters and entries of a value, with those of its parts each time they occur in it."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, list | tuple | set | frozenset | Mapping):
            if (known := self.sizes.get(id(value))) is not None:
                return known[1]
            parts = [*value, *value.values()] if isinstance(value, Mapping) else value
            size = 1
            for part in parts:
                size += max(self.measure(part), 1)
                _check_size(size)
            self.sizes[id(value)] = value, size
            return size
        if isinstance(value, int | float | None):
            return value.bit_length() // 3 if isinstance(value, int) else 1
        from jinja2.utils import Namespace

        if is_part and isinstance(value, Namespace):
            raise TemplateLimitError("a namespace is used as a value; name one of its attributes")
        return 1


_work = _Work()


def _check_size(size: int) -> None:
    if size > MOST_SIZE:
        raise TemplateLimitError(
            f"the template makes a value of {size:,} characters or entries; {MOST_SIZE:,} are allowed"
        )


# --- how large a result is before it is made ---------------------------------------------------


def _width(text: Any, width: Any = 0, *rest: Any, **more: Any) -> int:
    return int(more.get("width", width))


def _replaced(text: Any, old: Any, new: Any, *rest: Any, **more: Any) -> int:
    if isinstance(text, bytes):
        return len(text) + text.count(old) * len(new)
    return len(str(text)) + str(text).count(str(old)) * len(str(new))


def _joined(separator: Any, parts: Any) -> int:
    return sum(_work.measure(part) + len(separator) for part in parts)


def _formatted(text: Any, *values: Any, **named: Any) -> int:
    """Of `%`: the widths that are written, or given as values."""
    values = values[0] if len(values) == 1 and isinstance(values[0], tuple) else values
    numbers = [each for each in values if isinstance(each, int)]
    widths = [width for match in _CONVERSION.findall(str(text)) for width in match if width]
    return sum(max(numbers, default=0) if width == "*" else int(width) for width in widths) + sum(
        map(_work.measure, (*values, *named.values()))
    )


def _formatted_in_braces(text: str, *values: Any, **named: Any) -> int:
    """Of `str.format`."""
    size, numbers = 0, [each for each in (*values, *named.values()) if isinstance(each, int)]
    for _, field, spec, _ in string.Formatter().parse(text):
        size += sum(map(int, re.findall(r"\d+", spec or "")))
        size += max(numbers, default=0) if "{" in (spec or "") else 0
        size += max(map(_work.measure, (*values, *named.values())), default=0) if field else 0
    return size


def _indented(text: Any, width: Any = 4, *rest: Any, **more: Any) -> int:
    width = more.get("width", width)
    return (str(text).count("\n") + 1) * (len(width) if isinstance(width, str) else int(width))


def _wrapped(text: Any, *rest: Any, **more: Any) -> int:
    return len(str(text)) * max(
        len(each) for each in ("\n", *rest, *more.values()) if _is_text(each)
    )


def _as_json(value: Any, *rest: Any, **more: Any) -> int:
    options = [each for each in (*rest, *more.values()) if each is not None]
    most = max(
        (each if isinstance(each, int) else _work.measure(each) for each in options), default=0
    )
    return max(_work.measure(value), 1) * (most + 1)


def _grouped(parts: Any, *rest: Any, **more: Any) -> int:
    return len(parts) * sum(map(_work.measure, (*rest, *more.values())))


def _rounded(value: Any, precision: Any = 0, *rest: Any, **more: Any) -> int:
    return MOST_SIZE + 1 if abs(int(more.get("precision", precision))) > _MOST_DIGITS else 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    "expandtabs": lambda text, size=8, **more: len(text) * int(more.get("tabsize", size)),
    "replace": _replaced,
    "join": _joined,
    "format": _formatted_in_braces,
    "format_map": lambda text, values: _formatted_in_braces(text, **values),
}
"""Methods of texts whose result may be larger than what they get."""
_FILTERS: dict[str, Callable[..., int]] = {
    "center": _width,
    "indent": _indented,
    "format": _formatted,
    "replace": _replaced,
    "wordwrap": _wrapped,
    "tojson": _as_json,
    "groupby": _grouped,
    "round": _rounded,
    "batch": _width,
    "slice": _width,
    "join": lambda parts, d="", *rest, **more: _joined(str(more.get("d", d)), parts),
}
_REFUSED = frozenset({"translate", "maketrans", "to_bytes"})


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too large."""
    if operator == "%" and _is_text(left):
        _check_size(_formatted(left, *(right if isinstance(right, tuple) else (right,))))
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
                _check_size(_work.measure(sequence) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * right}
        if bits.get(operator, 0) > _MOST_BITS:
            raise TemplateLimitError(f"the template computes a number of {bits[operator]:,} bits")


class _Filters(dict[str, Callable[..., Any]]):
    """Jinja's filters, each of which counts what it makes."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _count(function, _FILTERS.get(name)))


def _count(function: Callable[..., Any], estimate: Callable[..., int] | None) -> Callable[..., Any]:
    # Those that get the context or the environment have it before the value.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _work.add(_CALL_WORK)
        # An iterator can be looked at once only.
        args = *args[:first], *(list(a) if isinstance(a, Iterator) else a for a in args[first:])
        if estimate is not None:
            _check_size(estimate(*args[first:], **kwargs))
        result = function(*args, **kwargs)
        _work.add(_work.measure(result))
        return result

    return counted


def _make_parts() -> tuple[Any, Any]:
    """Return the compiler and the class of templates that count."""
    from jinja2 import Template
    from jinja2.compiler import CodeGenerator
    from jinja2.nodes import Call, Const, EnvironmentAttribute, TemplateData

    class Generator(CodeGenerator):
        def visit_For(self, node: Any, frame: Any) -> None:  # noqa: N802
            text = sum(len(each.data) for each in node.find_all(TemplateData))
            steps = EnvironmentAttribute("count_steps")
            work = Const(_STEP_WORK + text)
            node.iter = Call(steps, [node.iter, work], [], None, None, lineno=node.lineno)
            super().visit_For(node, frame)

        def visit_Concat(self, node: Any, frame: Any) -> None:  # noqa: N802
            self.write("environment.measured(")
            super().visit_Concat(node, frame)
            self.write(")")

        def visit_List(self, node: Any, frame: Any) -> None:  # noqa: N802
            self.write("environment.measured(")
            super().visit_List(node, frame)
            self.write(")")

        def visit_Dict(self, node: Any, frame: Any) -> None:  # noqa: N802
            self.write("environment.measured(")
            super().visit_Dict(node, frame)
            self.write(")")

        def visit_Tuple(self, node: Any, frame: Any) -> None:  # noqa: N802
            self.write("environment.measured(" if node.ctx == "load" else "")
            super().visit_Tuple(node, frame)
            self.write(")" if node.ctx == "load" else "")

    class CountingTemplate(Template):
        def new_context(self, *args: Any, **kwargs: Any) -> Any:
            _work.start()
            return super().new_context(*args, **kwargs)

    return Generator, CountingTemplate


@lru_cache(maxsize=1)
def bounded_environment() -> "type[ImmutableSandboxedEnvironment]":
    """Return the class of Jinja's sandbox in which no template makes more than a prompt may need.

    Loops, calls, filters and operators count what they make; what would multiply a value is measured first.
    """
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        code_generator_class, template_class = _make_parts()
        intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

        def __init__(self, *args: Any, finalize: Any = None, **kwargs: Any) -> None:
            # Constants are computed while rendering, where they are counted.
            super().__init__(
                *args, **{**kwargs, "optimized": False, "finalize": _count_output(finalize)}
            )
            del self.globals["lipsum"]
            filters = _Filters()
            for name, function in self.filters.items():
                filters[name] = function
            self.filters = filters

        def parse(self, *args: Any, **kwargs: Any) -> Any:
            with _explaining_depth():
                return super().parse(*args, **kwargs)

        def compile(self, *args: Any, **kwargs: Any) -> Any:
            with _explaining_depth():
                return super().compile(*args, **kwargs)

        def count_steps(self, iterable: Iterable[Any], work: int) -> Iterator[Any]:
            return _count_steps(iter(iterable), work)

        def measured(self, value: Any) -> Any:
            _work.add(_work.measure(value))
            return value

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operation(operator, left, right)
            return self.measured(super().call_binop(context, operator, left, right))

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            return attr not in _REFUSED and super().is_safe_attribute(obj, attr, value)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            _work.add(_CALL_WORK)
            if isinstance(function, LoopContext):
                args = (self.count_steps(args[0], _STEP_WORK), *args[1:])
            else:
                args = _check_call(function, args, kwargs)
            result = super().call(context, function, *args, **kwargs)
            _work.add(_work.measure(result, is_part=False))
            return result

    return BoundedEnvironment


@contextmanager
def _explaining_depth() -> Iterator[None]:
    from jinja2 import TemplateSyntaxError

    try:
        yield
    except (RecursionError, SyntaxError):
        raise TemplateSyntaxError("it is nested too deeply", 1) from None


def _count_output(finalize: Callable[[Any], Any] | None) -> Callable[..., Any]:
    from jinja2 import pass_context

    @pass_context
    def count(context: Any, value: Any) -> Any:
        value = value if finalize is None else finalize(value)
        _work.print(value)
        return value

    return count


def _count_steps(values: Iterator[Any], work: int) -> Iterator[Any]:
    for value in values:
        _work.add(work)
        yield value


def _check_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Refuse a call of a text's method whose result would be too large; return the arguments to call it with."""
    # Jinja wraps `format`.
    method = getattr(function, "__wrapped__", function)
    owner = getattr(method, "__self__", None)
    args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
    if isinstance(owner, str | bytes) and method.__name__ in _METHODS:
        _check_size(_METHODS[method.__name__](owner, *args, **kwargs))
    elif isinstance(function, type):
        # A namespace, whose parts are printed with it.
        _work.measure([*args, *kwargs.values()])
    return args


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
    if value is None:
        raise ValueError("a value is empty (None) and would be printed as the word None")
    if isinstance(value, list) and is_unreadable(value):
        raise ValueError("a list of objects would be printed as Python's list")
    if is_unreadable(value):
        raise ValueError(
            f"an object with the keys {', '.join(map(str, value))} would be printed as Python's dict"
        )
    return value
