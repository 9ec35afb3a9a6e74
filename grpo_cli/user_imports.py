"""Imports of the user's files that cannot be found, reported without importing anything."""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_cli.errors import nearest
from grpo_cli.issues import Issue
from grpo_cli.user_code import SourceError, bindings, is_file, package_root, parse_source

_CAUGHT = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def find_missing_imports(source: str) -> list[Issue]:
    """Return the imports of a file, and of files of the user's that it imports, which would fail.

    Not those in functions, under an `if`, or whose failure is caught; nothing of an installed module.
    """
    return list(_check_file(Path(source).resolve(), set())) if is_file(source) else []


def _check_file(file: Path, seen: set[Path]) -> Iterator[Issue]:
    if file in seen:
        return
    seen.add(file)
    try:
        tree = parse_source(file)
    except SourceError as error:
        yield Issue(error.seen, error.fix, "path")
        return
    changes_path = any(
        isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.path", "sys.modules")
        for node in ast.walk(tree)
    )
    for node in _run_on_import(tree.body):
        for base, name in _find_modules(file, node):
            own = _own_file(base, name)
            if own is not None:
                yield from _check_file(own, seen) if own.is_file() else ()
            elif base is not None or not changes_path:
                yield _describe(file, node, base, name)


def _run_on_import(statements: Sequence[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run, and whose failure is not caught, when a module is imported."""
    for node in statements:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node
            case ast.Try() if not any(map(_catches_import_errors, node.handlers)):
                yield from _run_on_import([*node.body, *node.orelse, *node.finalbody])
            case ast.With() if "suppress" not in "".join(map(ast.unparse, node.items)):
                yield from _run_on_import(node.body)
            case ast.ClassDef() | ast.For() | ast.While():
                yield from _run_on_import(node.body)


def _catches_import_errors(handler: ast.ExceptHandler) -> bool:
    names = ast.walk(handler.type) if handler.type else ()
    return handler.type is None or any(getattr(each, "id", None) in _CAUGHT for each in names)


def _find_modules(
    file: Path, node: ast.Import | ast.ImportFrom
) -> Iterator[tuple[Path | None, str]]:
    """Yield the modules of an import that are not installed, each with the folder that has it, or should."""
    if isinstance(node, ast.ImportFrom) and node.level:
        base = file.parents[node.level - 1]
        if node.module:
            yield base, node.module
            return
        init = base / "__init__.py"
        try:
            bound = bindings(parse_source(init)).keys() if init.is_file() else set[str]()
        except SourceError:
            return
        yield from ((base, each.name) for each in node.names if not {each.name, "*"} & bound)
        return
    names = [each.name for each in node.names] if isinstance(node, ast.Import) else [node.module]
    for name in filter(None, names):
        if not _is_installed(name.partition(".")[0]):
            for folder in (file.parent, package_root(file)):
                if _own_file(folder, name):
                    yield folder, name
                    break
            else:
                yield None, name


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return True


def _own_file(base: Path | None, name: str) -> Path | None:
    """Return the file of a module below a folder, or the folder of a package without one."""
    if base is None:
        return None
    path = base.joinpath(*name.split("."))
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((each for each in (*files, path) if each.exists()), None)


def _describe(file: Path, node: ast.Import | ast.ImportFrom, base: Path | None, name: str) -> Issue:
    where = f"{file.name}:{node.lineno} imports"
    if base is not None:
        names = [each.stem for each in base.glob("*.py") if each != file]
        close = nearest(name, names)
        fix = f"write `.{close}`" if close else f"write {name}.py there, or correct the import"
        return Issue(f"{where} `.{name}`, and {base} has no such module", fix, "path")
    top = name.partition(".")[0]
    close = nearest(top, [each.stem for each in file.parent.glob("*.py") if each != file])
    fix = f"write `import {close}`" if close else "install the package that has it"
    fix = f"{fix}, or correct the import" if not close else fix
    return Issue(f"{where} `{top}`, which is not installed", fix, "path", package=top)
