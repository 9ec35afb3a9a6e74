"""A row, its name in messages, and how messages show its values."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.errors import nearest

Row = dict[str, Any]
"""Column name → value."""
Columns = Mapping[str, Sequence[Any]]
"""Column name → the values of some rows."""

SHOWN_CHARACTERS = 80
SHOWN_NAMES = 12


@dataclass(frozen=True)
class RowNames:
    """Names the rows of a split in messages: by their number from 1 and, if there is one, their file."""

    split: str
    """`training` or `evaluation`."""
    files: tuple[tuple[Path, int], ...] = ()
    """Each file and its number of rows, in the order they were read."""
    first: int = 0
    """Rows of the split before the one at place 0."""

    def __call__(self, place: int) -> str:
        """Return the name of the row at a place, from 0: `row 7 of train.jsonl`."""
        file, number = self._find(place)
        return f"row {number + 1} of {file.name}" if file else f"{self.split} row {number + 1}"

    def folder(self, place: int) -> Path | None:
        """Return the folder of the file that holds the row at a place; None if it is in no file."""
        file, _ = self._find(place)
        return file.parent if file else None

    def _find(self, place: int) -> tuple[Path | None, int]:
        """Return a row's file, and its place in it, or in the split if it is in no file."""
        place += self.first
        left = place
        for file, count in self.files:
            if left < count:
                return file, left
            left -= count
        return None, place


def columns_of(rows: Iterable[Row]) -> list[str]:
    """Return the union of the rows' columns, in the order in which they first appear."""
    if (stored := getattr(rows, "column_names", None)) is not None:
        return list(stored)
    names: dict[str, None] = {}
    for row in rows:
        if row.keys() - names.keys():
            names.update(dict.fromkeys(row))
    return list(names)


def rows_of(block: Columns) -> list[Row]:
    """Return the rows of columns."""
    return [dict(zip(block, each, strict=True)) for each in zip(*block.values(), strict=True)]


def read_column(row: Row, name: str) -> Any:
    """Return the value of a column, None if there is none; `a.b` is the key `b` of the mapping in column `a`."""
    first, _, rest = name.partition(".")
    if name in row or not rest:
        return row.get(name)
    inner = row.get(first)
    return read_column(inner, rest) if isinstance(inner, dict) else None


def fill_missing(rows: Sequence[Row]) -> Sequence[Row]:
    """Give every row every column; None if it has no value."""
    if hasattr(rows, "column_names"):
        return rows
    names = columns_of(rows)
    width = len(names)
    empty = dict.fromkeys(names)
    return [row if len(row) == width else {**empty, **row} for row in rows]


def show(value: object) -> str:
    """Return a value as one short line; the end of a long one is kept, since answers are there."""
    text = repr(value)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = (SHOWN_CHARACTERS - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


def show_names(names: Iterable[str]) -> str:
    """Return names in backticks, joined by commas; a long list is cut and counted."""
    listed = list(names)
    shown = ", ".join(f"`{name}`" for name in listed[:SHOWN_NAMES])
    more = len(listed) - SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown or "none"


def suggest(name: str, valid: Iterable[str], otherwise: str) -> str:
    """Return a fix that names the nearest valid name, or `otherwise` if nothing is close."""
    close = nearest(name, valid)
    return f"write `{close}`" if close else otherwise


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys, without optional spaces; what JSON has no form for is written as text."""
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
