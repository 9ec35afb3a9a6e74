"""Files and modules of the user's: found and read without importing them, imported once, limited in time."""

import ast
import copy
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from grpo_cli.errors import RunError, nearest
from grpo_cli.input_files import find_fault

ANY_SIGNATURE = inspect.signature(lambda **columns: None)
"""Stands for a signature that cannot be read."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class SourceError(RunError):
    """A name cannot be found in its source."""

    def __init__(self, seen: str, fix: str) -> None:
        super().__init__(seen, fix, "path")


def is_file(source: str) -> bool:
    """Return whether a source names a file, not a module."""
    return source.endswith(".py") or "/" in source or "\\" in source


def source_file(source: str) -> Path | None:
    """Return the file of a reward; None for a module whose source is found only by importing its parents."""
    if is_file(source):
        return Path(source)
    top, *rest = source.split(".")
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
    bases = [Path(folder).joinpath(*rest) for folder in spec.submodule_search_locations or ()]
    files = [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def parse_source(path: Path) -> ast.Module:
    """Return the syntax tree of a file; raises `SourceError` if there is none."""
    if fault := find_fault(path):
        raise SourceError(fault, _suggest_file(path))
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = f"{path}:{getattr(error, 'lineno', None) or 1}"
        why = getattr(error, "msg", None) or str(error)
        raise SourceError(f"{line} is not valid Python: {why}", f"correct {line}") from error


def _suggest_file(path: Path) -> str:
    """Return a fix that names the file which may be meant: beside a missing one, or in a folder there."""
    folder = next(each for each in path.parents if each.is_dir())
    files = [each for each in (*folder.glob("*.py"), *folder.glob("*/*.py")) if each != path]
    same = [each for each in files if each.name == path.name]
    close = nearest(path.name, [each.name for each in files])
    if meant := [*same, *(each for each in files if each.name == close)]:
        return f"write `{meant[0]}`, or correct the path"
    other = f" (the only Python file there is `{files[0]}`)" if len(files) == 1 else ""
    return f"write the file {path.name}, or correct the path{other}"


def bindings(module: ast.Module) -> dict[str, ast.AST]:
    """Return what binds each name of a module, the last if there are several; `*` for a star import."""
    bound: dict[str, ast.AST] = {}
    for node in outside_functions(module):
        if isinstance(node, Function | ast.ClassDef):
            bound[node.name] = node
        elif isinstance(node, ast.alias):
            bound[(node.asname or node.name).partition(".")[0]] = node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] = node
    return bound


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one that run when it does: not those inside functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            yield from outside_functions(child)


def signature_of(definition: ast.AST | None) -> inspect.Signature:
    """Return the signature of a function's definition, without evaluating its defaults or annotations."""
    if not isinstance(definition, Function):
        return ANY_SIGNATURE
    spec = copy.deepcopy(definition.args)
    for each in ast.walk(spec):
        if isinstance(each, ast.arg):
            each.annotation = None
    spec.defaults = [ast.Constant(None) for _ in spec.defaults]
    spec.kw_defaults = [each and ast.Constant(None) for each in spec.kw_defaults]
    return inspect.signature(eval(f"lambda {ast.unparse(spec)}: None"))


def load_file(path: Path) -> ModuleType:
    """Import a file once per process; if it imports relatively, as a module of the package that its folder is.

    For absolute imports, its folder and that of its outermost package are appended to `sys.path`.
    """
    path = path.resolve()
    tree = parse_source(path)
    root = package_root(path)
    for folder in (path.parent, root):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    name = _unique_name(path)
    if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)):
        names = path.relative_to(root).parts[:-1]
        packages = [root.joinpath(*names[: depth + 1]) for depth in range(len(names))]
        name = _unique_name(packages[0])
        for folder in packages:
            name = f"{name}.{folder.name}" if folder != packages[0] else name
            _load_module(name, folder / "__init__.py", [str(folder)])
        if path.name != "__init__.py":
            name = f"{name}.{path.stem}"
    return _load_module(name, path)


def package_root(path: Path) -> Path:
    """Return the folder of the outermost package of a file, whose own folder is one in any case."""
    root = path.parent.parent
    while (root / "__init__.py").is_file() and root != root.parent:
        root = root.parent
    return root


def _unique_name(path: Path) -> str:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"grpo_own_{digest}_{path.stem}"


def _load_module(name: str, path: Path, folders: list[str] | None = None) -> ModuleType:
    """Import a file under a name once; `folders` make it a package, which may have no file."""
    if name in sys.modules:
        return sys.modules[name]
    if folders and not path.is_file():
        spec: Any = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = folders
    else:
        spec = importlib.util.spec_from_file_location(
            name, path, submodule_search_locations=folders
        )
    if spec is None:
        raise SourceError(f"{path} is not a Python file", "let its name end in .py")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_name(path: str) -> Any:
    """Import `file.py:name` or `module:name`, and return what it names; what the import raises passes through."""
    source, _, name = path.rpartition(":")
    module = load_file(Path(source)) if is_file(source) else importlib.import_module(source)
    if not hasattr(module, name):
        raise SourceError(f"{source} has no {name!r}", "define it, or name another")
    return getattr(module, name)


def find_name(path: str) -> ast.AST | None:
    """Return what binds the name of `file.py:name` or `module:name`, not imported, or raise `SourceError`."""
    source, _, name = path.rpartition(":")
    owner, _, method = name.partition(".")
    if source and owner.isidentifier() and method.isidentifier():
        seen = f"{name} is a method, which needs an instance of {owner}"
        raise SourceError(seen, f"name a function that calls it: `def {method}(…)` in {source}")
    if not source or not name.isidentifier():
        raise SourceError(
            f"should be file.py:name or module:name, not {path!r}", "name what is in the file"
        )
    file = source_file(source)
    if file is None:
        return None
    bound = bindings(parse_source(file))
    if name not in bound and "*" not in bound:
        close = nearest(name, bound)
        fix = f"name {close}" if close else f"define it in {file}"
        raise SourceError(f"there is no {name!r} in {file}", fix)
    return bound.get(name)


def find_module_file(name: str, folder: Path) -> Path | None:
    """Return the file of a module below a folder; None if there is none, or the module is installed."""
    with suppress(SourceError):
        if source_file(name) is not None:
            return None
    base = folder.joinpath(*name.split("."))
    files = (base.with_name(f"{base.name}.py"), base / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@contextmanager
def time_limit(
    error: Callable[[FrameType | None], BaseException], timer: int = signal.ITIMER_REAL
) -> Iterator[Callable[[float], object]]:
    """Limit what is done in the main thread; in others there are no signals, and no limit.

    Yields a function that starts the next so many seconds, of computing with `ITIMER_VIRTUAL`; `error` makes the
    exception from the frame that is interrupted. `re` looks for signals while it searches.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda seconds: None
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise error(frame)

    number = signal.SIGVTALRM if timer == signal.ITIMER_VIRTUAL else signal.SIGALRM
    before = signal.signal(number, give_up)
    try:
        yield lambda seconds: signal.setitimer(timer, seconds)
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
