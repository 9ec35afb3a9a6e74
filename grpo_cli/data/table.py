"""Rows as Arrow tables, which give every value back as it was.

Arrow has one type for a column: it fills absent keys with None, makes floats of integers, and refuses
numbers beside texts. Values of a column that would not come back exactly are stored encoded, each by itself.
"""

import hashlib
import marshal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import chain, islice
from typing import Any
from uuid import UUID, uuid4

import numpy
import pyarrow
import pyarrow.compute
from datasets import Dataset, DatasetInfo, Features, Image, List, Value

from grpo_cli.data import images
from grpo_cli.data.rows import Columns, Row, canonical_json, rows_of
from grpo_cli.errors import RunError, recipe_error
from grpo_cli.recipe.dataset import IMAGES

BLOCK_ROWS = 4096
"""Rows that become Arrow arrays, or values again, together."""
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
_BYTES = pyarrow.type_for_alias(ENCODED)
_POOL = pyarrow.system_memory_pool()
"""Arrow's own pool keeps half as much memory again for arrays of this size."""
_IMAGES_TYPE = pyarrow.list_(pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()}))
_EXACT = ({str}, {int}, {float}, {bool})
"""Types that Arrow holds exactly if a column has, besides None, no other."""


def as_table(rows: Iterable[Row]) -> pyarrow.Table:
    """Return rows as a table; every row has every column. Raises `RecipeError`."""
    rest = iter(rows)
    blocks = []
    while block := list(islice(rest, BLOCK_ROWS)):
        names = dict.fromkeys(chain.from_iterable(block))
        blocks.append({name: as_array(name, [row.get(name) for row in block]) for name in names})
    return join(blocks)


def as_array(name: str, values: Sequence[Any]) -> pyarrow.Array:
    """Return values of a column as an Arrow array, encoded if Arrow would refuse or alter them.

    Raises `RecipeError` if a text holds half a character, which no tokenizer reads.
    """
    is_exact = {*map(type, values)} - {type(None)} in _EXACT
    try:
        made = pyarrow.array(values, memory_pool=_POOL)
        if is_exact or (isinstance(made, pyarrow.Array) and is_same(made.to_pylist(), [*values])):
            return made
    except (pyarrow.ArrowException, OverflowError, TypeError, ValueError):
        pass
    try:
        return _encode(values)
    except UnicodeEncodeError as error:
        message = f"the column `{name}` holds half a character (a lone surrogate): {error.reason}"
        raise recipe_error(message, "correct the text in the data", "dataset") from error


def image_array(images: Iterable[list[Any]]) -> pyarrow.Array:
    """Return the images of each row, as `as_image` returns them, as an Arrow array."""
    return pyarrow.array(images, _IMAGES_TYPE)


def message_array(texts: Mapping[str, Sequence[str]]) -> pyarrow.Array:
    """Return prompts that have one message of each role, by their texts."""
    listed = [*chain.from_iterable(zip(*texts.values(), strict=True))]
    contents = pyarrow.array(listed, memory_pool=_POOL)
    roles = pyarrow.array([*texts] * (len(listed) // len(texts)), memory_pool=_POOL)
    ends = pyarrow.array(range(0, len(listed) + 1, len(texts)), pyarrow.int32())
    messages = pyarrow.StructArray.from_arrays([roles, contents], names=["role", "content"])
    return pyarrow.ListArray.from_arrays(ends, messages)


def join(parts: Sequence[Mapping[str, Any] | pyarrow.Table]) -> pyarrow.Table:
    """Return the rows of several tables, or mappings of columns, as one table.

    A column that has different types in them is encoded.
    """
    columns = [_columns(part) if isinstance(part, pyarrow.Table) else part for part in parts]
    names = dict.fromkeys(chain.from_iterable(columns))
    sizes = [len(next(iter(part.values()), ())) for part in columns]
    return pyarrow.table(
        {name: _join_column([part.get(name) for part in columns], sizes) for name in names}
    )


def beside(left: pyarrow.Table, right: pyarrow.Table) -> pyarrow.Table:
    """Return a table with the columns of two, row by row."""
    return pyarrow.table({**_columns(left), **_columns(right)})


def _columns(table: pyarrow.Table) -> dict[str, pyarrow.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))


def _join_column(parts: Sequence[Any], sizes: Sequence[int]) -> pyarrow.ChunkedArray:
    """Return the parts of a column as one; a part that there is not is as many nulls."""
    kinds = {part.type for part in parts if part is not None} - {pyarrow.null()}
    kind = _BYTES if len(kinds) > 1 else next(iter(kinds), pyarrow.null())
    chunks: list[pyarrow.Array] = []
    for part, size in zip(parts, sizes, strict=True):
        if part is None or part.type == pyarrow.null():
            chunks.append(pyarrow.nulls(size, kind))
        else:
            pieces = part.chunks if isinstance(part, pyarrow.ChunkedArray) else [part]
            chunks += [each if each.type == kind else _encode(values_of(each)) for each in pieces]
    return pyarrow.chunked_array(chunks, kind)


def select_rows(
    table: pyarrow.Table, places: Iterable[int], *, without: bool = False
) -> pyarrow.Table:
    """Return the rows at some places, or all but these, in the order of the table."""
    mask = numpy.full(len(table), without)
    mask[[*places]] = not without
    return table.filter(pyarrow.array(mask))


def iterate_blocks(table: pyarrow.Table, names: Iterable[str] | None = None) -> Iterator[Columns]:
    """Yield the values of all or some columns, block by block; None in those that there are not."""
    wanted = list(table.column_names if names is None else names)
    present = table.select([name for name in wanted if name in table.column_names])
    for first in range(0, len(table), BLOCK_ROWS):
        block = present.slice(first, BLOCK_ROWS)
        empty = [None] * min(BLOCK_ROWS, len(table) - first)
        yield {
            name: values_of(block[name]) if name in present.column_names else empty
            for name in wanted
        }


def iterate_rows(table: pyarrow.Table, names: Iterable[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a table with all or some of its columns; None in those that there are not."""
    for block in iterate_blocks(table, names):
        yield from rows_of(block)


def as_dataset(table: pyarrow.Table) -> Dataset:
    """Return the rows as a `Dataset`; images are decoded when a row is read."""
    features = Features.from_arrow_schema(table.schema)
    for name in table.column_names:
        if table[name].type == _BYTES:
            features[name] = ExactValue(ENCODED)
    if IMAGES in features:
        features[IMAGES] = List(RgbImage())
    # Otherwise `datasets` would hash the whole table.
    return Dataset(table, DatasetInfo(features=features), fingerprint=uuid4().hex[:16])


def values_of(stored: pyarrow.Array | pyarrow.ChunkedArray) -> list[Any]:
    """Return the values of a column as they were."""
    values: list[Any] = stored.to_pylist()
    if stored.type != _BYTES:
        return values
    return [None if each is None else decode_value(each) for each in values]


def _encode(values: Sequence[Any]) -> pyarrow.Array:
    return pyarrow.array([None if each is None else encode_value(each) for each in values], _BYTES)


def similar_rows(rows: pyarrow.Table, others: Sequence[pyarrow.Table]) -> pyarrow.Table:
    """Return the rows whose last message is that of one of the other rows; all if the columns do not tell."""
    texts = _last_texts(rows["prompt"])
    known = [_last_texts(each["prompt"]) for each in others if len(each)]
    if texts is None or any(each is None for each in known):
        return rows
    values = pyarrow.chunked_array(
        [chunk for each in known if each is not None for chunk in each.chunks], pyarrow.string()
    )
    return rows.filter(pyarrow.compute.is_in(texts, values.combine_chunks()))


def _last_texts(prompts: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray | None:
    """Return the text of each prompt's last message; None if contents are not texts."""
    kind = prompts.type
    if pyarrow.types.is_string(kind):
        return prompts
    if not pyarrow.types.is_list(kind) or kind.value_type.field("content").type != pyarrow.string():
        return None
    lasts = (pyarrow.compute.subtract(chunk.offsets[1:], 1) for chunk in prompts.chunks)
    contents = (chunk.values.field("content") for chunk in prompts.chunks)
    chunks = [texts.take(last) for texts, last in zip(contents, lasts, strict=True)]
    return pyarrow.chunked_array(chunks, pyarrow.string())


def fingerprint(tables: Iterable[pyarrow.Table]) -> str:
    """Return the SHA-256 in hex of the values of tables, in order."""
    digest = hashlib.sha256()
    for table in tables:
        digest.update(f"{len(table)} rows\n".encode())
        columns = sorted({*table.column_names} - {IMAGES})
        for name in columns:
            digest.update(f"{name}: {table[name].type}\n".encode())
        for first in range(0, len(table), BLOCK_ROWS):
            block = table.select(columns).slice(first, BLOCK_ROWS).combine_chunks()
            # Taken out of the table, its buffers hold no other rows.
            for batch in block.take(pyarrow.array(range(len(block)))).to_batches():
                digest.update(batch.serialize())
        for row in iterate_rows(table, [IMAGES] if IMAGES in table.column_names else []):
            digest.update(f"{canonical_json(images.name_images(row[IMAGES]))}\n".encode())
    return digest.hexdigest()


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
            raise RunError(f"an image {error.seen}", error.row_fix) from error


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
