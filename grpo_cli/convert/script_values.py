"""Values of expressions in a Python script: literals, calls with their arguments, and what is not known."""

import ast
import builtins
import operator
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from grpo_cli.convert.key_report import read_words

NAMES = read_words("script-names")
"""Names in Python scripts, by what they are."""
MISSING: Final[Any] = object()
"""Stands for the absence of a value, since None is a value."""
_SYMBOLS = {
    **{f"torch.{name}": name for name in ("float32", "bfloat16", "float16", "half", "float")},
    "peft.TaskType.CAUSAL_LM": "CAUSAL_LM",
}
"""Attributes of other packages that a config writes as text."""
_LARGEST = 100_000
"""Characters, items or bits of a value that is computed."""
_EVENTS = ("without an error", "after an error", "in the loop of")
"""Beginnings of conditions that are not code."""
_MOST_OPTIONS = 8


@dataclass(eq=False)
class Value:
    """The value of an expression; `node` is where it is written."""

    node: ast.AST


@dataclass(eq=False)
class Literal(Value):
    """A scalar, or a list, tuple, set or dict of values."""

    data: Any
    rest: tuple[Value, ...] = ()
    """What may have or change further items, such as unknown values of `**` and of `update`."""

    @property
    def is_complete(self) -> bool:
        """Whether it has these items and no others."""
        return not self.rest

    @staticmethod
    def of(node: ast.AST, data: Any) -> "Literal":
        """Return plain Python as a value."""
        if isinstance(data, list | tuple | set):
            return Literal(node, type(data)(Literal.of(node, item) for item in data))
        if isinstance(data, dict):
            return Literal(node, {key: Literal.of(node, item) for key, item in data.items()})
        return Literal(node, data)


@dataclass(eq=False)
class Object(Value):
    """A call or a name of another package, an instance of a class of the script, or an unknown value."""

    name: str = ""
    """Dotted name of an import, or of the function that is called; of an attribute or item, its own."""
    owner: Value | None = None
    """The value whose method, attribute or item this is."""
    args: dict[str, Value] | None = None
    """Of a call. Positional arguments have their index as name; `*` and `**` are unknown ones."""
    cls: "Class | None" = None
    attrs: dict[Any, Value] = field(default_factory=dict)
    parts: tuple[Value, ...] = ()
    """The values that this one is computed from."""
    default: Any = MISSING
    """Its plain value unless the command line gives another."""
    condition: str = ""
    """The condition under which a call happens."""
    depth: int = 0
    """The number of branches inside which it was made."""

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
class Choice(Object):
    """One of several values, each with its condition; its parts are the values."""

    options: tuple[tuple[str, Value], ...] = ()

    @staticmethod
    def of(node: ast.AST, options: Sequence[tuple[str, Value]]) -> Value:
        """Return one of several values; the value itself if all are the same."""
        if all(option is options[0][1] for _, option in options):
            return options[0][1]
        flat = [
            pair
            for condition, option in options
            for test, each in (option.options if isinstance(option, Choice) else (("", option),))
            for pair in ((_join_tests(condition, test), each),)
        ]
        unlike: list[tuple[str, Value]] = []
        for pair in flat[: 4 * _MOST_OPTIONS]:
            if not any(_is_same(pair[1], other) for _, other in unlike):
                unlike.append(pair)
        if len(unlike) > _MOST_OPTIONS:
            return Object(node, parts=tuple(option for _, option in unlike))
        values = tuple(option for _, option in unlike)
        return values[0] if len(values) == 1 else Choice(node, parts=values, options=tuple(unlike))

    @staticmethod
    def merge(node: ast.AST, options: Sequence[tuple[str, dict[Any, Value]]]) -> dict[Any, Value]:
        """Return the items of mappings of which one holds; what one of them lacks is not set there."""
        names = dict.fromkeys(name for _, data in options for name in data)
        return {
            name: Choice.of(
                node, [(test, data.get(name) or Choice.unset(node)) for test, data in options]
            )
            for name in names
        }

    @staticmethod
    def unset(node: ast.AST) -> Object:
        """Return the value of a name that has none in a branch."""
        return Object(node, name="unset", parts=(Object(node),))

    @staticmethod
    def is_unset(value: Value) -> bool:
        """Return whether a value is that of a name that has none."""
        return isinstance(value, Object) and value.name == "unset"

    @staticmethod
    def only(value: Value) -> Value:
        """Return the one option of a choice that has attributes: None and a name without a value have none."""
        parts = value.parts if isinstance(value, Choice) else ()
        kept = [each for each in parts if not Choice.is_unset(each) and plain(each) is not None]
        return kept[0] if len(kept) == 1 else value

    @staticmethod
    def fill(value: Value, default: Value | None) -> Value:
        """Return a value with a default where it is not set."""
        if not isinstance(value, Choice) or default is None:
            return value
        pairs = [
            (test, default if getattr(option, "name", "") == "unset" else option)
            for test, option in value.options
        ]
        return Choice.of(value.node, pairs)


@dataclass(eq=False)
class Frame:
    """The names of a module, a class or a call of a function."""

    names: dict[str, Value]
    parent: "Frame | None" = None
    function: "Function | None" = None
    globals: set[str] = field(default_factory=set)
    returns: list[tuple[str, Value]] = field(default_factory=list)
    yields: list[tuple[str, Value]] = field(default_factory=list)


@dataclass(eq=False)
class Function(Value):
    """A function of the script, or a partial call of anything."""

    frame: Frame | None = None
    target: Value | None = None
    """The function that `functools.partial` calls."""
    positional: tuple[Value, ...] = ()
    """Its first arguments, such as `self`."""
    keywords: dict[str, Value] = field(default_factory=dict)
    cls: "Class | None" = None
    """The class that defines it."""

    @property
    def name(self) -> str:
        """Its name; empty for a lambda."""
        return str(getattr(self.node, "name", ""))


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


def plain(value: Value | None, of: Callable[[Any], Any] | None = None) -> Any:
    """Return a value that is known as a whole as plain Python, or MISSING; `of` reads what it holds."""
    of = of or plain
    match value:
        case Literal(is_complete=False):
            return MISSING
        case Literal(data=list() | tuple() | set() as items):
            values = [of(item) for item in items]
            return MISSING if MISSING in values else type(items)(values)
        case Literal(data=dict() as items):
            values = [of(item) for item in items.values()]
            return MISSING if MISSING in values else dict(zip(items, values, strict=True))
        case Literal(data=data):
            return data
        case Object(is_import=True, name=name):
            return _SYMBOLS.get(name, MISSING)
    return MISSING


def default_of(value: Value | None) -> Any:
    """Return the plain value that holds unless the command line gives another, or MISSING."""
    if isinstance(value, Object) and value.default is not MISSING:
        return value.default
    return plain(value, default_of)


def rest_of(value: Value | None) -> tuple[Value, ...]:
    """Return the unknown values that one argument for `*` or `**` holds."""
    if value is None:
        return ()
    return value.rest if isinstance(value, Literal) and value.rest else (value,)


def root_of(value: Value | None) -> Value | None:
    """Return the object that a chain of attributes, items and methods begins with."""
    while isinstance(value, Object):
        if isinstance(value, Choice):
            objects = [each for each in value.parts if isinstance(each, Object)]
            value = next((each for each in objects if each.name != "unset"), None)
        elif value.owner is None:
            return value
        else:
            value = value.owner
    return value


def parts_of(value: Value) -> Iterator[Value]:
    """Yield the values that a value directly consists of or is computed from."""
    match value:
        case Literal(data=dict() as items, rest=rest):
            yield from (*items.values(), *rest)
        case Literal(data=list() | tuple() | set() as items, rest=rest):
            yield from (*items, *rest)
        case Object():
            yield from filter(None, (value.owner,))
            yield from (value.args or {}).values()
            yield from value.parts
        case Function(target=Value() as target):
            yield target
            yield from value.positional
            yield from value.keywords.values()


def reachable(value: Value | None) -> list[Value]:
    """Return a value and all that it is computed from, each once, the nearest first."""
    queue = [value] if value is not None else []
    seen = {id(each) for each in queue}
    for current in queue:
        for part in parts_of(current):
            if id(part) not in seen:
                seen.add(id(part))
                queue.append(part)
    return queue


def _is_same(first: Value, second: Value) -> bool:
    """Return whether two values are certainly the same."""
    if first is second:
        return True
    if isinstance(first, Object) and isinstance(second, Object):
        same_place = first.node is second.node and not (first.is_call or second.is_call)
        return first.name == second.name and (first.name == "unset" or same_place)
    values = plain(first), plain(second)
    return MISSING not in values and repr(values[0]) == repr(values[1])


def _join_tests(outer: str, inner: str) -> str:
    """Return the condition of a branch inside another; the inner one if they are not both code."""
    is_code = all(test and not test.startswith(_EVENTS) for test in (outer, inner))
    return f"{outer} and {inner}" if is_code else inner or outer


def code_of(node: ast.AST, longest: int = 60) -> str:
    """Return code on one line, cut if it is long."""
    try:
        code = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError, AttributeError):
        code = type(node).__name__
    return code if len(code) <= longest else f"{code[: longest - 3]}…"


def describe_test(condition: str) -> str:
    """Return a condition as part of a sentence."""
    event = next((each for each in _EVENTS if each in condition), "")
    before, found, after = condition.partition(event) if event else (condition, "", "")
    when, _, rest = after.partition(" and ")
    tests = [f"if `{each}`" for each in (before.removesuffix(" and "), rest) if each]
    return ", ".join(filter(None, (f"{found}{when}", *tests)))


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


def compute(function: Callable[..., Any], values: list[Any]) -> Any:
    """Return the result of a pure function of plain values, or MISSING if it fails or is too large."""
    try:
        result = MISSING if MISSING in values else function(*values)
        size = result.bit_length() if isinstance(result, int) else 0
        size = len(result) if hasattr(result, "__len__") else size
    except Exception:  # of the script's own code: it would fail there too
        return MISSING
    return result if size <= _LARGEST else MISSING


def _power(base: Any, exponent: Any) -> Any:
    return base**exponent if abs(exponent) <= 64 and abs(base) <= 1e6 else MISSING


def _multiply(first: Any, second: Any) -> Any:
    is_text = hasattr(first, "__len__") or hasattr(second, "__len__")
    return MISSING if is_text else first * second


def _divide(first: Any, second: Any) -> Any:
    # Paths are kept as text.
    return f"{first.rstrip('/')}/{second}" if isinstance(first, str) else first / second


_NAMES = """Add:add Sub:sub Mod:mod FloorDiv:floordiv BitOr:or_ BitAnd:and_ USub:neg UAdd:pos Not:not_
Invert:invert Eq:eq NotEq:ne Lt:lt LtE:le Gt:gt GtE:ge Is:eq IsNot:ne"""
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    **{
        getattr(ast, name): getattr(operator, function)
        for name, function in (pair.split(":") for pair in _NAMES.split())
    },
    ast.Mult: _multiply,
    ast.Div: _divide,
    ast.Pow: _power,
    ast.In: lambda first, second: first in second,
    ast.NotIn: lambda first, second: first not in second,
}
"""Operators on plain values, bounded in the size of the result."""


def _range(*bounds: int) -> Any:
    return list(range(*bounds)) if len(range(*bounds)) <= 20_000 else MISSING


def _join(*parts: str) -> str:
    return "/".join(part.rstrip("/") for part in parts if part)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in NAMES["functions"]},
    "range": _range,
    "os.path.join": _join,
    "pathlib.Path": _join,
    "textwrap.dedent": textwrap.dedent,
}
"""Pure functions that are computed on plain values."""
