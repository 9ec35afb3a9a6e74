"""Calls between the process that runs a program and the process that runs its test: JSON, one message a line.

What crosses is a copy: exact plain data, and data of the standard library that is made anew from plain data. Each
message begins with what changed since the last one in lists and the like that crossed, and in global variables.
Objects stay where they are; `rules.py` says what a test can do with a program's.
"""

import builtins
import operator
import os
from _json import make_scanner
from _thread import RLock
from types import MethodType, SimpleNamespace

from grpo_cli.sandbox.values import (
    COPY,
    Copies,
    decode,
    describe_error,
    find_class,
    make_error,
    name_classes,
    send,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
ARITHMETIC = [f"__{side}{name}__" for name in _BINARY for side in ("", "r", "i")]
ARITHMETIC += ["__divmod__", "__rdivmod__"]
COMPARISONS = [f"__{name}__" for name in "eq lt le gt ge".split()]
PLAIN = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_OF_FUNCTIONS = ("__repr__", "__enter__", "__exit__")
_READABLE_DUNDERS = ("__name__", "__doc__", "__dict__", "__qualname__", "__annotations__")
FIELDS = "__dataclass_fields__"
_REPLIES = ("value", "error", "lost")
_STOPPING = ("__next__", "send", "throw")

_scan = make_scanner(
    SimpleNamespace(  # type: ignore[arg-type]
        strict=False,
        memo={},
        parse_float=float,
        parse_int=int,
        **dict.fromkeys(("parse_constant", "object_hook", "object_pairs_hook")),
    )
)


class Ended(BaseException):
    """The other process is gone."""


class Refused(BaseException):
    """A program's object was asked what only plain data may answer."""


def _copy_plain(value: "Any") -> "Any":
    """Return a copy in the plain class that an object's class is derived from; None if it is not."""
    base = next((base for base in PLAIN if isinstance(value, base)), None)
    return base and (str.__str__(value) if base is str else base(value))


_ACTIONS: "dict[str, Callable[..., Any]]" = {
    **{
        f"__{name}__": getattr(builtins, name)
        for name in "len bool str repr abs int float complex bytes reversed round hash format".split()
    },
    **{
        f"__{name}__": getattr(operator, name)
        for name in "neg pos invert index getitem setitem delitem contains".split()
    },
    "__ceil__": lambda value: __import__("math").ceil(value),
    "__floor__": lambda value: __import__("math").floor(value),
    "__trunc__": lambda value: __import__("math").trunc(value),
    **{f"__i{name}__": getattr(operator, f"__i{name}__") for name in _BINARY},
    "__next__": next,
    "__copy__": lambda value: __import__("copy").copy(value),
    "__iter__": lambda value: (item for item in value),
    "__enter__": lambda value: type(value).__enter__(value),
    "__exit__": lambda value, *error: type(value).__exit__(value, *error),
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "deepcopy": lambda value: __import__("copy").deepcopy(value),
    "plain": _copy_plain,
    "call": lambda value, args, kwargs: value(*args, **dict(kwargs)),
    "send": lambda items, value: items.send(value),
    "throw": lambda items, *error: items.throw(*error),
    "close": lambda items: getattr(items, "close", list)(),
}


def operate_on(value: "Any", name: str, *args: "Any") -> "Any":
    """Do what Python does for an operator's method, or another action on an object."""
    if name in _ACTIONS:
        return _ACTIONS[name](value, *args)
    if name not in (*COMPARISONS, *ARITHMETIC):
        raise AttributeError(name)
    method = getattr(type(value), name, None)
    return NotImplemented if method is None else method(value, *args)


class Remote:
    """A function of the program's, in its test."""

    __slots__ = ("_remote",)
    __doc__ = property(lambda self: self._remote.peer.get(self, "__doc__"))

    def __init__(self, peer: "Peer", number: int, name: str = "") -> None:
        content = SimpleNamespace(peer=peer, number=number, name=name)
        # These belong to `rules.py`.
        content.made, content.informed, content.is_maker, content.claimant = (
            None,
            False,
            False,
            None,
        )
        object.__setattr__(self, "_remote", content)

    def __getattr__(self, name: str) -> "Any":
        # Libraries read memory at addresses found under such names.
        if name.startswith("__") and name not in _READABLE_DUNDERS:
            raise AttributeError(name)
        return self._remote.peer.get(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._remote.peer.ask("set", self._remote.number, name, value)

    def __delattr__(self, name: str) -> None:
        self._remote.peer.ask("delete", self._remote.number, name)

    def __call__(self, *args: "Any", **kwargs: "Any") -> "Any":
        """Call the object in its own process."""
        return self._remote.peer.call(self, args, kwargs)

    def __deepcopy__(self, _: object) -> "Any":
        return self._remote.peer.operate(self, "deepcopy", ())

    def __get__(self, instance: object, owner: object = None) -> "Any":
        # A decorated method of a class of the test's.
        return self if instance is None else MethodType(self, instance)


class Operand(Remote):
    """An object with operators: of the test's, in the program; in the test, of a class that it names."""

    __slots__ = ()
    __dataclass_fields__ = property(lambda self: self._remote.peer.get(self, FIELDS))

    def __get__(self, instance: object, owner: object = None) -> "Any":
        return self


def _forward(kind: type, name: str) -> None:
    """Have the process that has an object carry out an operator of its class."""
    setattr(kind, name, lambda self, *args: self._remote.peer.operate(self, name, args))


for _name in {*_ACTIONS, *COMPARISONS, *ARITHMETIC}:
    # What `contextlib.contextmanager` makes can be called, so it is a function here.
    if _name.startswith("__"):
        _forward(Remote if _name in _OF_FUNCTIONS else Operand, _name)


class Peer:
    """One end of the conversation: what both have."""

    _tested: "frozenset[type]" = frozenset()
    """Classes of this process that the test names."""
    has_ended = False
    """Whether the other process is gone."""

    def __init__(self, read: int, write: int, first: int, *objects: object) -> None:
        self._read, self._write = read, write
        self._waiting = b""
        self._lock = RLock()
        self._objects: list[Any] = [*objects]
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}
        self._namespaces: tuple[dict[str, Any], ...] = ({},)
        self._shared: dict[str, object] = {}
        self._assigned: Sequence[str] = ()
        self._copies = Copies(first, self.describe, self.resolve)
        self._pack = self._copies.pack

    def ask(self, what: str, number: int, *parts: object) -> "Any":
        """Have the other process do something with its object; return the result, or raise its exception."""
        error = None
        with self._lock:
            try:
                self.tell(what, number, *map(self._pack, parts))
                kind, *rest = self.receive()
                while kind not in _REPLIES:
                    self._answer(kind, *rest)
                    kind, *rest = self.receive()
                if kind == "value":
                    return self._unpack(rest[0])
                why = str(rest[0])
                error = make_error(*rest) if kind == "error" else None
            except Exception as fault:
                why = type(fault).__name__
        if error is None:
            self.lose(f"a value cannot be copied ({why})")
        # Raised by a function, it would end the test's own loops over `map` and `zip`.
        if isinstance(error, StopIteration) and what not in _STOPPING:
            error = RuntimeError("the program raised StopIteration")
        raise error

    def lose(self, reason: str) -> "NoReturn":
        """Raise an exception as the other's value did not arrive."""
        raise RuntimeError(reason)

    def get(self, target: Remote, name: str) -> "Any":
        """Return an attribute of the other's object."""
        return self.ask("get", target._remote.number, name)

    def operate(self, target: Remote, name: str, args: "tuple[Any, ...]") -> "Any":
        """Use an operator of the other's object."""
        return self.ask(name, target._remote.number, *args)

    def call(self, target: "Any", args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> "Any":
        """Call the other's function."""
        return self.ask("call", self.describe(target)[1], args, (*kwargs.items(),))

    def serve(self) -> None:
        """Do what the other process asks for, until it is gone."""
        while True:
            self._answer(*self.receive())

    def share(
        self, names: "list[str]", *namespaces: "dict[str, Any]", assigned: "Sequence[str]" = ()
    ) -> None:
        """Keep globals equal in both processes, from now on, but in the first namespace only if `assigned`."""
        self._namespaces, self._assigned = namespaces, assigned
        self._shared = {name: namespaces[0][name] for name in names}

    def _take_assigned(self) -> "dict[str, object]":
        """Return the globals that were assigned here since the last message."""
        now = {name: self._namespaces[0].get(name) for name in self._shared}
        changed = {name: value for name, value in now.items() if value is not self._shared[name]}
        self._shared = now
        return {name: self._pack(value) for name, value in changed.items()}

    def _assign(self, changed: "dict[str, Any]") -> None:
        for name in changed.keys() & self._shared.keys():
            old, new = self._shared[name], self._unpack(changed[name])
            is_assigned = name in self._assigned
            for namespace in self._namespaces[:1] if is_assigned else self._namespaces:
                if namespace.get(name) is old:
                    namespace[name] = new
            self._shared[name] = self._namespaces[0].get(name)

    def tell(self, *message: object) -> None:
        """Send one message, in which all values are packed."""
        assigned = self._take_assigned()
        send(self._write, [assigned, self._copies.take_changes(), *message])

    def receive(self) -> "Any":
        """Return the next message."""
        parts = [self._waiting]
        while b"\n" not in parts[-1]:
            parts.append(os.read(self._read, 1 << 16))
            if not parts[-1]:
                self.has_ended = True
                raise Ended
        line, _, self._waiting = b"".join(parts).partition(b"\n")
        try:
            assigned, changes, *message = _scan(line.decode(), 0)[0]
        except StopIteration:
            self.has_ended = True
            raise Ended from None
        self._copies.update(changes)
        self._assign(assigned)
        return message

    def _answer(self, what: str, number: int, *packed: object) -> None:
        is_done = False
        try:
            # By number: only what was passed can be reached.
            value = self.do(what, self._objects[number], *map(self._unpack, packed))
            is_done = True
            self.tell("value", self._pack(value))
        except (Ended, Refused):
            raise
        except BaseException as error:
            if is_done:
                send(self._write, [{}, [], "lost", type(error).__name__])
                return
            self.tell("error", *describe_error(error))

    def do(self, what: str, target: "Any", *parts: "Any") -> "Any":
        """Do what the other process asks for."""
        return operate_on(target, what, *parts)

    def _unpack(self, written: object) -> "Any":
        return decode(written, self.resolve)

    def describe(self, value: "Any") -> "Any":
        """Return how a value is sent that is not plain data."""
        kind = type(value)
        if isinstance(value, Remote):
            return ["own", value._remote.number]
        if value is NotImplemented:
            return ["nothing"]
        if kind is float:
            # Not finite, or it would be in JSON.
            return ["float", repr(value)]
        is_named_tuple = kind.__bases__ == (tuple,) and hasattr(kind, "_fields")
        if is_named_tuple and self._tested.isdisjoint(kind.__mro__):
            return ["tuple", kind.__name__, list(kind._fields), self._pack(tuple(value))]
        if kind.__module__ == "numpy" and hasattr(value, "item"):
            return self._pack(value.item())
        if isinstance(value, BaseException):
            return ["exception", *describe_error(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error", name_classes(value)]
        if isinstance(value, type) and value.__module__ == "builtins":
            return ["type", value.__name__]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self.describe_object(value, self._numbers[id(value)], str(kind.__name__)[:80])

    def describe_object(self, value: "Any", number: int, name: str) -> object:
        """Return how an object is sent that stays here."""
        return ["object", number, name]

    def resolve(self, mark: str, *parts: "Any") -> object:
        """Return what `describe` wrote."""
        match mark:
            case "own":
                return self._objects[parts[0]]
            case _ if mark == COPY:
                return self._copies[parts[0]]
            case "nothing":
                return NotImplemented
            case "float":
                return float(parts[0])
            case "tuple":
                from collections import namedtuple

                name, fields, values = parts
                # Of one text, `namedtuple` makes several fields.
                if type(name) is not str or type(fields) is not list:
                    raise TypeError(mark)
                return namedtuple(name, fields)(*self._unpack(values))
            case "exception":
                return make_error(*parts)
            case "error":
                return find_class(parts[0])
            case "type" if isinstance(found := vars(builtins)[parts[0]], type):
                return found
        return self.resolve_object(mark, *parts)

    def resolve_object(self, mark: str, number: int, name: str, *_: object) -> object:
        """Return what stands for an object of the other process."""
        return self._remotes.setdefault(number, Operand(self, number, name))


class ProgramPeer(Peer):
    """The program's end: whatever it sends is its own word. Its first objects are its module and `random.seed`."""

    def __init__(self, read: int, write: int, module: object) -> None:
        super().__init__(read, write, 0, module, lambda *seed: __import__("random").seed(*seed))
        self._functions: dict[int, int] = {}
        """The numbers of functions of the test."""

    def do(self, what: str, target: "Any", *parts: "Any") -> "Any":
        """Also find a program's names."""
        if what != "names":
            return super().do(what, target, *parts)
        names = {name: vars(target)[name] for name in parts[0] if name in vars(target)}
        classes = [each for each in names.values() if isinstance(each, type)]
        self._tested = frozenset(
            each
            for each in classes
            if not issubclass(each, BaseException) and each.__module__ != "builtins"
        )
        self.share([name for name, each in names.items() if not callable(each)], vars(target))
        return names

    def describe(self, value: "Any") -> "Any":
        """Return how a value is sent that is not plain data."""
        number = self._functions.get(id(value))
        return super().describe(value) if number is None else ["own", number]

    def resolve_object(self, mark: str, number: int, name: str, *parts: "Any") -> object:
        """Return what stands for an object of the test's: for a function, one with its parameters."""
        value = super().resolve_object(mark, number, name)
        if mark == "function" and isinstance(value, Remote):
            value = self._remotes[number] = self._make_function(value, name, *parts)
            self._functions[id(value)] = number
        return value

    def _make_function(
        self, remote: Remote, name: str, doc: str, parameters: str, passed: str, *rest: "Any"
    ) -> "Callable[..., Any]":
        made: dict[str, Any] = {"__call__": remote, "__name__": "test"}
        exec(f"def _{parameters}: return __call__({passed})", made)
        function = made["_"]
        function.__name__, function.__qualname__, function.__doc__ = name, name, doc
        values = map(self._unpack, rest)
        function.__defaults__, function.__kwdefaults__, function.__annotations__ = values
        return function

    def describe_object(self, value: "Any", number: int, name: str) -> object:
        """Return how an object is sent: as an instance, if the test names its class."""
        if isinstance(value, type) and value in self._tested:
            bases = [self.describe(base) for base in value.__mro__[1:] if base in self._tested]
            return ["class", number, value.__name__, bases, value.__doc__]
        for base in type(value).__mro__:
            if base in self._tested:
                return ["instance", number, name, self.describe(base)]
        if hasattr(type(value), "__next__"):
            return ["iterator", number, name]
        return ["function" if callable(value) else "other", number, name]
