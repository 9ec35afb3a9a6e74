"""Plain data on its way from a program to the trainer, as JSON that keeps Python's types.

Owns both directions. Reading trusts nothing: whatever was written, the result is plain data, in
which objects of a program's own classes are `Opaque` and equal to nothing.
"""

from _json import encode_basestring_ascii as _quote

_SEQUENCES = (("l", list), ("t", tuple))


TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Opaque:
    """An object that is no plain data."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"an object of class {self._name}"


def encode(value: object) -> object:
    """A value as JSON can hold it; subclasses count as what they are derived from."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["i", hex(int.__index__(value))]
    if isinstance(value, float):
        return ["f", float.__repr__(value)]
    if isinstance(value, complex):
        return ["c", repr(value.real), repr(value.imag)]
    if isinstance(value, bytes | bytearray):
        return ["b", value.hex()]
    return _encode_many(value)


def _encode_many(value: object) -> object:
    for mark, kind in _SEQUENCES:
        if isinstance(value, kind):
            return [mark, [encode(item) for item in value]]
    if isinstance(value, set | frozenset | type({}.keys())):
        return ["s", [encode(item) for item in value]]
    if isinstance(value, dict):
        return ["d", [[encode(key), encode(item)] for key, item in value.items()]]
    if hasattr(value, "as_integer_ratio"):
        numerator, denominator = value.as_integer_ratio()
        return ["q", hex(int(numerator)), hex(int(denominator))]
    return ["o", type(value).__name__[:80]]


def write_json(value: object) -> str:
    """Texts, true, false, null, and lists and mappings of them; `json` takes longer to import."""
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, dict):
        return f"{{{','.join(f'{_quote(key)}:{write_json(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(write_json, value))}]"
    return {None: "null", True: "true", False: "false"}[value]  # type: ignore[index]


def decode(written: object) -> object:
    """What `encode` made of a value; `Opaque` for all it would not have written."""
    if written is None or isinstance(written, bool | str):
        return written
    try:
        return _decode_marked(*written)  # type: ignore[misc]
    except (TypeError, ValueError, LookupError, ArithmeticError):
        return Opaque("unknown")


def _decode_marked(mark: str, *parts: "Any") -> object:
    if mark in "ltsd":
        return _decode_many(mark, parts[0])
    if mark == "i":
        return int(parts[0], 16)
    if mark == "f":
        return float(parts[0])
    if mark == "c":
        return complex(float(parts[0]), float(parts[1]))
    if mark == "b":
        return bytes.fromhex(parts[0])
    if mark == "q":
        # Here, as programs start without it.
        from fractions import Fraction

        return Fraction(int(parts[0], 16), int(parts[1], 16))
    return Opaque(str(parts[0])[:80] if mark == "o" and parts else "unknown")


def _decode_many(mark: str, items: "list[Any]") -> object:
    if mark == "d":
        return {decode(key): decode(item) for key, item in items}
    found = [decode(item) for item in items]
    return {"l": list, "t": tuple, "s": frozenset}[mark](found)
