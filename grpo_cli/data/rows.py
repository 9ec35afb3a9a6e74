"""A row and how messages speak about it.

Owns the row type, the union of columns and the shortening of values shown to a person. Does not
read or change what a row says.
"""

from collections.abc import Iterable
from typing import Any

from grpo_cli.errors import nearest

Row = dict[str, Any]
"""Column name → value."""

SHOWN_CHARACTERS = 80
SHOWN_NAMES = 12


def columns_of(rows: Iterable[Row]) -> list[str]:
    """The union of the rows' columns, in the order in which they first appear."""
    names: dict[str, None] = {}
    for row in rows:
        if row.keys() - names.keys():
            names.update(dict.fromkeys(row))
    return list(names)


def fill_missing(rows: list[Row]) -> list[Row]:
    """Gives every row every column; None where it has no value."""
    names = columns_of(rows)
    width = len(names)
    empty = dict.fromkeys(names)
    return [row if len(row) == width else {**empty, **row} for row in rows]


def show(value: object) -> str:
    """A value as one short line; the end of a long one is kept, where answers stand."""
    text = repr(value)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = (SHOWN_CHARACTERS - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


def show_names(names: Iterable[str]) -> str:
    """Names in backticks, joined by commas; a long list is cut and counted."""
    listed = list(names)
    shown = ", ".join(f"`{name}`" for name in listed[:SHOWN_NAMES])
    more = len(listed) - SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown or "none"


def suggest(name: str, valid: Iterable[str], otherwise: str) -> str:
    """A fix that names the nearest valid name, or `otherwise` where nothing is close."""
    close = nearest(name, valid)
    return f"write `{close}`" if close else otherwise
