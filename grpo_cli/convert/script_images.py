"""Images in a Python script that trains with TRL: whether it has some, and the column that they are in."""

import ast
from collections.abc import Iterable, Iterator

_MODELS = ("AutoModelForImageTextToText", "AutoModelForVision2Seq")
_COLUMNS = ("image", "images")
"""TRL's columns with images."""


def find_images(nodes: Iterable[ast.AST]) -> tuple[ast.AST, str | None] | None:
    """Return the first code of a script that shows images, and their column; None if there are none.

    Args:
        nodes: All of the script.
    """
    shown: list[ast.AST] = []
    columns: list[str] = []
    own: list[str] = []
    for node in nodes:
        match node:
            case ast.Name(id=name) if name in _MODELS:
                shown.append(node)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if _is_text(key, "type") and _is_text(value, "image"):
                        shown.append(node)
                    elif _is_text(key, *_COLUMNS):
                        columns += _find_columns(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="Image"), attr="open"), args=args):
                opened = [each for arg in args for each in _find_columns(arg)]
                columns += opened
                shown += [node] if opened else []
            case ast.Subscript(slice=ast.Constant(value=name)) if name in _COLUMNS:
                shown.append(node)
                own.append(name)
    if not shown:
        return None
    return min(shown, key=lambda node: getattr(node, "lineno", 0)), next(
        iter([*columns, *own]), None
    )


def _is_text(node: ast.AST | None, *texts: str) -> bool:
    return isinstance(node, ast.Constant) and node.value in texts


def _find_columns(value: ast.AST) -> Iterator[str]:
    """Yield the names in `row["name"]`, anywhere in an expression."""
    for node in ast.walk(value):
        match node:
            case ast.Subscript(slice=ast.Constant(value=str() as name)):
                yield name
