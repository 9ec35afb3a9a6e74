"""From Python values to Arrow columns that say the same for every row.

Owns the decision which columns become JSON or text because Arrow would refuse or alter them. Does
not know where rows come from.
"""

import json
from dataclasses import dataclass
from typing import Any

from grpo_cli.data.rows import Row, columns_of
from grpo_cli.errors import Problem, RecipeError

_DEEPEST = 32
"""Levels of lists and dicts that are left to Arrow; with 100, `datasets` cannot read the schema (pyarrow 26)."""


@dataclass(frozen=True)
class EncodedRows:
    """Rows as an Arrow table, and what had to be changed."""

    table: Any
    """`pyarrow.Table`."""
    json_columns: tuple[str, ...]
    """Columns whose values are JSON texts."""
    text_columns: tuple[str, ...]
    """Columns of mixed scalars, now all text."""


def encode_rows(rows: list[Row], always_json: frozenset[str] = frozenset()) -> EncodedRows:
    """Puts rows into an Arrow table.

    A column that holds lists or dicts becomes JSON text where Arrow would not give the same values
    back (it fills missing keys with None); a column that mixes scalars becomes text.

    Args:
        rows: Rows of all splits together, so that the splits share their types.
        always_json: Columns whose dicts become JSON text in any case.
    """
    import pyarrow

    arrays: dict[str, Any] = {}
    as_json: list[str] = []
    as_text: list[str] = []
    for name in columns_of(rows):
        values = [row.get(name) for row in rows]
        nested = any(isinstance(value, dict | list | tuple) for value in values)
        array = None if name in always_json and nested else _as_array(values, nested)
        if array is None:
            (as_json if nested else as_text).append(name)
            array = _as_text_array(name, values, nested)
        arrays[name] = array
    return EncodedRows(pyarrow.table(arrays), tuple(as_json), tuple(as_text))


def _as_text_array(name: str, values: list[Any], nested: bool) -> Any:
    import pyarrow

    try:
        texts = [_as_text(value, nested) for value in values]
        return pyarrow.array(texts, pyarrow.string())
    except RecursionError as error:
        message = f"the column `{name}` holds lists or dicts that are nested too deep"
        raise RecipeError([Problem(message, "flatten them in the data", "dataset")]) from error
    except UnicodeEncodeError as error:
        message = f"the column `{name}` holds half a character (a lone surrogate): {error.reason}"
        raise RecipeError([Problem(message, "correct the text in the data", "dataset")]) from error


def _as_array(values: list[Any], nested: bool) -> Any:
    """The values as an Arrow array; None where it would refuse or alter them."""
    import pyarrow

    try:
        array = pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, TypeError, UnicodeEncodeError):
        return None
    if _is_deeper(array.type, _DEEPEST):
        return None
    return array if not nested or array.to_pylist() == values else None


def _is_deeper(kind: Any, levels: int) -> bool:
    """Whether an Arrow type is nested in more levels."""
    inner = (kind.field(index).type for index in range(kind.num_fields))
    return levels < 0 or any(_is_deeper(each, levels - 1) for each in inner)


def _as_text(value: Any, nested: bool) -> str | None:
    if value is None:
        return None
    return canonical_json(value, sort_keys=False) if nested else str(value)


def canonical_json(value: Any, *, sort_keys: bool = True) -> str:
    """JSON without optional spaces; what JSON has no form for is written as text."""
    separators = (",", ":")
    return json.dumps(
        value, sort_keys=sort_keys, separators=separators, ensure_ascii=False, default=str
    )
