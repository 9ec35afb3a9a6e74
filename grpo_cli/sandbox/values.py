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
_SEQUENCES: "dict[str, Callable[..., Any]]" = {"l": list, "t": tuple, "s": set, "z": frozenset}
_MARKS: "dict[Any, str]" = {kind: mark for mark, kind in _SEQUENCES.items()}
_READERS: "dict[str, Callable[..., Any]]" = {
    "i": lambda text: int(text, 16),
    "f": float,
    "c": lambda real, imaginary: complex(float(real), float(imaginary)),
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
}


_made: "dict[str, type[BaseException]]" = {}
"""Classes of exceptions that only the other process has."""


def encode(value: "Any", describe: "Callable[[Any], object]") -> object:
    """Return a value as JSON can hold it; `describe` encodes what is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_SHORT < value < _SHORT else ["i", hex(value)]
    if kind is float:
        return value if value - value == 0 else ["f", repr(value)]
    if kind is complex:
        return ["c", repr(value.real), repr(value.imag)]
    if kind is bytes or kind is bytearray:
        return ["b" if kind is bytes else "a", value.hex()]
    if kind in _MARKS:
        return [_MARKS[kind], [encode(item, describe) for item in value]]
    if kind is dict:
        items = value.items()
        return ["d", [[encode(key, describe), encode(item, describe)] for key, item in items]]
    return describe(value)


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


def decode(written: object, resolve: "Callable[..., object]") -> object:
    """Return the value that `encode` wrote; `resolve` decodes other marks, and "other" for what cannot be read."""
    if written is None or isinstance(written, bool | str | int | float):
        return written
    try:
        return _decode_marked(resolve, *written)  # type: ignore[misc]
    except (TypeError, ValueError, LookupError, ArithmeticError):
        return resolve("other", -1, "unknown")


def _decode_marked(resolve: "Callable[..., object]", mark: str, *parts: "Any") -> object:
    if mark in _SEQUENCES:
        return _SEQUENCES[mark](decode(item, resolve) for item in parts[0])
    if mark == "d":
        return {decode(key, resolve): decode(item, resolve) for key, item in parts[0]}
    return _READERS[mark](*parts) if mark in _READERS else resolve(mark, *parts)


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
    return [[str(each.__module__), each.__name__] for each in kind.__mro__]


def find_class(names: "list[list[str]]") -> "type[BaseException]":
    """Return the exception that both processes have, or make one that is derived from such."""
    (module, name), *bases = names
    if module in ("test", "program") or module in sys.stdlib_module_names:
        known = getattr(sys.modules.get(module), name, None)
        if isinstance(known, type) and issubclass(known, BaseException):
            # A program may not skip a test.
            return known if not known.__module__.startswith("unittest") else Exception
    if name not in _made:
        parents = [find_class(bases[index:]) for index in range(len(bases) - 1)]
        content = {"__str__": _read_text, "__module__": module}
        _made[name] = type(name, only_direct(parents) or (Exception,), content)
    return _made[name]


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
