"""Plain data and exceptions on their way between processes, as JSON that keeps Python's types.

Reading trusts nothing: whatever was written, the result is plain data, or what the reader makes of other marks.
Lists and the like that crossed are kept equal in both processes, as one object is in Python.
"""

import os
import sys
from _json import encode_basestring_ascii, make_encoder
from operator import is_

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


COPY = "copy"
"""The mark of what can be changed."""
_UNUSED = -1
"""The number of a copy that nobody uses, which tells the count of references of such."""
_SHORT = 1 << 63
"""From here on, integers are written in hexadecimal: Python reads no decimal ones of thousands of digits."""
_KINDS: "dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]]" = {
    "builtins.int": (lambda value: [hex(value)], lambda text: int(text, 16)),
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
    "collections.deque": (lambda value: [(*value,), value.maxlen], None),
    "collections.Counter": (dict.items, lambda *items: _find("collections.Counter")(dict(items))),
    "collections.OrderedDict": (lambda value: [(*value.items(),)], None),
    "collections.defaultdict": (
        lambda value: [value.default_factory, (*value.items(),)],
        None,
    ),
    "dataclasses.Field": (
        lambda value: [value.name, value.init],
        lambda name, init: _find("dataclasses.make_dataclass")(
            "_", [(name, object, _find("dataclasses.field")(init=init))]
        ).__dataclass_fields__[name],
    ),
    **{
        f"datetime.{name}": (lambda value: value.__reduce__()[1], None)
        for name in "date time datetime timedelta timezone".split()
    },
    "decimal.Decimal": (lambda value: [str(value)], None),
    "fractions.Fraction": (lambda value: [value.numerator, value.denominator], None),
    "re.Pattern": (
        lambda value: [value.pattern, value.flags],
        lambda *parts: __import__("re").compile(*parts),
    ),
    "uuid.UUID": (lambda value: [str(value)], None),
    **{
        f"{module}.PosixPath": (
            lambda value: [str(value)],
            lambda text: _find("pathlib.Path")(text),
        )
        for module in ("pathlib", "pathlib._local")
    },
    "re.Match": (
        lambda value: [value.re.pattern, value.re.flags, value.string, value.start(), value.endpos],
        lambda pattern, flags, *where: __import__("re").compile(pattern, flags).match(*where),
    ),
    **{
        f"{module}.Series": (
            lambda value: [value.tolist(), value.index.tolist(), str(value.dtype), value.name],
            lambda values, index, dtype, name: _find("pandas.Series")(values, index, dtype, name),
        )
        for module in ("pandas", "pandas.core.series")
    },
    **{
        f"{module}.DataFrame": (
            lambda value: [
                [*value.columns],
                value.index.tolist(),
                *(part for _, part in value.items()),
            ],
            lambda columns, index, *parts: (
                _find("pandas.concat")(parts, axis=1).set_axis(columns, axis=1)
                if parts
                else _find("pandas.DataFrame")(index=index)
            ),
        )
        for module in ("pandas", "pandas.core.frame")
    },
    "numpy.ndarray": (
        lambda value: [value.tolist(), value.dtype.str],
        lambda *parts: __import__("numpy").array(*parts),
    ),
}
"""What is sent of values of a class, and what makes them of that; by default, the class does."""
_made: "dict[str, type[BaseException]]" = {}
"""Classes of exceptions that only the other process has."""


def encode(
    value: "Any",
    describe: "Callable[[Any], object]",
    refer: "Callable[[Any], int] | None" = None,
    is_content: bool = False,
) -> object:
    """Return a value as JSON can hold it; `describe` encodes what is not plain data.

    With `refer`, what can be changed (lists, dicts and the like) is only named by its number, unless `is_content`.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if (kind is int and -_SHORT < value < _SHORT) or (kind is float and value - value == 0):
        return value
    mark = f"{kind.__module__}.{kind.__name__}"
    if mark not in _KINDS:
        return describe(value)
    if refer and not is_content and hasattr(kind, "clear"):
        return [COPY, refer(value)]
    return [mark, *[encode(part, describe, refer) for part in _KINDS[mark][0](value)]]


def decode(written: "Any", resolve: "Callable[..., object]") -> object:
    """Return the value that `encode` wrote; `resolve` decodes what `describe` wrote."""
    if type(written) is not list:
        return written
    mark, *parts = written
    if mark not in _KINDS:
        return resolve(mark, *parts)
    return (_KINDS[mark][1] or _find(mark))(*[decode(part, resolve) for part in parts])


def _find(name: str) -> "Any":
    module, _, name = name.rpartition(".")
    return getattr(__import__(module), name)


class Copies:
    """Lists and the like that crossed: what changes in one process is sent with its next message."""

    def __init__(self, first: int, describe: "Any", resolve: "Any") -> None:
        self._next, self._describe, self._resolve = first, describe, resolve
        self._numbers: dict[int, int] = {}
        self._entries: dict[int, tuple[Any, list[Any], object]] = {_UNUSED: ([], [], None)}
        """The copy here, its items, and as what it was last written, by number."""
        self._unsent: dict[int, object] = {}

    def __getitem__(self, number: int) -> object:
        return self._entries[number][0]

    def pack(self, value: object) -> object:
        """Return a value as JSON can hold it."""
        return encode(value, self._describe, self._refer)

    def _refer(self, value: "Any") -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = self._next
            self._next += 2
        if number not in self._unsent:
            self._entries[number] = value, [], None
            self._unsent[number] = None
            try:
                written = encode(value, self._describe, self._refer, is_content=True)
            except BaseException:
                self._forget(number)
                raise
            finally:
                # What it contains comes first.
                del self._unsent[number]
            self._unsent[number] = written
            self._entries[number] = value, _list_items(value), written
        elif self._unsent[number] is None:
            raise RecursionError("it contains itself")
        return number

    def _forget(self, number: int) -> None:
        del self._numbers[id(self._entries.pop(number)[0])]

    def take_changes(self) -> "list[list[object]]":
        """Return what changed here since the last message, and forget in both what nobody else uses here."""
        unused, forgotten = 0, []
        for number, (value, items, _) in [*self._entries.items()]:
            uses, now = sys.getrefcount(value), _list_items(value)
            if len(now) != len(items) or not all(map(is_, now, items)):
                self._refer(value)
            if number == _UNUSED:
                unused = uses
            elif uses <= unused and number not in self._unsent:
                self._forget(number)
                forgotten.append(number)
        changes = {**self._unsent, **dict.fromkeys(forgotten)}
        self._unsent = {}
        return [[*each] for each in changes.items()]

    def update(self, changes: "list[Any]") -> None:
        """Change the copies here that were changed in the other process."""
        for number, written in changes:
            entry: Any = self._entries.get(number, (None, [], None))
            value, _, known = entry
            if written == known:
                continue
            if written is None:
                self._forget(number)
                continue
            new: Any = decode(written, self._resolve)
            if number not in self._entries and hasattr(type(new), "clear"):
                value = new
                self._numbers[id(value)] = number
            elif type(new) is type(value):
                value.clear()
                (value.extend if hasattr(value, "extend") else value.update)(new)
            else:
                raise TypeError(number)
            self._entries[number] = value, _list_items(value), written


def _list_items(value: "Any") -> "list[Any]":
    return [*value, *value.values()] if isinstance(value, dict) else [*value]


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
    kind, arguments = find_class(names), values.pop("args", (text,))
    try:
        error = kind(*arguments)  # type: ignore[misc]
    except Exception:
        # Its arguments are not those that it was made of.
        error = kind.__new__(kind)
        error.args = (text,)
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
        if not module.startswith("grpo_cli"):
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
