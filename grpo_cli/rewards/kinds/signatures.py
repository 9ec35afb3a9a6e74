"""What a user's reward function asks for, read from its source without running it.

Owns finding the file and the `def`. Importing and calling the function is for `own.py`.
"""

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_cli.errors import nearest

TRL_PARAMETERS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)
"""What TRL passes to every reward function beside the dataset's columns.

Source: `GRPOTrainer._calculate_rewards` (TRL 1.16).
"""

_CHANGES = frozenset(
    "add append appendleft clear discard extend insert pop popitem popleft remove setdefault update".split()
)
"""Methods that change a container."""


@dataclass(frozen=True)
class Signature:
    """The parameters of a reward function."""

    required: tuple[str, ...] = ()
    """Parameters without a default."""
    optional: tuple[str, ...] = ()
    """Parameters with a default."""
    positional_only: tuple[str, ...] = ()
    """Parameters that cannot be passed by name, as TRL passes them all."""
    takes_any: bool = True
    """There is a `**kwargs`."""
    is_async: bool = False
    """It is an `async def`."""

    def accepts(self, name: str) -> bool:
        """Whether the function takes an argument of this name."""
        return self.takes_any or name in self.required or name in self.optional


class SourceError(Exception):
    """The function cannot be found in its source; holds the message and the fix."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


def is_file(source: str) -> bool:
    """Whether the part before the last colon names a file and not a module."""
    return source.endswith(".py") or "/" in source or "\\" in source


def read_signature(source: str, function: str) -> Signature | None:
    """Reads a function's signature without importing anything.

    Args:
        source: A file's path, or a module's dotted name.
        function: The function's name.

    Returns:
        The signature; None where the function is there but not as a plain `def`, or where the
        module's source cannot be found without importing its parents.

    Raises:
        SourceError: The file, module or function does not exist, or the source does not parse.
    """
    path = Path(source) if is_file(source) else module_file(source)
    if path is None:
        return None
    body = _parse(path).body
    found = [node for node in _definitions(body) if function in _names(node)]
    if not found:
        _refuse_missing(path, function, body)
        return None
    last = found[-1]
    if isinstance(last, ast.ClassDef):
        raise SourceError(
            f"{function} in {path} is a class, not a function",
            "name a function, such as one that calls an instance of it",
        )
    return _signature(last) if isinstance(last, ast.FunctionDef | ast.AsyncFunctionDef) else None


def find_state(source: str) -> list[str]:
    """Return the module-level variables that functions of a module change, as far as its source shows.

    A module with a `load_state_dict` is taken to offer all of its state.

    Args:
        source: A file's path, or a module's dotted name.
    """
    path = Path(source) if is_file(source) else module_file(source)
    if path is None or (path.is_file() and b"load_state_dict" in path.read_bytes()):
        return []
    module = _parse(path)
    shared = {name for node in _definitions(module.body) for name in _names(node)}
    changed: set[str] = set()
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = list(ast.walk(function))
        changed |= {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        own = {node.arg for node in nodes if isinstance(node, ast.arg)}
        own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        changed |= {name for node in nodes if (name := _changed_name(node)) and name not in own}
    return sorted(changed & shared)


def _changed_name(node: ast.AST) -> str | None:
    """Return the variable whose container an expression changes; None if it changes none."""
    stores = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    calls = isinstance(node, ast.Attribute) and node.attr in _CHANGES
    held = node.value if isinstance(node, ast.Subscript | ast.Attribute) else None
    return held.id if (stores or calls) and isinstance(held, ast.Name) else None


def module_file(module: str) -> Path | None:
    """The source file of a module, found without importing its parents; None where unknown.

    Raises:
        SourceError: There is no such top-level module.
    """
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        return None
    if spec is None:
        raise SourceError(
            f"there is no module {top!r} in this environment",
            f"install it, or name a file: path/to/{top}.py:FUNCTION",
        )
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    places = [Path(place).joinpath(*rest) for place in spec.submodule_search_locations or ()]
    candidates = [
        file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")
    ]
    return next((file for file in candidates if file.is_file()), None)


def _parse(path: Path) -> ast.Module:
    if not path.is_file():
        raise SourceError(f"there is no file {path}", "correct the path, or write the file")
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        where = f"{path}:{getattr(error, 'lineno', None) or 1}"
        why = getattr(error, "msg", None) or str(error)
        raise SourceError(f"{where} is not valid Python: {why}", f"correct {where}") from error


def _definitions(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The module-level statements that bind names, also under `if`, `try` and `with`."""
    for node in body:
        yield node
        for nested in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _definitions(getattr(node, nested, []))
        for handler in getattr(node, "handlers", []):
            yield from _definitions(handler.body)


def _names(node: ast.stmt) -> set[str]:
    """The names a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [part for target in targets for part in ast.walk(target)]
        return {part.id for part in parts if isinstance(part, ast.Name)}
    return set()


def _refuse_missing(path: Path, function: str, body: list[ast.stmt]) -> None:
    """Raises unless a star import may still bring the function in."""
    nodes = list(_definitions(body))
    if any("*" in _names(node) for node in nodes):
        return
    functions = [n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    close = nearest(function, functions) or (functions[0] if len(functions) == 1 else None)
    there = f"; it has {', '.join(functions)}" if functions else ""
    fix = f"name {close}" if close else f"write `def {function}(completions, **kwargs)` there"
    raise SourceError(f"there is no function {function!r} in {path}{there}", fix)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    spec = node.args
    positional = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
    first_default = len(positional) - len(spec.defaults)
    keyword = [
        (arg.arg, default) for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    ]
    return Signature(
        required=(*positional[:first_default], *(name for name, value in keyword if value is None)),
        optional=(
            *positional[first_default:],
            *(name for name, value in keyword if value is not None),
        ),
        positional_only=tuple(arg.arg for arg in spec.posonlyargs),
        takes_any=spec.kwarg is not None,
        is_async=isinstance(node, ast.AsyncFunctionDef),
    )
