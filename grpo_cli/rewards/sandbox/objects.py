"""Objects of the other process: what a test can do with a program's objects, and a program with a test's.

A program's object may not take part in a comparison with what the test knows: it would call itself right.
"""

import operator
from types import SimpleNamespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

    from grpo_cli.rewards.sandbox.peer import Peer

_FUNCTIONS: "dict[str, Callable[..., Any]]" = {
    **{
        f"__{function.__name__}__": function
        for function in (
            iter,
            next,
            len,
            bool,
            str,
            repr,
            abs,
            int,
            float,
            reversed,
            round,
            hash,
            format,
        )
    },
    "__neg__": operator.neg,
    "__invert__": operator.invert,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__contains__": operator.contains,
}
_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_ARITHMETIC = [f"__{side}{name}__" for name in _BINARY for side in ("", "r", "i")]
_COMPARISONS = [f"__{name}__" for name in "eq lt le gt ge".split()]
_NUMERIC = [*_ARITHMETIC, *(f"__{name}__" for name in "abs int float round neg bool len".split())]
_CONTEXTS = ["__enter__", "__exit__"]
_OPERATORS = [*_FUNCTIONS, *_ARITHMETIC, *_COMPARISONS, *_CONTEXTS]
_READABLE_DUNDERS = ("__name__", "__doc__", "__dict__", "__qualname__")
_PLAIN = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
CLAIMS = frozenset(
    name
    for kind in (str, bytes, float, set)
    for name in dir(kind)
    if name.startswith(("is", "starts", "ends"))
)
"""Methods by which plain data answers yes or no."""


class Refused(BaseException):
    """A program's object was asked what only plain data may answer."""


class Remote:
    """An object of the other process; a function, of a program's."""

    __slots__ = ("_remote",)

    def __init__(self, peer: "Peer", number: int, name: str = "") -> None:
        # `made`: whether the test named or made it itself; None of what crossed once.
        content = SimpleNamespace(peer=peer, number=number, name=name, made=None, told=False)
        object.__setattr__(self, "_remote", content)

    def __getattr__(self, name: str) -> "Any":
        # Libraries read memory at addresses found under such names.
        if name.startswith("__") and name not in _READABLE_DUNDERS:
            raise AttributeError(name)
        return self._remote.peer.get(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._remote.peer.ask("set", self._remote.number, name, value)

    def __repr__(self) -> str:
        return self._remote.peer.judge.refuse("function", "has no text")

    def __call__(self, *args: "Any", **kwargs: "Any") -> "Any":
        """Call the object in its own process."""
        return self._remote.peer.call(self._remote.number, args, kwargs)


class Operand(Remote):
    """An object with operators: of a class that a test names, or any object of a test's."""

    __slots__ = ()


class Class(type):
    """The metaclass of the classes that stand for a program's in its test; their instances are the program's."""

    _identity: "tuple[Peer, int]"

    def __call__(cls, *args: "Any", **kwargs: "Any") -> "Any":
        """Have the program make an instance."""
        if "_identity" not in vars(cls):
            raise TypeError("a test cannot derive a class from one of the program's")
        peer, number = cls._identity
        return peer.make(number, args, kwargs)

    def __getattr__(cls, name: str) -> "Any":
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._identity[0].ask("get", cls._identity[1], name)

    def __setattr__(cls, name: str, value: object) -> None:
        cls._identity[0].ask("set", cls._identity[1], name, value)


class Unjudged:
    """An object of a class that the test does not name: it can only be passed back to the program."""

    __slots__ = ("_number", "_refuse")

    def __init__(self, number: int, refuse: "Callable[[], NoReturn]") -> None:
        self._number = number
        self._refuse = refuse

    def __getattr__(self, name: str) -> "Any":
        self._refuse()


def _forward(name: str) -> "Callable[..., Any]":
    return lambda self, *args: self._remote.peer.operate(self, name, args)


def _forward_of_class(name: str) -> "Callable[..., Any]":
    def operate(cls: Class, *args: "Any") -> "Any":
        peer, number = cls._identity
        return peer.ask("operate", number, name, list(args))

    return operate


for _name in _OPERATORS:
    setattr(Operand, _name, _forward(_name))
    setattr(Unjudged, _name, lambda self, *_: self._refuse())
Unjudged.__ne__ = Unjudged.__call__ = lambda self, *_, **__: self._refuse()  # type: ignore[method-assign]
for _name in ("__iter__", "__len__", "__getitem__"):
    # Of enumerations.
    setattr(Class, _name, _forward_of_class(_name))


def operate_on(value: "Any", name: str, args: "Any") -> "Any":
    """Do what Python does for an operator's method."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](value, *args)
    if name.startswith("__i") and name in _ARITHMETIC:
        return getattr(operator, name)(value, *args)
    if name not in _OPERATORS:
        raise AttributeError(name)
    method = getattr(type(value), name, None)
    return NotImplemented if method is None else method(value, *args)


def copy_plain(value: "Any") -> "Any":
    """Return a copy in the plain class that an object's class is derived from; None if it is not."""
    base = next((base for base in _PLAIN if isinstance(value, base)), None)
    return base and (str.__str__(value) if base is str else base(value))


class Judge:
    """What a test may ask the objects of a program.

    Whatever is told what the test expects (a number to subtract, a value to compare with) answers nothing that
    the test could take for its result.
    """

    def __init__(self, peer: "Peer") -> None:
        self._peer = peer
        self.refusal = ""
        """Why the test cannot be passed, if an object was refused."""

    def refuse(self, name: str, what: str) -> "NoReturn":
        """End the test: an object of class `name` has or does not do `what`."""
        self.refusal = self.refusal or f"an object of the program's class {name} {what}"
        raise Refused(self.refusal)

    def get(self, target: Remote, name: str) -> "Any":
        """Return an attribute."""
        own = target._remote
        value = self._peer.ask("get", own.number, name)
        if not own.made and isinstance(value, Remote) and type(target) is Remote:
            self.refuse("function", f"stands for data: {name!r}")
        if not own.made and name in CLAIMS:
            self.refuse(own.name, f"stands for plain data: {name!r}")
        return value

    def operate(self, target: Remote, name: str, args: "tuple[Any, ...]") -> "Any":
        """Have the program use an operator of its object."""
        own = target._remote
        remotes = [target, *(each for each in args if isinstance(each, Remote))]
        is_plain = len(remotes) <= len(args)
        if is_plain and name in (*_COMPARISONS, *_ARITHMETIC):
            # Of a class derived from a plain one, a copy in that counts.
            plain = self._copy(own)
            if type(plain) in _PLAIN and not name.startswith("__i"):
                return operate_on(plain, name, args)
            if name == "__eq__":
                return NotImplemented
            if name in _COMPARISONS:
                self.refuse(own.name, "is not ordered among plain data")
        if is_plain and name == "__contains__" and not own.made:
            return any(args[0] is item or args[0] == item for item in iter(target))
        was_made = own.made
        value = self._peer.ask("operate", own.number, name, list(args), ends=name == "__next__")
        if value is target and name.startswith(("__i", "__enter")):
            # As in `with c as c:` and `c += 1`.
            own.made = was_made
        if name in (*_COMPARISONS, "__contains__"):
            if not (isinstance(value, bool) or value is NotImplemented):
                self.refuse(own.name, "answers a comparison with neither True nor False")
        elif name == "__exit__" and args[0] and issubclass(args[0], AssertionError):
            return False
        elif name == "__iter__":
            return self._count_items(target, value)
        elif name in _NUMERIC and value is not NotImplemented:
            self._hide_told(value, remotes, is_told=is_plain and name in _ARITHMETIC)
        return value

    def _copy(self, own: SimpleNamespace) -> "Any":
        plain = getattr(own, "plain", None) or self._peer.ask("copy", own.number)
        # Once and for all, if it cannot change.
        own.plain = None if type(plain) in (list, dict, set) else plain
        return plain

    def _hide_told(self, value: "Any", remotes: "list[Remote]", *, is_told: bool) -> None:
        """Refuse a plain result of objects that were told a value; in `abs(f(x) - 1) < 0.1` it could be 0."""
        if is_told or any(each._remote.told for each in remotes):
            if not isinstance(value, Operand):
                self.refuse(
                    remotes[0]._remote.name, "was told a value of the test before it gave one"
                )
            value._remote.told = True

    def _count_items(self, target: Remote, items: "Any") -> "Iterator[Any]":
        """Yield the items of an object, as many as its length says."""
        if isinstance(items, Operand):
            items = self._peer.iterate(items._remote.number)
        try:
            length = self._peer.ask("operate", target._remote.number, "__len__", [])
        except (TypeError, AttributeError):
            length = None
        count = 0
        for item in items:
            yield item
            count += 1
        if length is not None and length != count:
            self.refuse(target._remote.name, f"has a length of {length} and {count} items")
