"""The features of `datasets` by which images and values that Arrow cannot hold are decoded when a row is read."""

import marshal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import chain
from typing import Any
from uuid import UUID

from datasets import Dataset, Image, Value

from grpo_cli.data import images
from grpo_cli.data.rows import Row
from grpo_cli.errors import RunError

ENCODED = "large_binary"
"""Arrow's type of encoded values. Values of the data never get it: Arrow infers `binary` for bytes."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_REBUILT: dict[str, Callable[[str], Any]] = {
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "Decimal": Decimal,
    "UUID": UUID,
}
"""Types that are stored as text, and what makes them of it."""


@dataclass
class RgbImage(Image):
    """Images that are decoded as `decode_image` says."""

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Any:
        """Return an RGB `PIL.Image.Image`; raises `RunError` if it cannot be read."""
        if not isinstance(value, dict):
            return value
        try:
            return images.decode_image(value)
        except images.ImageError as error:
            raise RunError(f"an image {error.seen}. Fix: {error.row_fix}") from error


def encode_value(value: Any) -> bytes:
    """Return a value as bytes, with its types, the order of its keys and the bits of its floats.

    What neither `marshal` nor `_REBUILT` holds is written as text.
    """
    # Of the two containers, a list holds a value as it is, and a tuple one with types that marshal does not have.
    return marshal.dumps([value] if _is_plain(value) else (_tag(value),), 2)


def decode_value(stored: bytes) -> Any:
    """Return the value that `encode_value` stored."""
    holder = marshal.loads(stored)
    return holder[0] if isinstance(holder, list) else _untag(holder[0])


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is str:
        value.encode()
    if kind is dict:
        return all(map(_is_plain, chain(value, value.values())))
    return kind in _PLAIN or (kind in (list, tuple) and all(map(_is_plain, value)))


def _tag(value: Any) -> Any:
    """Return a value as plain ones, with containers and other types as tuples of their name and content."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return ("dict", [(_tag(key), _tag(each)) for key, each in value.items()])
    if kind in (list, tuple, set, frozenset):
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        return (kind.__name__, [_tag(each) for each in items])
    if kind is timedelta:
        return ("timedelta", [value.days, value.seconds, value.microseconds])
    if kind in (datetime, date, time):
        return (kind.__name__, value.isoformat())
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return _tag(value.tolist())
    return (kind.__name__, str(value)) if kind in (Decimal, UUID) else str(value)


def _untag(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    name, content = value
    if name in _REBUILT:
        return _REBUILT[name](content)
    if name == "timedelta":
        return timedelta(*content)
    if name == "dict":
        return {_untag(key): _untag(each) for key, each in content}
    kind = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[name]
    return kind(map(_untag, content))


def is_same(read: list[Any], values: list[Any]) -> bool:
    """Return whether two lists have equal values of the same types, with keys in the same order."""
    try:
        return marshal.dumps(read, 2) == marshal.dumps(values, 2)
    except ValueError:
        return bool(_tag(read) == _tag(values))


class ExactValue(Value):
    """The feature of columns whose values are stored as bytes, `ExactValue(ENCODED)`."""

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Any:
        """Return the value as it was."""
        return decode_value(value) if isinstance(value, bytes) else value

    def encode_example(self, value: Any) -> Any:
        """Return the bytes of a value."""
        return value if isinstance(value, bytes) else encode_value(value)


def list_rows(data: Dataset) -> list[Row]:
    """Return the rows of a dataset as rewards get them, except that images stay as they are stored."""
    rows: list[Row] = data.to_list()
    for name, kind in data.features.items():
        if isinstance(kind, ExactValue):
            for row in rows:
                row[name] = None if row[name] is None else decode_value(row[name])
    return rows
