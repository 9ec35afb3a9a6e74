"""Files that hold a training in another form than YAML: Python scripts, notebooks and shell scripts."""

import ast
import json
import platform
import re
import warnings
from pathlib import Path
from typing import Any

from grpo_cli.errors import recipe_error
from grpo_cli.issues import Location

_MAGIC = re.compile(r"\s*(\w+\s*=\s*)?[%!?]")
"""Lines for the shell or for the notebook itself."""


def read_python(text: str, source: Path) -> tuple[ast.Module, list[int]]:
    """Return a script's syntax tree and, of a notebook, the line at which each of its cells begins.

    Raises:
        RecipeError: The file is not Python, or not a notebook.
    """
    if source.suffix != ".ipynb":
        return _parse(text, source, []), []
    cells = _read_cells(text, source)
    starts, lines = [], 1
    for cell in cells:
        starts.append(lines)
        lines += cell.count("\n") + 1
    return _parse("\n".join(cells), source, starts), starts


def _read_cells(text: str, source: Path) -> list[str]:
    """Return the code of a notebook's cells; lines for the shell or the notebook are left out."""
    try:
        notebook = json.loads(text)
        cells = [cell for cell in notebook["cells"] if cell.get("cell_type") == "code"]
        codes = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError, AttributeError):
        cause = "is not a notebook that can be read"
        raise recipe_error(
            cause, "save it again with Jupyter", location=Location(str(source))
        ) from None
    return [_without_magic(code) for code in codes]


def _without_magic(code: str) -> str:
    lines = code.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("%%") and not first.startswith(("%%time", "%%capture", "%%writefile")):
        return "\n" * (len(lines) - 1)
    kept = []
    is_continued = False
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        is_magic = is_continued or _MAGIC.match(line) is not None
        kept.append("" if is_continued else f"{indent}pass" if is_magic else line)
        is_continued = is_magic and line.rstrip().endswith("\\")
    return "\n".join(kept)


def _parse(text: str, source: Path, starts: list[int]) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    where, cause = Location(str(source), 1, 1), ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree: Any = compile(text, str(source), "exec", flags)
            return ast.Module(tree.body, [])
    except SyntaxError as error:
        line, cause = error.lineno or 1, error.msg
        before = [start for start in starts if start <= line]
        name = f"{source}, code cell {len(before)}" if before else str(source)
        where = Location(name, line - (before[-1] - 1 if before else 0), 1)
    except ValueError as error:
        cause = str(error)
    except (RecursionError, MemoryError):
        cause = "it is nested too deeply"
    version = ".".join(platform.python_version_tuple()[:2])
    fix = f"correct that line, or install grpo with the Python that the script is for (this is {version})"
    raise recipe_error(f"is not Python that can be read: {cause}", fix, location=where)
