"""A row, its name in messages, and how messages show its values."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.errors import nearest

Row = dict[str, Any]
"""Column name → value."""

SHOWN_CHARACTERS = 80
SHOWN_NAMES = 12


@dataclass(frozen=True)
class RowNames:
    """Names the rows of a split in messages: by their number from 1 and, if there is one, their file."""

    split: str
    """`training` or `evaluation`."""
    files: tuple[tuple[str, int], ...] = ()
    """Name and number of rows of each file, in the order they were read."""
    first: int = 0
    """Rows of the split before the one at place 0."""
    folders: tuple[Path, ...] = ()
    """Of the files."""

    def __call__(self, place: int) -> str:
        """Return the name of the row at a place, from 0: `row 7 of train.jsonl`."""
        number, start = self._find(place)
        if number is None:
            return f"{self.split} row {place + self.first + 1}"
        return f"row {place + self.first - start + 1} of {self.files[number][0]}"

    def folder(self, place: int) -> Path | None:
        """Return the folder of the file that holds the row at a place; None if it is in no file."""
        number, _ = self._find(place)
        return self.folders[number] if number is not None and self.folders else None

    def _find(self, place: int) -> tuple[int | None, int]:
        """Return the number of a row's file, and the rows in the files before it."""
        place, start = place + self.first, 0
        for number, (_, count) in enumerate(self.files):
            if place < start + count:
                return number, start
            start += count
        return None, start


def columns_of(rows: Iterable[Row]) -> list[str]:
    """Return the union of the rows' columns, in the order in which they first appear."""
    names: dict[str, None] = {}
    for row in rows:
        if row.keys() - names.keys():
            names.update(dict.fromkeys(row))
    return list(names)


def fill_missing(rows: list[Row]) -> list[Row]:
    """Give every row every column; None if it has no value."""
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


def canonical_json(value: Any, *, sort_keys: bool = True) -> str:
    """Return JSON without optional spaces; what JSON has no form for is written as text."""
    separators = (",", ":")
    return json.dumps(
        value, sort_keys=sort_keys, separators=separators, ensure_ascii=False, default=str
    )
