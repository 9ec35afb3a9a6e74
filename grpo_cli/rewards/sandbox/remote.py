"""Calls between the process that runs a program and the process that runs its test: JSON, one message a line.

The test's process sends plain data and the numbers of its objects, and builds nothing else from what it reads:
a program decides what its own functions return, and nothing about what the test does with it.
"""

import builtins
import os
import sys
from _json import make_scanner
from _operator import contains, delitem, getitem, neg, setitem
from types import SimpleNamespace

from grpo_cli.rewards.sandbox.values import Opaque, decode, encode, flatten, send, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

_KNOWN: "dict[tuple[str, str], Callable[[Any], Any]]" = {
    ("datetime", "date"): lambda value: value.__reduce__()[1],
    ("datetime", "time"): lambda value: value.__reduce__()[1],
    ("datetime", "datetime"): lambda value: value.__reduce__()[1],
    ("datetime", "timedelta"): lambda value: (value.days, value.seconds, value.microseconds),
    ("decimal", "Decimal"): lambda value: (str(value),),
    ("fractions", "Fraction"): lambda value: (value.numerator, value.denominator),
    ("collections", "deque"): lambda value: (list(value), value.maxlen),
    ("collections", "Counter"): lambda value: (dict(value),),
    ("collections", "OrderedDict"): lambda value: (dict(value),),
    ("builtins", "range"): lambda value: (value.start, value.stop, value.step),
    ("numpy", "ndarray"): lambda value: (value.tolist(), value.dtype.str),
}
"""Library classes whose objects the other process makes anew, and the arguments for that."""
_MADE_BY = {("numpy", "ndarray"): "array"}
_FUNCTIONS: "dict[str, Callable[..., Any]]" = {
    f"__{each.__name__}__": each
    for each in (
        *(iter, next, len, bool, str, repr, abs, int, float, reversed, round),
        *(neg, getitem, setitem, delitem, contains),
    )
}
_ARITHMETIC = [
    f"__{side}{name}__"
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
    for side in ("", "r")
]
_MUTABLE = (list, dict, set, bytearray)
_NUMERIC = [*_ARITHMETIC, *(f"__{name}__" for name in "abs int float round neg bool".split())]
_COMPARISONS = [f"__{name}__" for name in "eq lt le gt ge".split()]
_scan = make_scanner(
    SimpleNamespace(  # type: ignore[arg-type]
        strict=False,
        memo={},
        parse_float=float,
        parse_int=int,
        **dict.fromkeys(("parse_constant", "object_hook", "object_pairs_hook")),
    )
)
_READABLE_DUNDERS = ("__name__", "__doc__", "__dict__", "__qualname__")
_READABLE = ("test", "collections", "random", "_io")
"""Modules of the classes whose objects a program may read, if a test passes one."""


class Ended(BaseException):
    """The other process is gone."""


class Remote:
    """An object of the other process; for one derived from plain data, that data counts here."""

    __slots__ = ("_remote",)

    def __init__(self, peer: "Peer", number: str, name: str, plain: "list[Any]") -> None:
        object.__setattr__(self, "_remote", (peer, number, name, plain))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The plain data's class, which `isinstance` compares."""
        plain = self._remote[3]
        return type(plain[0]) if plain else Remote

    def __getattr__(self, name: str) -> "Any":
        # Libraries read memory at addresses found under such names.
        if name.startswith("__") and name not in _READABLE_DUNDERS:
            raise AttributeError(name)
        return self._remote[0].ask("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._remote[0].ask("set", self, name, value)

    def __call__(self, *args: object, **kwargs: object) -> "Any":
        """Call the object in its own process."""
        return self._remote[0].call(self, args, kwargs)

    def __hash__(self) -> int:
        plain = self._remote[3]
        return hash(plain[0]) if plain else id(self)

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Remote and self._remote[0].ask("is", value, self) is True


def _forward(name: str) -> "Callable[..., Any]":
    """Return an operator of `Remote`. The program compares only objects of its own."""

    def operate(self: Remote, *args: "Any") -> "Any":
        peer, _, _, plain = self._remote
        args = tuple(_plain_of(each) if _is_plain(each) else each for each in args)
        if plain and name not in ("__setitem__", "__delitem__"):
            return operate_on(_plain_of(self), name, args)
        if name in _COMPARISONS and type(args[0]) is not Remote:
            return NotImplemented
        return peer.operate(self, name, args)

    return operate


def _is_plain(value: object) -> bool:
    return type(value) is Remote and bool(value._remote[3])


def _plain_of(value: Remote) -> "Any":
    """Return the plain data of an object derived from it; as it is now, if it can change."""
    peer, _, _, plain = value._remote
    kind = type(plain[0])
    if kind not in _MUTABLE:
        return plain[0]
    now = peer.ask("plain", value)
    if type(now) is not kind:
        raise TypeError(f"not a {kind.__name__} any more")
    return now


def _copy_plain(value: "Any") -> "Any":
    kind = next((kind for kind in _MUTABLE if isinstance(value, kind)), set)
    return kind(value.items() if kind is dict else value)


for _name in (*_FUNCTIONS, *_ARITHMETIC, *_COMPARISONS):
    setattr(Remote, _name, _forward(_name))


def operate_on(value: "Any", name: str, args: "Any") -> "Any":
    """Do what Python does for an operator's method."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](value, *args)
    method = getattr(type(value), name, None) if name in (*_ARITHMETIC, *_COMPARISONS) else None
    return NotImplemented if method is None else method(value, *args)


class Peer:
    """One end of the conversation.

    Args:
        read: Descriptor that messages are read from.
        write: Descriptor they are written to.
        names: The program's own names, at its end; None at the test's.
    """

    def __init__(self, read: int, write: int, names: "dict[str, Any] | None" = None) -> None:
        self._read, self._write = read, write
        self._names = names
        self._waiting = b""
        self._objects: list[Any] = []
        self._numbers: dict[int, str] = {}
        self._remotes: dict[str, Remote] = {}
        self._told: set[str] = set()
        self._errors: dict[str, type[BaseException]] = {}
        self._actions: dict[str, Callable[..., Any]] = {
            "get": self._get,
            "set": self._set,
            "call": self._call,
            "names": self._find,
            "operate": operate_on,
            "is": isinstance,
            "plain": _copy_plain,
        }

    def ask(self, what: str, *parts: object) -> "Any":
        """Have the other process do something; return its result, or raise its exception."""
        self.tell(what, *map(self.pack, parts))
        while True:
            kind, *rest = self._receive()
            if kind == "value":
                return self.unpack(rest[0])
            if kind == "error":
                error = self._error_class(rest[0])(self.unpack(rest[1]))
                # Raised by a function, it would end the test's own loops over `map` and `zip`.
                if isinstance(error, StopIteration) and parts[1:2] != ("__next__",):
                    error = RuntimeError("the program raised StopIteration")
                raise error
            self._answer(kind, *rest)

    def call(self, target: Remote, args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> "Any":
        """Call the other's function; lists and the like that it changes are changed here too."""
        value, changes = self.ask("call", target, list(args), kwargs)
        for place, change in changes.items():
            _replace(args[place], change)
        return value

    def operate(self, target: Remote, name: str, args: "tuple[Any, ...]") -> "Any":
        """Have the program work on its object, which may not answer a test's number with a number.

        In `abs(f(x) - 1) < 0.1`, an object that is told the 1 could call the difference 0.
        """
        value = self.ask("operate", target, name, list(args))
        gives_number = name in _ARITHMETIC and any(type(each) is not Remote for each in args)
        objects = [each for each in (target, *args) if type(each) is Remote]
        if gives_number or any(each._remote[1] in self._told for each in objects):
            known = value._remote[3][0] if _is_plain(value) else value
            if type(known) is Remote:
                self._told.add(known._remote[1])
            elif name in _NUMERIC and hasattr(known, "__abs__"):
                raise TypeError("an object of the program's was told a number before it gave one")
        return value

    def await_program(self) -> "str | None":
        """Wait until the program has run; return why it failed, if it did."""
        kind, *rest = self._receive()
        return None if kind == "ready" else str(rest[0])

    def serve(self) -> None:
        """Do what the other process asks for, until it is gone."""
        while True:
            self._answer(*self._receive())

    def tell(self, *message: object) -> None:
        """Send one message, in which all values are packed."""
        send(self._write, message)

    def names(self, code: "list[CodeType]") -> "dict[str, Any]":
        """Return the program's objects by the names that a test uses, except names of Python's own.

        A test that uses only such a name tests a function of that name.
        """
        used = {name for each in code for name in _names_in(each)}
        found = self.ask("names", sorted(used))
        # The program may answer with more names, even with the builtins themselves.
        names = {name: found[name] for name in used if name in found}
        own = {name: value for name, value in names.items() if not hasattr(builtins, name)}
        return own or names

    def pack(self, value: object) -> object:
        """Return a value as it is sent."""
        return encode(value, self._describe)

    def unpack(self, written: object) -> "Any":
        """Return the value that was sent; `Opaque` for what cannot be."""
        return decode(written, self._resolve)

    def _receive(self) -> "Any":
        parts = [self._waiting]
        while b"\n" not in parts[-1]:
            parts.append(os.read(self._read, 1 << 16))
            if not parts[-1]:
                raise Ended
        line, _, self._waiting = b"".join(parts).partition(b"\n")
        try:
            return _scan(line.decode(), 0)[0]
        except StopIteration:
            raise Ended from None

    def _answer(self, what: str, *packed: object) -> None:
        try:
            value = self._actions[what](*map(self.unpack, packed))
            self.tell("value", self.pack(value))
        except Ended:
            raise
        except BaseException as error:
            self.tell("error", _class_names(type(error)), encode(text_of(error)))

    def _call(self, target: "Any", args: "Any", kwargs: "Any") -> "Any":
        """Return a call's result, and the arguments that it changed by their places."""
        before = {at: self.pack(each) for at, each in enumerate(args) if type(each) in _MUTABLE}
        value = target(*args, **kwargs)
        return value, {at: args[at] for at, old in before.items() if self.pack(args[at]) != old}

    def _get(self, target: "Any", name: str) -> "Any":
        self._permit(target, name)
        return getattr(target, name)

    def _set(self, target: "Any", name: str, value: object) -> None:
        self._permit(target, name)
        setattr(target, name, value)

    def _permit(self, target: "Any", name: str) -> None:
        if self._names is None and (
            type(target).__module__ not in _READABLE or name.startswith("_")
        ):
            raise AttributeError(name)

    def _find(self, names: "list[str]") -> "dict[str, Any]":
        known = self._names or {}
        return {name: known[name] for name in names if name in known}

    def _describe(self, value: "Any") -> object:
        kind = type(value)
        if kind is Remote:
            return ["h", value._remote[1]]
        if value is NotImplemented:
            return ["n"]
        if kind is type(sys):
            return ["m", str(value.__name__)]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["x", _class_names(value)]
        if arguments := _KNOWN.get((kind.__module__, kind.__name__)):
            return ["k", kind.__module__, kind.__name__, self.pack(arguments(value))]
        if kind.__module__ == "numpy" and hasattr(value, "item"):
            return self.pack(value.item())
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = str(len(self._objects))
            self._objects.append(value)
        plain = flatten(value)
        return ["r", number, kind.__name__[:80], *([] if plain[:1] == ["o"] else [plain])]

    def _resolve(self, mark: str, *parts: "Any") -> object:
        if mark == "h":
            return self._objects[int(parts[0])]
        if mark == "n":
            return NotImplemented
        if mark == "m":
            return __import__(parts[0], fromlist=("",))
        if mark == "x":
            return self._error_class(parts[0])
        if mark == "k" and (parts[0], parts[1]) in _KNOWN:
            name = _MADE_BY.get((parts[0], parts[1]), parts[1])
            return getattr(__import__(parts[0]), name)(*self.unpack(parts[2]))
        if mark != "r":
            return Opaque("unknown")
        number, name, *plain = parts
        if number not in self._remotes:
            values = [decode(each) for each in plain]
            self._remotes[number] = Remote(self, number, name, values)
        return self._remotes[number]

    def _error_class(self, names: "list[str]") -> "type[BaseException]":
        """Return Python's own exception of the first such name, or a class derived from it."""
        own = [vars(builtins).get(name) for name in names]
        bases = [each for each in own if isinstance(each, type) and issubclass(each, BaseException)]
        base = bases[0] if bases else Exception
        if base.__name__.startswith("Unicode"):
            return ValueError
        if names[0] == base.__name__:
            return base
        if names[0] not in self._errors:
            self._errors[names[0]] = type(names[0], (base,), {})
        return self._errors[names[0]]


def describe_remote(value: "Any") -> "list[Any]":
    """Return a value for the report that is, or holds, objects of the program's."""
    if type(value) is not Remote:
        return flatten(value, describe_remote)
    *_, name, plain = value._remote
    return encode(_plain_of(value), describe_remote) if plain else ["o", name]  # type: ignore[return-value]


def _names_in(code: "CodeType") -> "list[str]":
    inner = [each for each in code.co_consts if isinstance(each, type(code))]
    return [*code.co_names, *(name for each in inner for name in _names_in(each))]


def _class_names(kind: "type[BaseException]") -> object:
    return [each.__name__ for each in kind.__mro__]


def _replace(old: "Any", new: "Any") -> None:
    if type(old) is type(new) and type(old) in _MUTABLE:
        old.clear()
        (old.update if type(old) in (dict, set) else old.extend)(new)
