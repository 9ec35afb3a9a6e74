"""Rows in memory as Arrow columns, which give every value back as it was.

Arrow has one type for a column: it fills absent keys with None, makes floats of integers, and refuses
numbers beside texts. Values of a block that would not come back exactly are stored encoded, each by itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, overload
from uuid import uuid4

import pyarrow
import pyarrow.compute
from datasets import Dataset, DatasetInfo, Features, List

from grpo_cli.data.decoding import (
    ENCODED,
    ExactValue,
    RgbImage,
    decode_value,
    encode_value,
    is_same,
)
from grpo_cli.data.rows import Row
from grpo_cli.errors import recipe_error
from grpo_cli.recipe.dataset import IMAGES

BLOCK_ROWS = 4096
"""Rows that become Arrow arrays together."""
_BYTES = pyarrow.type_for_alias(ENCODED)
_IMAGES_TYPE = pyarrow.list_(pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()}))


@dataclass(eq=False)
class RowTable(Sequence[Row]):
    """Rows as blocks of Arrow columns; every row has every column."""

    _blocks: list[dict[str, Any]] = field(default_factory=list)
    """Column → Arrow array, of some rows each."""
    _names: dict[str, None] = field(default_factory=dict)
    read_once: bool = False
    """Whether `blocks` frees each block before it yields the next, for rows that are not needed again."""

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "RowTable":
        """Return a table of rows."""
        table, block = cls(), []
        for row in rows:
            block.append(row)
            if len(block) == BLOCK_ROWS:
                table.add(block)
                block = []
        if block:
            table.add(block)
        return table

    @classmethod
    def once(cls, rows: Iterable[Row]) -> "RowTable":
        """Return a table of rows that are read once only."""
        table = cls.of(rows)
        table.read_once = True
        return table

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows.

        Raises:
            RecipeError: A text holds half a character, which no tokenizer reads.
        """
        names = dict.fromkeys(chain.from_iterable(rows))
        self._names |= names
        self._blocks.append(
            {name: _as_array(name, [row.get(name) for row in rows]) for name in names}
        )

    def extend(self, other: "RowTable") -> None:
        """Append the rows of another table."""
        self._names |= other._names
        self._blocks += other._blocks

    @property
    def column_names(self) -> list[str]:
        """The columns, in the order in which they first appear."""
        return list(self._names)

    def __len__(self) -> int:
        return sum(map(_length, self._blocks))

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self.blocks())

    def blocks(self, names: Iterable[str] | None = None) -> Iterator[list[Row]]:
        """Yield the rows block by block, with some of their columns or all."""
        wanted = list(self._names if names is None else names)
        for at, block in enumerate(self._blocks):
            if self.read_once:
                self._blocks[at] = {}
            empty = [None] * _length(block)
            columns = [_values(block[name]) if name in block else empty for name in wanted]
            yield [dict(zip(wanted, each, strict=True)) for each in zip(*columns, strict=True)]

    def named(self, names: Iterable[str]) -> Iterator[Row]:
        """Yield rows with some of their columns; None in those that there are not."""
        return chain.from_iterable(self.blocks(names))

    def pick(self, places: Sequence[int]) -> Iterator[Row]:
        """Yield the rows at some places, which ascend."""
        first, at = 0, 0
        for block in self._blocks:
            start, end = at, first + _length(block)
            while at < len(places) and places[at] < end:
                at += 1
            if start < at:
                local = [place - first for place in places[start:at]]
                taken = {name: each.take(local) for name, each in block.items()}
                yield from RowTable([taken], self._names)
            first = end

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> "RowTable": ...
    def __getitem__(self, place: int | slice) -> "Row | RowTable":
        if isinstance(place, int):
            start = range(len(self))[place]
            (row,) = RowTable(self._cut(start, start + 1), self._names)
            return row
        start, stop, _ = place.indices(len(self))
        return RowTable(self._cut(start, stop), self._names, self.read_once)

    def _cut(self, start: int, stop: int) -> list[dict[str, Any]]:
        blocks, first = [], 0
        for block in self._blocks:
            size = _length(block)
            low, high = max(start - first, 0), min(stop - first, size)
            if low < high:
                blocks.append({name: each[low:high] for name, each in block.items()})
            first += size
        return blocks

    def divide(self, taken: Iterable[int]) -> "RowTable":
        """Take the rows at some places out of this table; return them, in order."""
        mask = [False] * len(self)
        for place in taken:
            mask[place] = True
        blocks, first = [], 0
        for at, block in enumerate(self._blocks):
            size = _length(block)
            chosen = pyarrow.array(mask[first : first + size], pyarrow.bool_())
            rest = pyarrow.compute.invert(chosen)
            blocks.append({name: each.filter(chosen) for name, each in block.items()})
            # The old block is freed before the next is divided.
            self._blocks[at] = {name: each.filter(rest) for name, each in block.items()}
            first += size
        self._blocks = list(filter(_length, self._blocks))
        return RowTable(list(filter(_length, blocks)), dict(self._names))

    def renumber(self, name: str, first: int) -> int:
        """Add a number to the integers of a column; return the highest before."""
        highest = 0
        for block in self._blocks:
            highest = max(highest, pyarrow.compute.max(block[name]).as_py())
            block[name] = pyarrow.compute.add(block[name], first)
        return highest

    def types(self, name: str) -> set[Any]:
        """Return the Arrow types of a column's blocks, without that of blocks in which it is empty."""
        kinds = {block[name].type for block in self._blocks if name in block}
        return kinds - {pyarrow.null()}

    def as_dataset(self) -> Dataset:
        """Return the rows as a `Dataset`; images are decoded when a row is read."""
        arrays = {name: self._chunked(name) for name in self._names}
        table = pyarrow.table(arrays)
        features = Features.from_arrow_schema(table.schema)
        for name, each in arrays.items():
            if each.type == _BYTES:
                features[name] = ExactValue(ENCODED)
        if IMAGES in arrays:
            features[IMAGES] = List(RgbImage())
        # Otherwise `datasets` would hash the whole table.
        return Dataset(table, DatasetInfo(features=features), fingerprint=uuid4().hex[:16])

    def _chunked(self, name: str) -> Any:
        """Return a column as one Arrow array; encoded if its blocks have different types."""
        kinds = self.types(name)
        kind = _BYTES if len(kinds) > 1 else next(iter(kinds), pyarrow.null())
        chunks = []
        for block in self._blocks:
            each = block.get(name)
            if each is None or each.type == pyarrow.null():
                each = pyarrow.nulls(_length(block), kind)
            elif each.type != kind:
                each = _encode(_values(each))
            chunks.append(each)
        return pyarrow.chunked_array(chunks, kind)


def _length(block: dict[str, Any]) -> int:
    return len(next(iter(block.values()))) if block else 0


def _values(stored: Any) -> list[Any]:
    values: list[Any] = stored.to_pylist()
    if stored.type != _BYTES:
        return values
    return [None if each is None else decode_value(each) for each in values]


def _as_array(name: str, values: list[Any]) -> Any:
    """Return values as an Arrow array, encoded if Arrow would refuse or alter them."""
    if name == IMAGES:
        return pyarrow.array(values, _IMAGES_TYPE)
    try:
        made = pyarrow.array(values)
        if isinstance(made, pyarrow.Array) and is_same(made.to_pylist(), values):
            return made
    except (pyarrow.ArrowException, OverflowError, TypeError, ValueError):
        pass
    try:
        return _encode(values)
    except UnicodeEncodeError as error:
        message = f"the column `{name}` holds half a character (a lone surrogate): {error.reason}"
        raise recipe_error(message, "correct the text in the data", "dataset") from error


def _encode(values: list[Any]) -> Any:
    return pyarrow.array([None if each is None else encode_value(each) for each in values], _BYTES)
