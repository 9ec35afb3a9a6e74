"""Arguments of the command line of a Python script."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_cli.convert.script_calls import Arguments, Calls
from grpo_cli.convert.script_values import (
    MISSING,
    Class,
    Literal,
    Object,
    Value,
    default_of,
    literal,
    plain,
    root_of,
)
from grpo_cli.issues import Location
from grpo_cli.recipe.yaml_tree import read_scalar

_PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")


class CommandLine(Calls):
    """Evaluates calls of parsers; the arguments may be known."""

    def __init__(
        self, flags: Mapping[str, Any] | None, places: Mapping[str, Location] | None = None
    ) -> None:
        super().__init__()
        self.flags = dict(flags or {})
        self.places = places or {}
        """Where the arguments of the command line are written."""
        self._knows_flags = flags is not None
        self.used: set[str] = set()
        """Arguments of the command line that the script has."""
        self.own: set[str] = set()
        """Those that it defines itself."""

    def parse(self, node: ast.AST, parser: Object, name: str, args: Arguments) -> Value | None:
        """Return what a parser of the command line returns, if this is one."""
        kind = parser.last_name
        if name in ("parse_args", "parse_known_args") and kind.endswith("ArgumentParser"):
            parsed = Object(node, name="arguments", args={}, owner=parser)
            parsed.attrs = dict(self._list_arguments(parser))
            return parsed if name == "parse_args" else Literal(node, (parsed, Object(node)))
        if kind in _PARSERS and name.startswith("parse_"):
            listed = (parser.args or {}).get("0") or (parser.args or {}).get("dataclass_types")
            types = self.items_of(listed) if isinstance(listed, Literal) else [listed]
            made = [self._parse_class(node, each, parser) for each in types or () if each]
            return Literal(node, tuple(made))
        return None

    def _list_arguments(self, parser: Object) -> Iterator[tuple[str, Value]]:
        """Yield the name of each `add_argument`, with the value that the command line gives it."""
        calls = [made for made in self.made if made.owner is not None and root_of(made) is parser]
        presets = [made.args or {} for made in calls if made.name == "set_defaults"]
        added = [(_name_argument(made), made) for made in calls if made.name == "add_argument"]
        for name, made in [pair for pair in added if pair[0]]:
            args = made.args or {}
            action = plain(args.get("action"))
            default = args.get("default")
            if default is None and action in ("store_true", "store_false"):
                default = literal(made.node, action == "store_false")
            for preset in presets:
                default = preset.get(name, default)
            kind = args.get("type")
            kind_name = kind.name if isinstance(kind, Object) else ""
            texts = [plain(each) for each in args.values()]
            written = next((each for each in texts if str(each).startswith("--")), f"--{name}")
            yield name, self._argument(made.node, name, default, kind_name, written)

    def _argument(
        self, node: ast.AST, name: str, default: Value | None, kind: str = "", written: str = ""
    ) -> Value:
        flag = self.flags.get(name, MISSING)
        self.used.add(name)
        is_unset = name in self.flags and flag is MISSING
        if flag is not MISSING:
            self.own.add(name)
            return literal(self._mark(node, name), str(flag) if kind == "str" else flag)
        value = default_of(default)
        if isinstance(value, str) and kind in ("int", "float"):
            value = read_scalar(value)
        if self._knows_flags and value is not MISSING and not is_unset:
            return literal(node, value)
        parts = (default if default is not None else Object(node),)
        return Object(node, name=written or f"--{name}", parts=parts, default=value)

    def _mark(self, node: ast.AST, name: str) -> ast.AST:
        """Return the code of an argument of the command line, with the place where it is written."""
        marked = ast.copy_location(ast.Name(f"--{name}"), node)
        marked.place = self.places.get(name)  # type: ignore[attr-defined]
        return marked if name in self.places else node

    def _parse_class(self, node: ast.AST, kind: Value, parser: Object) -> Value:
        """Return an instance of a dataclass whose fields the command line gives."""
        flags: Arguments = {
            name: Object(self._mark(node, name), name=f"--{name}")
            if value is MISSING
            else literal(self._mark(node, name), value)
            for name, value in self.flags.items()
            if not (name.startswith("no_") and name[3:] in self.flags)
        }
        if not self._knows_flags:
            flags["**"] = Object(node, name="flags", parts=(parser,))
        base = kind.outside_base if isinstance(kind, Class) else kind
        self.used |= self.flags.keys() if base is not None else set()
        if not isinstance(kind, Class):
            return self.make(node, kind.name if isinstance(kind, Object) else "", flags)
        instance = Object(node, name=kind.name, cls=kind, parts=(parser,), depth=len(self._undo))
        for cls in reversed(kind.ancestry()):
            for name in cls.fields if isinstance(cls, Class) else ():
                pair = kind.find(name)
                default = self.default_of_field(pair[1]) if pair else None
                instance.attrs[name] = self._argument(node, name, default)
        if isinstance(base, Object):
            return self.build(instance, base, {**instance.attrs, **flags})
        return instance


def _name_argument(made: Object) -> str:
    """Return the name of the value that `add_argument` adds; empty if it is not known."""
    args = made.args or {}
    flags = [plain(args[key]) for key in args if key.isdigit()]
    texts = [flag for flag in flags if isinstance(flag, str)]
    long = next((flag for flag in texts if flag.startswith("--")), "".join(texts[:1]))
    dest = plain(args.get("dest"))
    return dest if isinstance(dest, str) else long.lstrip("-").replace("-", "_")
