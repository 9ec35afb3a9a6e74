"""Calls between the process that runs a program and the process that runs its test: JSON, one message a line.

What crosses is a copy: exact plain data, and data of the standard library that is made anew from plain data.
Objects stay where they are; `objects.py` says what the other process can do with them.
"""

import builtins
import os
import sys
from _json import make_scanner
from _thread import RLock
from types import SimpleNamespace

from grpo_cli.rewards.sandbox.objects import (
    CLAIMS,
    Class,
    Judge,
    Operand,
    Refused,
    Remote,
    Unjudged,
    copy_plain,
    operate_on,
)
from grpo_cli.rewards.sandbox.values import decode, encode, send, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_LIBRARY: "dict[tuple[str, str], Callable[[Any], Any]]" = {
    ("datetime", "date"): lambda value: value.__reduce__()[1],
    ("datetime", "time"): lambda value: value.__reduce__()[1],
    ("datetime", "datetime"): lambda value: value.__reduce__()[1],
    ("datetime", "timedelta"): lambda value: (value.days, value.seconds, value.microseconds),
    ("datetime", "timezone"): lambda value: (value.utcoffset(None),),
    ("decimal", "Decimal"): lambda value: (str(value),),
    ("fractions", "Fraction"): lambda value: (value.numerator, value.denominator),
    ("collections", "deque"): lambda value: (list(value), value.maxlen),
    ("collections", "Counter"): lambda value: (dict(value),),
    ("collections", "OrderedDict"): lambda value: (dict(value),),
    ("collections", "defaultdict"): lambda value: (
        value.default_factory if value.default_factory in vars(builtins).values() else None,
        dict(value),
    ),
    ("builtins", "range"): lambda value: (value.start, value.stop, value.step),
    ("builtins", "dict_keys"): lambda value: (list(value),),
    ("builtins", "dict_values"): lambda value: (list(value),),
    ("builtins", "dict_items"): lambda value: (list(value),),
    ("array", "array"): lambda value: (value.typecode, value.tolist()),
    ("re", "Match"): lambda value: (
        value.re.pattern,
        value.re.flags,
        value.string,
        value.start(),
        value.endpos,
    ),
    ("numpy", "ndarray"): lambda value: (value.tolist(), value.dtype.str),
}
"""Library classes whose objects the other process makes anew, and the arguments for that."""
_MADE_BY: "dict[tuple[str, str], Callable[..., Any]]" = {
    ("builtins", "dict_keys"): lambda keys: dict.fromkeys(keys).keys(),
    ("builtins", "dict_values"): lambda values: dict(enumerate(values)).values(),
    ("builtins", "dict_items"): lambda items: dict(items).items(),
    ("re", "Match"): lambda pattern, flags, *where: (
        __import__("re").compile(pattern, flags).match(*where)
    ),
    ("numpy", "ndarray"): lambda *parts: __import__("numpy").array(*parts),
}
_MUTABLE = (list, dict, set, bytearray)
_scan = make_scanner(
    SimpleNamespace(  # type: ignore[arg-type]
        strict=False,
        memo={},
        parse_float=float,
        parse_int=int,
        **dict.fromkeys(("parse_constant", "object_hook", "object_pairs_hook")),
    )
)
_READABLE = ("test", "collections", "random", "_io")
"""Modules of the classes whose objects a program may read, if a test passes one."""


class Ended(BaseException):
    """The other process is gone."""


class Peer:
    """One end of the conversation.

    Args:
        read: Descriptor that messages are read from.
        write: Descriptor they are written to.
        program: The program's own names, at its end; None at the test's.
    """

    def __init__(self, read: int, write: int, program: "dict[str, Any] | None" = None) -> None:
        self._read, self._write = read, write
        self._program = program
        self._waiting = b""
        self._lock = RLock()
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}
        self._named: dict[type, int] = {}
        self._errors: dict[str, type[BaseException]] = {}
        self._capitalized: set[int] = set()
        self._is_naming = False
        self.judge = Judge(self)

    def ask(self, what: str, *parts: object, ends: bool = False) -> "Any":
        """Have the other process do something; return its result, or raise its exception.

        Args:
            what: One of the actions.
            parts: What it is done with.
            ends: Whether the result may be that there are no more items.
        """
        with self._lock:
            self.tell(what, *map(self.pack, parts))
            while True:
                kind, *rest = self._receive()
                if kind == "value":
                    return self.unpack(rest[0])
                if kind == "error":
                    error = self._make_error(*rest)
                    # Raised by a function, it would end the test's own loops over `map` and `zip`.
                    if isinstance(error, StopIteration) and not ends:
                        error = RuntimeError("the program raised StopIteration")
                    raise error
                self._answer(kind, *rest)

    def get(self, target: Remote, name: str) -> "Any":
        """Return an attribute of the other's object."""
        if self._program is None:
            return self.judge.get(target, name)
        return self.ask("get", target._remote.number, name)

    def call(self, number: int, args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> "Any":
        """Call the other's function; lists and the like that it changes are changed here too."""
        value, changes, returned = self.ask("call", number, list(args), kwargs)
        for index, change in changes.items():
            _replace(args[index], change)
        return value if returned is None else args[returned]

    def make(self, number: int, args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> "Any":
        """Have the program make an instance of its class."""
        value = self.call(number, args, kwargs)
        if isinstance(value, Operand) and value._remote.made is None:
            value._remote.made = number in self._capitalized
        return value

    def operate(self, target: Remote, name: str, args: "tuple[Any, ...]") -> "Any":
        """Use an operator of the other's object."""
        if self._program is None:
            return self.judge.operate(target, name, args)
        return self.ask("operate", target._remote.number, name, list(args), ends=name == "__next__")

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

    def names(self, used: "list[str]", everywhere: "list[str]") -> "dict[str, Any]":
        """Return the program's objects by those names that a test uses and the program defines.

        Args:
            used: The names.
            everywhere: Those that may name classes.
        """
        # Before their instances, which name them.
        for each in self.ask("classes", everywhere):
            self._add_class(*each)
        self._is_naming = True
        found = self.ask("names", used)
        self._is_naming = False
        found = {name: found[name] for name in used if name in found}
        for name, value in found.items():
            if type(value) is Remote:
                value._remote.made = True
            elif type(value) is Class and not name.lstrip("_")[:1].isupper():
                # By convention, `f(2)` means a function and `Stack()` a class.
                self._capitalized.discard(value._identity[1])
        return found

    def pack(self, value: object) -> object:
        """Return a value as it is sent."""
        return encode(value, self._describe)

    def unpack(self, written: object) -> "Any":
        """Return the value that was sent; `Unjudged` for what cannot be."""
        return decode(written, self._resolve)

    def _receive(self) -> "Any":
        parts = [self._waiting]
        while b"\n" not in parts[-1]:
            parts.append(os.read(self._read, 1 << 16))
            if not parts[-1]:
                self.judge.refusal = "the program ended itself"
                raise Ended
        line, _, self._waiting = b"".join(parts).partition(b"\n")
        try:
            return _scan(line.decode(), 0)[0]
        except StopIteration:
            raise Ended from None

    def _answer(self, what: str, *packed: object) -> None:
        try:
            if what in ("names", "classes"):
                value = getattr(self, f"_find_{what}")(*map(self.unpack, packed))
            else:
                # By number: only what was passed can be reached.
                target, *parts = map(self.unpack, packed)
                value = getattr(self, f"_do_{what}")(self._objects[target], *parts)
            self.tell("value", self.pack(value))
        except (Ended, Refused):
            raise
        except BaseException as error:
            self.tell("error", *self._describe_error(error))

    def _do_call(self, target: "Any", args: "Any", kwargs: "Any") -> "Any":
        """Return a call's result, the arguments that it changed, and which one it returned, by their indices."""
        before = {at: self.pack(each) for at, each in enumerate(args) if type(each) in _MUTABLE}
        value = target(*args, **kwargs)
        changes = {at: args[at] for at, old in before.items() if self.pack(args[at]) != old}
        returned = next((at for at in before if args[at] is value), None)
        return value if returned is None else None, changes, returned

    def _do_get(self, target: "Any", name: str) -> "Any":
        self._permit(target, name)
        return getattr(target, name)

    def _do_set(self, target: "Any", name: str, value: object) -> None:
        self._permit(target, name)
        if self._program is None and callable(getattr(type(target), name, None)):
            raise AttributeError(f"{name} is a method of the test's")
        setattr(target, name, value)

    def _do_operate(self, target: "Any", name: str, args: "Any") -> "Any":
        return operate_on(target, name, args)

    def _do_copy(self, target: "Any") -> "Any":
        return copy_plain(target)

    def _do_next(self, target: "Any", sent: object) -> "Any":
        return next(target) if sent is None else target.send(sent)

    def _permit(self, target: "Any", name: str) -> None:
        if (
            self._program is None
            and (type(target).__module__ not in _READABLE or name.startswith("_"))
            and name not in ("__name__", "__qualname__", "__doc__")
        ):
            raise AttributeError(name)

    def _find_names(self, names: "list[str]") -> "dict[str, Any]":
        known = self._program or {}
        return {name: known[name] for name in names if name in known}

    def _find_classes(self, names: "list[str]") -> "list[tuple[int, str, list[int]]]":
        """Return the classes of these names, each after those it is derived from."""
        classes = {each for each in self._find_names(names).values() if isinstance(each, type)}
        self._named = {
            each: self._number(each)
            for each in sorted(classes, key=lambda each: len(each.__mro__))
            if not issubclass(each, BaseException) and each.__module__ != "builtins"
        }
        return [
            (
                number,
                each.__name__,
                [self._named[base] for base in each.__mro__[1:] if base in self._named],
            )
            for each, number in self._named.items()
        ]

    def _number(self, value: object) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return number

    def _describe(self, value: "Any") -> object:
        kind = type(value)
        if isinstance(value, Remote):
            return ["own", value._remote.number]
        if kind is Unjudged or kind is Class:
            return ["own", value._number if kind is Unjudged else value._identity[1]]
        if value is NotImplemented:
            return ["nothing"]
        if arguments := _LIBRARY.get((kind.__module__, kind.__name__)):
            return ["library", kind.__module__, kind.__name__, self.pack(arguments(value))]
        if kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):
            return ["tuple", kind.__name__, list(kind._fields), self.pack(tuple(value))]
        if kind.__module__ == "numpy" and hasattr(value, "item"):
            return self.pack(value.item())
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error", _class_names(value)]
        if isinstance(value, type) and value.__module__ == "builtins":
            return ["type", value.__name__]
        return self._describe_object(value, kind)

    def _describe_object(self, value: "Any", kind: type) -> object:
        number = self._number(value)
        name = str(getattr(kind, "__name__", ""))[:80]
        if self._program is None:
            return ["object", number, name]
        if isinstance(value, type) and value in self._named:
            return ["class", number]
        of = next((self._named[base] for base in kind.__mro__ if base in self._named), None)
        if of is not None:
            return ["instance", number, name, of]
        if hasattr(kind, "__next__"):
            return ["iterator", number]
        return ["function", number] if callable(value) else ["other", number, name]

    def _resolve(self, mark: str, *parts: "Any") -> object:
        if mark == "own":
            return self._objects[parts[0]]
        if mark == "nothing":
            return NotImplemented
        if mark == "error":
            error = self._error_class(parts[0])
            is_caught = self._program is None and issubclass(AssertionError, error)
            # `except Own`, if `Own` were this, would pass what the test asserts.
            return self._resolve_object("other", -1, error.__name__) if is_caught else error
        if mark == "type":
            if isinstance(found := vars(builtins).get(parts[0]), type):
                return found
            raise LookupError(parts[0])
        if mark == "library" and (parts[0], parts[1]) in _LIBRARY:
            make = _MADE_BY.get((parts[0], parts[1])) or getattr(__import__(parts[0]), parts[1])
            return make(*self.unpack(parts[2]))
        if mark == "tuple":
            from collections import namedtuple

            if not CLAIMS.isdisjoint(parts[1]):
                raise ValueError(parts[1])
            return namedtuple(parts[0], parts[1])(*self.unpack(parts[2]))
        return self._resolve_object(mark, *parts)

    def _resolve_object(self, mark: str, number: int, name: str = "", of: int = 0) -> object:
        if mark == "class":
            # One that a program returns is a function: what it makes is a result.
            return self._remotes[number] if self._is_naming else Remote(self, number)
        if mark == "iterator":
            return self.iterate(number)
        if mark == "other":
            why = "is not plain data, and the test does not name its class"
            return Unjudged(number, lambda: self.judge.refuse(name, why))
        if number not in self._remotes:
            make: Any = {"instance": self._remotes.get(of), "object": Operand, "function": Remote}[
                mark
            ]
            self._remotes[number] = type.__call__(make, self, number, name)
        else:
            # What a program returns is not what the test made.
            self._remotes[number]._remote.made = False
        return self._remotes[number]

    def iterate(self, number: int) -> "Iterator[Any]":
        """Yield the items of an iterator of the other process."""
        sent = None
        while True:
            try:
                item = self.ask("next", number, sent, ends=True)
            except StopIteration:
                return
            sent = yield item

    def _add_class(self, number: int, name: str, bases: "list[int]") -> None:
        """Make a class that stands for the program's."""
        parents: list[type] = []
        for base in (self._remotes[each] for each in bases):
            if not any(issubclass(each, base) for each in parents):
                parents.append(base)
        content = {"__slots__": (), "_identity": (self, number)}
        self._remotes[number] = Class(name, tuple(parents) or (Operand,), content)
        self._capitalized.add(number)

    def _describe_error(self, error: BaseException) -> "list[object]":
        """Return an exception's classes, text, cause, and what is plain of its arguments and attributes."""
        plain = {}
        for name, value in {"args": error.args, **getattr(error, "__dict__", {})}.items():
            try:
                plain[name] = encode(value, _reject)
            except (TypeError, RecursionError):
                continue
        cause = error.__cause__ and self._describe_error(error.__cause__)
        return [_class_names(type(error)), encode(text_of(error)), plain, cause]

    def _make_error(
        self,
        names: "list[list[str]]",
        text: str,
        plain: "dict[str, Any]",
        cause: "list[Any] | None",
    ) -> BaseException:
        values = {name: decode(value) for name, value in plain.items()}
        try:
            arguments: Any = values.pop("args", (text,))
            error = self._error_class(names)(*arguments)
        except Exception:
            error = Exception(text)
        vars(error).update(values, _text=text)
        error.__cause__ = self._make_error(*cause) if cause else None
        return error

    def _error_class(self, names: "list[list[str]]") -> "type[BaseException]":
        """Return the exception that both processes have, or make one that is derived from such."""
        (module, name), *bases = names
        if module == "test" or module in sys.stdlib_module_names:
            known = getattr(sys.modules.get(module), name, None)
            if isinstance(known, type) and issubclass(known, BaseException):
                # A program may not skip a test.
                return known if not known.__module__.startswith("unittest") else Exception
        if name not in self._errors:
            parents: list[type] = []
            for index in range(len(bases) - 1):
                base = self._error_class(bases[index:])
                if not any(issubclass(each, base) for each in parents):
                    parents.append(base)
            content = {"__str__": _own_text, "__module__": module}
            self._errors[name] = type(name, tuple(parents) or (Exception,), content)
        return self._errors[name]


def _own_text(error: BaseException) -> str:
    return str(vars(error).get("_text", BaseException.__str__(error)))


def _reject(value: object) -> "Any":
    raise TypeError(value)


def _class_names(kind: "type[BaseException]") -> "list[list[str]]":
    return [[str(each.__module__), each.__name__] for each in kind.__mro__]


def _replace(old: "Any", new: "Any") -> None:
    if type(old) is type(new) and type(old) in _MUTABLE:
        old.clear()
        (old.update if type(old) in (dict, set) else old.extend)(new)
