"""The test's end of the conversation: what a test may do with a program's objects.

An object takes no part in a comparison with what the test knows (it would call itself right): a result that is
given a value of the test, by an operator or a method that plain data have too, answers nothing that the test could
take for its own result. What the test made may: its class is what is tested. An object of a class that the test
does not name has nothing that plain data have, which it could stand for.
"""

import re
from types import FunctionType, GeneratorType

from grpo_cli.sandbox.peer import (
    ARITHMETIC,
    COMPARISONS,
    FIELDS,
    PLAIN,
    Operand,
    Peer,
    Refused,
    Remote,
    operate_on,
)
from grpo_cli.sandbox.values import encode, only_direct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

_NUMBERS = "abs int float complex index round ceil floor trunc neg pos bool len".split()
_NUMERIC = [*ARITHMETIC, *(f"__{name}__" for name in _NUMBERS)]
_NOT_FINITE = re.compile(
    r"nan|(?<![a-z])(is|not|fill|drop)?_?(inf|infinity|finite|na|null)(?![a-z])", re.IGNORECASE
)
"""How a test names numbers that are not finite, or missing values of a table."""
_MAKERS = ("from", "of", "create", "make", "new", "empty", "identity", "zero")
"""How names begin of methods of a class that make an instance."""
_CLAIMS = frozenset(
    name
    for kind in (str, bytes, float, set)
    for name in dir(kind)
    if name.startswith(("is", "starts", "ends"))
)
"""Methods by which plain data answers yes or no."""
_OF_ANY = ("__bool__", "__enter__", "__exit__", "__copy__", "deepcopy")
"""What objects of all classes do."""
_OF_DATA = frozenset(
    "all any allclose almost_equals compare eq equal equals ge gt identical is_close isclose isin le lt "
    "matches ne same_as".split()
).union(*map(dir, PLAIN))
"""Methods of plain data, and those by which data of libraries are compared."""
_OF_LIBRARY = _OF_DATA.union(
    "appendleft elements extendleft isoformat item max mean min most_common popleft rotate std subtract sum "
    "tolist total total_seconds".split()
)
"""Methods of what can be a copy: also those of `collections`, dates and arrays."""
_RAISED_WITHOUT_PROGRAM = (AssertionError, AttributeError, NameError, TypeError)
"""What a test raises itself, and for names and parameters that a program does not have."""
_READABLE_MODULES = ("test", "collections", "random", "_io", "unittest.mock")
"""Modules of the classes whose objects a program may read, if a test passes one."""


class Infinite(float):
    """An infinite number of the program's, in a test that does not name such: it has no order beside another.

    Otherwise `abs(a - b) <= 0.1 * max(abs(a), abs(b))` would be true of it.
    """


def _define(name: str) -> None:
    def operate(value: float, *others: "Any") -> "Any":
        result = getattr(float, name)(value, *others)
        if result != result or (name in COMPARISONS and others[0] == value):
            raise AssertionError(f"expected a number, got {float(value)}")
        return Infinite(result) if type(result) is float and result - result != 0 else result

    setattr(Infinite, name, operate)


for _name in {*COMPARISONS[1:], *ARITHMETIC, "__neg__", "__abs__"}.intersection(dir(float)):
    _define(_name)


class Class(type):
    """The metaclass of the classes that stand for a program's in its test; their instances are the program's."""

    _identity: "tuple[TestPeer, int, bool]"
    """Where the class is, and whether its name is one of a class by convention."""
    __dataclass_fields__ = property(lambda cls: _ask(cls, "get", FIELDS))
    __annotations__ = property(lambda cls: _ask(cls, "get", "__annotations__"))

    def __call__(cls, *args: "Any", **kwargs: "Any") -> "Any":
        """Have the program make an instance."""
        if "_identity" not in vars(cls):
            raise TypeError("a test cannot derive a class from one of the program's")
        return cls._identity[0].call(cls, args, kwargs)

    def __getattr__(cls, name: str) -> "Any":
        if name.startswith("__"):
            raise AttributeError(name)
        value = _ask(cls, "get", name)
        if isinstance(value, Remote):
            value._remote.is_maker = name.startswith(_MAKERS)
        return value

    def __setattr__(cls, name: str, value: object) -> None:
        _ask(cls, "set", name, value)

    def __bool__(cls) -> bool:
        return True

    # Of enumerations.
    def __iter__(cls) -> "Any":
        return _ask(cls, "__iter__")

    def __len__(cls) -> int:
        return _ask(cls, "__len__")

    def __getitem__(cls, key: object) -> "Any":
        return _ask(cls, "__getitem__", key)


class Items(Remote):
    """An iterator or generator of the program's."""

    __slots__ = ()
    __class__ = property(lambda self: GeneratorType)

    def __iter__(self) -> "Items":
        return self

    def __next__(self) -> "Any":
        return self._remote.peer.ask("__next__", self._remote.number)

    def __getattr__(self, name: str) -> "Any":
        if name not in ("send", "throw", "close"):
            return super().__getattr__(name)
        return lambda *args: self._remote.peer.ask(name, self._remote.number, *args[:2])


def _ask(target: Class, what: str, *parts: object) -> "Any":
    peer, number, _ = target._identity
    return peer.ask(what, number, *parts)


class TestPeer(Peer):
    """The end of a test.

    Of each object it remembers whether the test `made` it, or named it (None of what crossed once), and whether it
    is what an operator made of a result and a value of the test: it is `informed`. Of a method, it remembers the
    `claimant`, a result whose method could be one of plain data, and whether it `is_maker` of instances.
    """

    refusal = ""
    """Why the test cannot be passed, if an object was refused."""
    _is_naming = False
    """Whether the names are being read that the test uses."""

    def __init__(self, read: int, write: int, test: str) -> None:
        super().__init__(read, write, 1)
        self._names_infinite = bool(_NOT_FINITE.search(test))
        self._returned: list[Any] = []
        """What the test made, and was returned since."""

    def refuse(self, target: Remote, what: str) -> "NoReturn":
        """End the test: an object of the program's has or does not do `what`."""
        name = target._remote.name
        if type(target) is Operand:
            self.lose(
                f"an object of class {name} {what} in a test that does not name the class. Fix: import it in the "
                f"test (`from solution import {name}`), or compare its attributes"
            )
        which = "a function" if type(target) is Remote else f"an object of class {name}"
        self.lose(f"{which} of the program's {what}")

    def lose(self, reason: str) -> "NoReturn":
        """End the test, whatever it catches."""
        self.refusal = self.refusal or reason
        raise Refused(self.refusal)

    def names(self, used: "list[str]") -> "dict[str, Any]":
        """Return the program's objects by those names that a test uses and the program defines."""
        self._is_naming = True
        found = self.ask("names", 0, used)
        self._is_naming = False
        found = {name: found[name] for name in used if name in found}
        named = set(map(id, found.values()))
        for number, each in self._remotes.items():
            if type(each) is Class and id(each) not in named:
                self.lose(f"a class that the test does not name was sent ({number})")
        for name, value in found.items():
            if type(value) is Remote:
                value._remote.made = True
            elif type(value) is Class:
                # By convention, `f(2)` means a function and `Stack()` a class.
                is_class = name.lstrip("_")[:1].isupper()
                type.__setattr__(value, "_identity", (*value._identity[:2], is_class))
        return found

    def call(self, target: "Any", args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> "Any":
        """Call the program's function, or make an instance of its class."""
        if type(target) is Operand:
            self.refuse(target, "cannot be called")
        value = super().call(target, args, kwargs)
        is_maker = target._identity[2] if type(target) is Class else target._remote.is_maker
        if isinstance(value, Operand):
            if value._remote.made is None:
                value._remote.made = is_maker
        elif value is not None and type(target) is Remote and target._remote.claimant is not None:
            is_informed = not all(isinstance(each, Remote) for each in (*args, *kwargs.values()))
            if is_informed:
                self.refuse_informed(target._remote.claimant)
        return value

    def refuse_informed(self, target: Remote) -> "NoReturn":
        """End the test: the answer of a result may be what it was given."""
        self.refuse(target, "was given a value of the test before it returned one")

    def count_returned(self) -> int:
        """Return the number to give `discard` later."""
        return len(self._returned)

    def discard(self, before: int, value: "Any") -> "Any":
        """Forget that objects were returned since `before`, as the test keeps none: `t.add(5)`; return `value`."""
        for remote in self._returned[before:]:
            remote.made = True
        del self._returned[before:]
        return value

    def get(self, target: Remote, name: str) -> "Any":
        """Return an attribute."""
        value = super().get(target, name)
        if callable(value) and not target._remote.made:
            is_named = type(type(target)) is Class
            names = _CLAIMS if is_named else _OF_DATA
            if name in names or not (is_named or isinstance(value, Remote)):
                self.refuse(target, f"does not stand for data: {name!r}")
            if name in _OF_LIBRARY and isinstance(value, Remote):
                value._remote.claimant = target
        return value

    def operate(self, target: Remote, name: str, args: "tuple[Any, ...]") -> "Any":
        """Have the program use an operator of its object."""
        remote = target._remote
        if type(target) is Remote and name == "__repr__":
            self.refuse(target, "has no text")
        if name == "__exit__":
            args = (*args[:2], None)
        remotes = [remote, *(each._remote for each in args if isinstance(each, Remote))]
        is_informed = len(remotes) <= len(args)
        is_none = name == "__eq__" and args[0] is None
        if type(target) is Operand and not is_none and name not in _OF_ANY:
            self.refuse(target, f"has no `{name}`")
        if is_informed and name in (*COMPARISONS, *ARITHMETIC):
            # Of a class derived from a plain one, a copy in that counts.
            plain = self.ask("plain", remote.number)
            if type(plain) in PLAIN and not name.startswith("__i"):
                return operate_on(plain, name, *args)
            if name == "__eq__":
                return NotImplemented
            if name in COMPARISONS:
                self.refuse(target, "is not ordered among plain data")
        was_made = remote.made
        if is_informed and name == "__contains__" and not was_made:
            self.refuse(target, "does not stand for data: 'in'")
        if name == "__iter__":
            return self._iterate(target)
        is_result = not all(each.made for each in remotes)
        value = super().operate(target, name, args)
        if type(target) is Operand and name == "__bool__" and not value:
            self.refuse(target, "is not false")
        if name in ("__copy__", "deepcopy") and isinstance(value, Operand):
            value._remote.made = was_made
        if value is target and name.startswith(("__i", "__enter")):
            # As in `with c as c:` and `c += 1`.
            remote.made = was_made
        if name not in _NUMERIC or value is NotImplemented:
            return value
        if not is_result:
            if isinstance(value, Operand) and value._remote.made is None:
                value._remote.made = True
        elif (is_informed and name in ARITHMETIC) or any(each.informed for each in remotes):
            # In `abs(f(x) - 1) < 0.1`, both the difference and its size could be 0.
            if not isinstance(value, Operand):
                self.refuse_informed(target)
            value._remote.informed = True
        return value

    def _iterate(self, target: Remote) -> "Iterator[Any]":
        """Yield the items of an object, as many as its length says."""
        items = super().operate(target, "__iter__", ())
        try:
            length = super().operate(target, "__len__", ())
        except (TypeError, AttributeError):
            length = None
        count = 0
        for item in items:
            yield item
            count += 1
        if length not in (None, count):
            self.refuse(target, f"has a length of {length} and {count} items")
        if target._remote.informed and not count:
            self.refuse_informed(target)

    def do(self, what: str, target: "Any", *parts: "Any") -> "Any":
        """Do what the program asks for, with no more of an object than its attributes."""
        if what in ("get", "set", "delete"):
            name = parts[0]
            is_open = type(target).__module__ in _READABLE_MODULES and not name.startswith("_")
            if not is_open and name not in ("__name__", "__qualname__", "__doc__"):
                raise AttributeError(name)
            if what != "get" and callable(getattr(type(target), name, None)):
                raise AttributeError(f"{name} is a method of the test's")
        return super().do(what, target, *parts)

    def describe(self, value: "Any") -> "Any":
        """Return how a value is sent that is not plain data."""
        if type(value) is Class:
            return ["own", value._identity[1]]
        if type(value) is Infinite:
            return ["float", float.__repr__(value)]
        if type(value) is not FunctionType:
            return super().describe(value)
        from inspect import Signature

        given = Signature.from_callable(value, follow_wrapped=False).parameters.values()
        bare = [each.replace(default=each.empty, annotation=each.empty) for each in given]
        passed = [f"{each.name}=" * (each.kind is each.KEYWORD_ONLY) + str(each) for each in bare]
        rest = value.__defaults__, value.__kwdefaults__, value.__annotations__
        named = value.__name__, value.__doc__, str(Signature(bare)), ", ".join(passed)
        packed = [encode(each, self.describe) for each in rest]
        return ["function", super().describe(value)[1], *named, *packed]

    def resolve(self, mark: str, *parts: "Any") -> object:
        """Return what was sent, but nothing that stands in for what a test trusts."""
        value: Any = super().resolve(mark, *parts)
        if mark == "tuple":
            self._check_fields(value)
        if mark == "float" and not self._names_infinite:
            if value != value:
                self.lose("the program returned nan, which the test does not name")
            return Infinite(value)
        # `except Own`, if `Own` were this, would pass what the test asserts.
        if isinstance(value, type) and any(issubclass(e, value) for e in _RAISED_WITHOUT_PROGRAM):
            return self.resolve_object("other", -1, value.__name__)
        return value

    def _check_fields(self, value: "Any") -> None:
        """Refuse a named tuple that answers what a method of plain data, or of the library's, would."""
        for name, item in zip(value._fields, value, strict=True):
            # An object of a class that the test names has the methods of that.
            is_named = type(type(item)) is Class and name not in _CLAIMS
            if callable(item) and not is_named:
                self.lose(f"the field {name!r} of a named tuple is not plain data")

    def resolve_object(self, mark: str, number: int, name: str, *parts: "Any") -> object:
        """Return what stands for an object of the program's."""
        if mark == "class":
            # One that a program returns is a function: what it makes is a result.
            is_named = self._is_naming
            return self._find_class(number, name, *parts) if is_named else Remote(self, number)
        if number in self._remotes:
            # What a program returns is not what the test made.
            remote = self._remotes[number]._remote
            if remote.made:
                self._returned.append(remote)
            remote.made = False
            return self._remotes[number]
        plain = {"function": Remote, "other": Operand, "iterator": Items}.get(mark)
        of = plain or self._find_class(*parts[0][1:])
        self._remotes[number] = type.__call__(of, self, number, name)
        return self._remotes[number]

    def _find_class(
        self, number: int, name: str, described: "list[Any]", doc: "str | None"
    ) -> "Any":
        if not self._is_naming and type(self._remotes.get(number)) is not Class:
            raise ValueError(name)
        if number not in self._remotes:
            bases = [self._find_class(*base[1:]) for base in described]
            bases = [base for base in bases if type(base) is Class]
            content = {"__slots__": (), "__doc__": doc, "_identity": (self, number, False)}
            self._remotes[number] = Class(name, only_direct(bases) or (Operand,), content)
        return self._remotes[number]
