"""Values of the expressions of a Python script: literals, functions, and what other packages make."""

import ast
import builtins
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

MISSING: Final[Any] = object()
"""Stands for no value, as None is one."""
_SYMBOLS = {
    **{f"torch.{name}": name for name in ("float32", "bfloat16", "float16", "half", "float")},
    "peft.TaskType.CAUSAL_LM": "CAUSAL_LM",
}
"""Attributes that a config names by a text."""
_WIDE = re.compile(r"\d{5}")
"""A width of a format that makes long text."""
_MOST_OPTIONS = 8
"""Most values of a choice that are kept apart."""
_LONGEST = 20_000
"""Characters, items or bits above which a value is not computed."""


@dataclass(eq=False)
class Value:
    """What an expression stands for; `node` is where it was written."""

    node: ast.AST


@dataclass(eq=False)
class Known(Value):
    """A scalar, or a list, tuple, set or dict of values."""

    data: Any
    is_open: bool = False
    """Whether the script adds items that cannot be told."""


@dataclass(eq=False)
class Object(Value):
    """Something that another package makes or gives, an instance of a class of the script, or unknown."""

    name: str = ""
    """Dotted name of an import, or of the function that is called; of a method, attribute or item its own."""
    owner: Value | None = None
    """Whose method, attribute or item it is."""
    args: dict[str, Value] | None = None
    """Of a call; arguments without a name have their position, `*` and `**` are those that cannot be told."""
    cls: "Class | None" = None
    attrs: dict[Any, Value] = field(default_factory=dict)
    parts: tuple[Value, ...] = ()
    """What it is computed from."""
    default: Any = MISSING
    """Its plain value if nobody gives another, as on the command line."""
    condition: str = ""
    """The branch of the script that a call is in."""
    branches: tuple[tuple[int, int], ...] = ()

    @property
    def last_name(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def is_call(self) -> bool:
        """Whether it is the result of a call."""
        return self.args is not None

    @property
    def is_import(self) -> bool:
        """Whether it is a name that the script does not define."""
        return self.args is None and self.owner is None and bool(self.name) and not self.parts


@dataclass(eq=False)
class Choice(Value):
    """One of several values, as a condition decides."""

    options: tuple[tuple[str, Value], ...]
    default: Any = MISSING


@dataclass(eq=False)
class Frame:
    """The names of a module, a class or a call of a function."""

    names: dict[str, Value]
    parent: "Frame | None" = None
    function: "Function | None" = None
    globals: set[str] = field(default_factory=set)
    returns: list[tuple[str, Value]] = field(default_factory=list)


@dataclass(eq=False)
class Function(Value):
    """A function of the script, or a partial call of anything."""

    frame: Frame | None = None
    target: Value | None = None
    """What `functools.partial` calls."""
    positional: tuple[Value, ...] = ()
    """First arguments, such as `self`."""
    keywords: dict[str, Value] = field(default_factory=dict)
    cls: "Class | None" = None
    """The class that defines it."""


@dataclass(eq=False)
class Class(Value):
    """A class of the script."""

    name: str
    bases: list[Value]
    attrs: dict[str, Value]
    fields: list[str] = field(default_factory=list)
    """Annotated names, in their order."""

    def ancestry(self) -> list[Value]:
        """Return the class and its bases, without repeats."""
        line: list[Value] = []
        queue: list[Value] = [self]
        while queue:
            cls = queue.pop(0)
            if cls not in line:
                line.append(cls)
                queue += cls.bases if isinstance(cls, Class) else []
        return line

    @property
    def outside_base(self) -> Object | None:
        """The first base that the script does not define."""
        return next((base for base in self.ancestry() if isinstance(base, Object)), None)

    def find(self, name: str) -> "tuple[Class, Value] | None":
        """Return an attribute with the class that defines it, or None."""
        for cls in self.ancestry():
            if isinstance(cls, Class) and name in cls.attrs:
                return cls, cls.attrs[name]
        return None


def plain(value: Value | None) -> Any:
    """Return a value that is known as a whole as plain Python, or MISSING."""
    match value:
        case Known(is_open=True):
            return MISSING
        case Known(data=list() | tuple() | set() as items):
            values = [plain(item) for item in items]
            return MISSING if MISSING in values else type(items)(values)
        case Known(data=dict() as items):
            values = [plain(item) for item in items.values()]
            return MISSING if MISSING in values else dict(zip(items, values, strict=True))
        case Known(data=data):
            return data
        case Object(is_import=True, name=name):
            return _SYMBOLS.get(name, MISSING)
    return MISSING


def default_of(value: Value | None) -> Any:
    """Return the plain value that something has unless somebody gives another, or MISSING."""
    if isinstance(value, Object | Choice) and value.default is not MISSING:
        return value.default
    if isinstance(value, Known) and isinstance(value.data, list | tuple) and not value.is_open:
        values = [default_of(item) for item in value.data]
        return MISSING if MISSING in values else type(value.data)(values)
    if isinstance(value, Known) and isinstance(value.data, dict) and not value.is_open:
        values = [default_of(item) for item in value.data.values()]
        return MISSING if MISSING in values else dict(zip(value.data, values, strict=True))
    return plain(value)


def known(node: ast.AST, data: Any) -> Known:
    """Return plain Python as a value."""
    if isinstance(data, list | tuple | set):
        return Known(node, type(data)(known(node, item) for item in data))
    if isinstance(data, dict):
        return Known(node, {key: known(node, item) for key, item in data.items()})
    return Known(node, data)


def unset(node: ast.AST) -> Object:
    """Return what stands for a name that has no value in a branch."""
    return Object(node, name="unset", parts=(Object(node),))


def root_of(value: Value) -> Value:
    """Return the object that a chain of attributes, items and methods begins with."""
    while isinstance(value, Object) and value.owner is not None:
        value = value.owner
    return value


def parts_of(value: Value) -> Iterator[Value]:
    """Yield the values that a value directly consists of or is computed from."""
    match value:
        case Known(data=dict() as items):
            yield from items.values()
        case Known(data=list() | tuple() | set() as items):
            yield from items
        case Choice(options=options):
            yield from (option for _, option in options)
        case Object():
            yield from filter(None, (value.owner,))
            yield from (value.args or {}).values()
            yield from value.parts
        case Function(target=Value() as target):
            yield target
            yield from value.positional
            yield from value.keywords.values()


def reachable(value: Value) -> Iterator[Value]:
    """Yield a value and all that it is computed from, each once, the nearest first."""
    queue, seen = [value], {id(value)}
    while queue:
        current = queue.pop(0)
        yield current
        for part in parts_of(current):
            if id(part) not in seen:
                seen.add(id(part))
                queue.append(part)


def is_same(first: Value | None, second: Value | None) -> bool:
    """Return whether two values are certainly the same."""
    if first is second:
        return True
    if isinstance(first, Object) and isinstance(second, Object):
        if first.name == second.name == "unset":
            return True
        if first.node is second.node and first.parts and first.args is second.args is None:
            pairs = zip(first.parts, second.parts, strict=False)
            return first.name == second.name and all(is_same(*pair) for pair in pairs)
    values = plain(first), plain(second)
    return MISSING not in values and repr(values[0]) == repr(values[1])


def choose(node: ast.AST, options: list[tuple[str, Value]], default: Any = MISSING) -> Value:
    """Return one of several values; the value itself if all are the same."""
    flat = [
        pair
        for condition, option in options
        for pair in (option.options if isinstance(option, Choice) else ((condition, option),))
    ]
    flat = [*{id(option): (condition, option) for condition, option in flat}.values()]
    unlike: list[tuple[str, Value]] = []
    for pair in flat[: 4 * _MOST_OPTIONS]:
        if not any(is_same(pair[1], other) for _, other in unlike):
            unlike.append(pair)
    if len(unlike) > _MOST_OPTIONS:
        return Object(node, parts=tuple(option for _, option in unlike), default=default)
    return unlike[0][1] if len(unlike) == 1 else Choice(node, tuple(unlike), default)


def code_of(node: ast.AST, longest: int = 60) -> str:
    """Return code on one line, cut if it is long."""
    try:
        code = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError, AttributeError):
        code = type(node).__name__
    return code if len(code) <= longest else f"{code[: longest - 3]}…"


def negate(condition: str) -> str:
    """Return the code of the opposite condition."""
    if condition.startswith("not ") and " and " not in condition and " or " not in condition:
        return condition.removeprefix("not ")
    return f"not ({condition})" if " " in condition else f"not {condition}"


def line_of(node: ast.AST) -> int:
    """Return the line of an expression; of a call, that of the function's own name, as in a chain."""
    if isinstance(node, ast.Call):
        return node.func.end_lineno or node.lineno
    return int(getattr(node, "lineno", 1))


def _size(data: Any) -> int:
    if isinstance(data, int) and not isinstance(data, bool):
        return data.bit_length() * 50
    return len(str(data)) if isinstance(data, str | bytes | list | dict | tuple | set) else 0


def compute(function: Callable[..., Any], values: list[Any]) -> Any:
    """Return what a pure function makes of plain values, or MISSING if it fails or is too large."""
    if MISSING in values or sum(map(_size, values)) > _LONGEST:
        return MISSING
    try:
        result = function(*values)
        return result if _size(result) <= _LONGEST else MISSING
    except Exception:  # of the script's own code: it would fail there too
        return MISSING


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > 64 or abs(base) > 1e6:
        raise ValueError
    return base**exponent


def _multiply(first: Any, second: Any) -> Any:
    sizes = [len(each) if hasattr(each, "__len__") else each for each in (first, second)]
    if any(hasattr(each, "__len__") for each in (first, second)) and sizes[0] * sizes[1] > _LONGEST:
        raise ValueError
    return first * second


def _divide(first: Any, second: Any) -> Any:
    # Paths are kept as text.
    return f"{first.rstrip('/')}/{second}" if isinstance(first, str) else first / second


def _modulo(first: Any, second: Any) -> Any:
    if isinstance(first, str) and _WIDE.search(first):
        raise ValueError
    return first % second


OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: lambda first, second: first + second,
    ast.Sub: lambda first, second: first - second,
    ast.Mult: _multiply,
    ast.Div: _divide,
    ast.FloorDiv: lambda first, second: first // second,
    ast.Mod: _modulo,
    ast.Pow: _power,
    ast.BitOr: lambda first, second: first | second,
    ast.BitAnd: lambda first, second: first & second,
    ast.USub: lambda value: -value,
    ast.UAdd: lambda value: +value,
    ast.Not: lambda value: not value,
    ast.Invert: lambda value: ~value,
    ast.Eq: lambda first, second: first == second,
    ast.NotEq: lambda first, second: first != second,
    ast.Lt: lambda first, second: first < second,
    ast.LtE: lambda first, second: first <= second,
    ast.Gt: lambda first, second: first > second,
    ast.GtE: lambda first, second: first >= second,
    ast.Is: lambda first, second: first is second or first == second,
    ast.IsNot: lambda first, second: not (first is second or first == second),
    ast.In: lambda first, second: first in second,
    ast.NotIn: lambda first, second: first not in second,
}
"""Operators on plain values, bounded in the size of the result."""


def _range(*bounds: int) -> list[int]:
    numbers = range(*bounds)
    if len(numbers) > _LONGEST:
        raise ValueError
    return list(numbers)


def _join(*parts: str) -> str:
    return "/".join(part.rstrip("/") for part in parts if part)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(builtins, name)
        for name in "int float str bool len max min sum abs round sorted list tuple set".split()
    },
    "range": _range,
    "zip": lambda *lists: [*zip(*lists, strict=False)],
    "enumerate": lambda items, start=0: [*enumerate(items, start)],
    "reversed": lambda items: [*reversed(items)],
    "os.path.join": _join,
    "pathlib.Path": _join,
    "os.path.expanduser": str,
    "os.path.basename": lambda path: path.rpartition("/")[2],
    "os.path.dirname": lambda path: path.rpartition("/")[0],
    "textwrap.dedent": textwrap.dedent,
}
"""Pure functions that are computed on plain values."""
METHODS = frozenset(
    """strip lstrip rstrip lower upper title capitalize split rsplit splitlines join removeprefix
    removesuffix partition rpartition startswith endswith replace format get index count isdigit""".split()
)
"""Pure methods of text, lists and mappings."""


def call_method(owner: Any, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
    """Return what a pure method of a plain value returns."""
    if name == "format" and _WIDE.search(str(owner)):
        raise ValueError
    if name in ("replace", "join") and len(str(owner)) * len(str(args)) > 50 * _LONGEST:
        raise ValueError
    return getattr(owner, name)(*args, **keywords)


def change_items(
    owner: Known, name: str, positional: list[Value], keywords: dict[str, Value]
) -> tuple[Any, Value | None] | None:
    """Return the items of a list or mapping after a method that changes it, and its result; None for another."""
    first = positional[0] if positional else None
    match owner.data, name:
        case list() as items, "append" if first is not None:
            return [*items, first], None
        case list() as items, "insert" if len(positional) == 2:
            index = plain(positional[0])
            at = index if isinstance(index, int) else 0
            return [*items[:at], positional[1], *items[at:]], None
        case list() as items, "extend" if isinstance(first, Known) and isinstance(
            first.data, list | tuple
        ):
            return [*items, *first.data], None
        case dict() as items, "update":
            more = first.data if isinstance(first, Known) and isinstance(first.data, dict) else None
            if first is not None and (more is None or first.is_open):  # type: ignore[attr-defined]
                return None, None
            new = {key: value for key, value in keywords.items() if key != "**"}
            return (None if "**" in keywords else {**items, **(more or {}), **new}), None
        case dict() as items, "setdefault" if len(positional) == 2 and isinstance(
            plain(first), str
        ):
            key = plain(first)
            return {key: positional[1], **items}, items.get(key, positional[1])
        case dict() as items, "pop" if positional and isinstance(key := plain(first), str):
            if key in items:
                return {name: value for name, value in items.items() if name != key}, items[key]
        case list() | dict(), (
            "append"
            | "extend"
            | "insert"
            | "remove"
            | "pop"
            | "clear"
            | "sort"
            | "reverse"
            | "popitem"
            | "setdefault"
        ):
            return None, None
    return None
