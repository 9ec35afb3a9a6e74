"""Plain data and exceptions on their way between processes, as JSON that keeps Python's types.

Reading trusts nothing: whatever was written, the result is plain data, or what the reader makes of other marks.
"""

import os
import sys
from _json import encode_basestring_ascii, make_encoder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


_SHORT = 1 << 63
"""From here on, integers are written in hexadecimal: Python reads no decimal ones of thousands of digits."""
_KINDS: "dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]]" = {
    "builtins.int": (lambda value: [hex(value)], lambda text: int(text, 16)),
    "builtins.float": (lambda value: [repr(value)], float),
    "builtins.complex": (lambda value: [value.real, value.imag], complex),
    "builtins.bytes": (lambda value: [value.hex()], bytes.fromhex),
    "builtins.bytearray": (lambda value: [value.hex()], bytearray.fromhex),
    "builtins.list": (list, lambda *items: [*items]),
    "builtins.tuple": (list, lambda *items: items),
    "builtins.set": (list, lambda *items: {*items}),
    "builtins.frozenset": (list, lambda *items: frozenset(items)),
    "builtins.dict": (dict.items, lambda *items: dict(items)),
    "builtins.dict_keys": (list, lambda *keys: dict.fromkeys(keys).keys()),
    "builtins.dict_values": (list, lambda *values: dict(enumerate(values)).values()),
    "builtins.dict_items": (list, lambda *items: dict(items).items()),
    **{
        f"builtins.{kind.__name__}": (lambda value: [value.start, value.stop, value.step], kind)
        for kind in (range, slice)
    },
    "collections.deque": (lambda value: [[*value], value.maxlen], None),
    "collections.Counter": (lambda value: [dict(value)], None),
    "collections.OrderedDict": (lambda value: [[*value.items()]], None),
    "collections.defaultdict": (lambda value: [value.default_factory, dict(value)], None),
    **{
        f"datetime.{name}": (lambda value: value.__reduce__()[1], None)
        for name in "date time datetime timedelta timezone".split()
    },
    "decimal.Decimal": (lambda value: [str(value)], None),
    "fractions.Fraction": (lambda value: [value.numerator, value.denominator], None),
    "re.Match": (
        lambda value: [value.re.pattern, value.re.flags, value.string, value.start(), value.endpos],
        lambda pattern, flags, *where: __import__("re").compile(pattern, flags).match(*where),
    ),
    "numpy.ndarray": (
        lambda value: [value.tolist(), value.dtype.str],
        lambda *parts: __import__("numpy").array(*parts),
    ),
}
"""What is sent of values of a class, and what makes them of that; by default, the class does."""
_made: "dict[str, type[BaseException]]" = {}
"""Classes of exceptions that only the other process has."""


def encode(value: "Any", describe: "Callable[[Any], object]") -> object:
    """Return a value as JSON can hold it; `describe` encodes what is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if (kind is int and -_SHORT < value < _SHORT) or (kind is float and value - value == 0):
        return value
    mark = f"{kind.__module__}.{kind.__name__}"
    if mark not in _KINDS:
        return describe(value)
    return [mark, *[encode(part, describe) for part in _KINDS[mark][0](value)]]


def decode(written: "Any", resolve: "Callable[..., object]") -> object:
    """Return the value that `encode` wrote; `resolve` decodes what `describe` wrote."""
    if type(written) is not list:
        return written
    mark, *parts = written
    if mark not in _KINDS:
        return resolve(mark, *parts)
    make = _KINDS[mark][1]
    if make is None:
        module, _, name = mark.rpartition(".")
        make = getattr(__import__(module), name)
    return make(*[decode(part, resolve) for part in parts])


def text_of(error: BaseException) -> str:
    """Return an exception's text; empty if it has none, or its class fails to write it."""
    try:
        return str(error.code if isinstance(error, SystemExit) else error)
    except BaseException:
        return ""


def send(descriptor: int, value: object) -> None:
    """Write a value as a line of JSON; `json` takes longer to import."""
    write = make_encoder(None, None, encode_basestring_ascii, None, ":", ",", False, False, False)  # type: ignore[arg-type]
    rest = "".join(write(value, 0)).encode() + b"\n"
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def describe_error(error: BaseException) -> "list[object]":
    """Return an exception's classes, text, cause, and what is plain of its arguments and attributes."""
    plain = {}
    for name, value in {"args": error.args, **getattr(error, "__dict__", {})}.items():
        try:
            plain[name] = encode(value, _reject)
        except (TypeError, RecursionError):
            continue
    cause = error.__cause__ and describe_error(error.__cause__)
    return [name_classes(type(error)), text_of(error), plain, cause]


def make_error(
    names: "list[list[str]]", text: str, plain: "dict[str, Any]", cause: "list[Any] | None"
) -> BaseException:
    """Return the exception that was described."""
    values = {name: decode(value, _reject) for name, value in plain.items()}
    try:
        arguments: Any = values.pop("args", (text,))
        error = find_class(names)(*arguments)
    except Exception:
        error = Exception(text)
    vars(error).update(values, _text=text)
    error.__cause__ = make_error(*cause) if cause else None
    return error


def name_classes(kind: "type[BaseException]") -> "list[list[str]]":
    """Return the modules and names of an exception's class and its bases."""
    return [[str(each.__module__), each.__name__] for each in kind.__mro__[:-1]]


def find_class(names: "list[list[str]]") -> "type[BaseException]":
    """Return the exception that both processes have, or make one that is derived from such."""
    made: list[Any] = []
    for module, name in reversed(names):
        known = None
        if module in ("test", "program") or module in sys.stdlib_module_names:
            known = getattr(sys.modules.get(module), name, None)
        if not isinstance(known, type) or not issubclass(known, BaseException):
            content = {"__str__": _read_text, "__module__": module}
            bases = only_direct(made) or (Exception,)
            known = _made.setdefault(name, type(name, bases, content))
        # A program may not skip a test.
        made.insert(0, Exception if known.__module__.startswith("unittest") else known)
    return made[0]


def only_direct(bases: "list[Any]") -> "tuple[Any, ...]":
    """Return the classes that no other of these is derived from."""
    return tuple(
        base
        for index, base in enumerate(bases)
        if not any(issubclass(each, base) for each in bases[:index])
    )


def _read_text(error: BaseException) -> str:
    return str(vars(error).get("_text", BaseException.__str__(error)))


def _reject(*value: object) -> "Any":
    raise TypeError(value)
