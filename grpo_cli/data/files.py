"""Row files: JSON, JSONL, CSV and parquet, distinguished by their ending and read without `datasets`."""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from grpo_cli.data.rows import Row, columns_of, show, show_names, suggest
from grpo_cli.errors import RecipeError, recipe_error
from grpo_cli.input_files import find_fault
from grpo_cli.issues import Issue

LONGEST_CELL = 2**27
"""Characters in a CSV cell; the library's own limit of 131,072 is less than a long document."""
PREVIEW_ROWS = 1024
"""Rows of a file that a check parses."""
WHOLE_ROWS = 20_000
"""Rows of a split that a check parses where it has to know all of them."""
_BLOCK_CHARACTERS = 2**20
"""Characters of lines that are parsed together."""
_CONSTANTS = {"Infinity": math.inf, "-Infinity": -math.inf}
"""What is no JSON and Python reads all the same; `NaN`, by which pandas writes an empty cell, is None."""
_DECODER = json.JSONDecoder(parse_constant=_CONSTANTS.get)
ENDINGS = ".json, .jsonl, .csv or .parquet (the first three also with .gz)"


@dataclass(frozen=True)
class RowFile:
    """A file of rows that exists, and the place in the recipe that names it."""

    path: Path
    field: str
    """Dotted path into the recipe, such as `dataset.train`."""

    @property
    def format(self) -> str:
        """The ending that tells how to read it, such as `.jsonl`; compression left out."""
        suffixes = [suffix.lower() for suffix in self.path.suffixes if suffix.lower() != ".gz"]
        ending = suffixes[-1] if suffixes else ""
        return ".jsonl" if ending == ".ndjson" else ending

    def problem(self, message: str, fix: str) -> RecipeError:
        """Return an error about this file."""
        return recipe_error(f"{self.path}: {message}", fix, self.field)

    def open(self, *, newline: str | None = None) -> IO[str]:
        """Open the text, unpacked; a byte order mark is skipped."""
        if self.path.suffix.lower() == ".gz":
            return gzip.open(self.path, "rt", encoding="utf-8-sig", newline=newline)
        return self.path.open(encoding="utf-8-sig", newline=newline)


def find_files(paths: Iterable[str], field: str) -> list[RowFile]:
    """Return the files that a recipe names at `field`; raises `RecipeError` with all wrong paths."""
    named = list(paths)
    fields = [f"{field}.{index}" if len(named) > 1 else field for index in range(len(named))]
    files = [RowFile(Path(path).expanduser(), at) for path, at in zip(named, fields, strict=True)]
    problems = [problem for file in files if (problem := _check_file(file))]
    if problems:
        raise RecipeError(problems)
    return files


def _check_file(file: RowFile) -> Issue | None:
    path = file.path
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            seen = f"{path} is a folder that `save_to_disk` of datasets wrote"
            fix = f"write a file: load_from_disk({path.name!r}).to_parquet('{path.name}.parquet')"
            return Issue(seen, f"{fix}, of each split its own", file.field)
        inside = show_names(sorted(child.name for child in path.iterdir()))
        return Issue(f"{path} is a folder; it holds {inside}", "name a file", file.field)
    if not path.exists():
        files = path.parent.iterdir() if path.parent.is_dir() else ()
        siblings = sorted(each.name for each in files if each.is_file() and each.name[0] != ".")
        fix = suggest(path.name, siblings, "correct the path; it is relative to the recipe")
        beside = f"; {path.parent} holds {show_names(siblings)}" if siblings else ""
        return Issue(f"there is no file {path}{beside}", fix, file.field)
    if fault := find_fault(path):
        return Issue(fault, "write the rows to a file and name it", file.field)
    if file.format not in _READERS:
        return Issue(
            f"{path.name} ends in {path.suffix or 'nothing'}; it cannot be told how to read it",
            f"use a file that ends in {ENDINGS}",
            file.field,
        )
    return None


def iterate_rows(file: RowFile) -> Iterator[Row]:
    """Yield the rows of one file, in order, or raise `RecipeError`."""
    found = False
    try:
        for row in _READERS[file.format](file):
            found = True
            yield row
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text: {error.reason} at byte {error.start}"
        raise file.problem(*_recognize(file, message, "save it as UTF-8")) from error
    except (OSError, EOFError, zlib.error) as error:
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise file.problem(message, "check the file and its permissions") from error
    if not found:
        raise file.problem("has no rows", "name a file with at least one row")


_OTHER_CONTENT = (
    (b"\x1f\x8b", "is packed by gzip", "give its name the ending .gz"),
    (b"PK\x03\x04", "is a zip archive or a spreadsheet", "unpack it, or save the table as CSV"),
    (b"version https://git-lfs", "is a Git LFS pointer, not the file itself", "git lfs pull"),
    (
        b"<!doctype html",
        "is a web page",
        "download the file itself: /resolve/, not /blob/, on the hub",
    ),
)
"""How files begin that are often taken for another, what they are, and how to get the right one."""


def _recognize(file: RowFile, message: str, fix: str) -> tuple[str, str]:
    """Return the message and fix of a file that cannot be read; better ones if its beginning tells what it is."""
    with file.path.open("rb") as raw:
        start = raw.read(32)
    found = (each[1:] for each in _OTHER_CONTENT if start.lower().startswith(each[0].lower()))
    return next(found, (message, fix))


def _read_jsonl(file: RowFile) -> Iterator[Row]:
    number = 0
    with file.open() as text:
        while lines := text.readlines(_BLOCK_CHARACTERS):
            try:
                # Much faster than one by one.
                rows = _DECODER.decode(f"[{','.join(lines)}]")
            except (ValueError, RecursionError):
                rows = []
            if len(rows) == len(lines) and {*map(type, rows)} == {dict}:
                yield from rows
            else:
                yield from _read_lines(file, lines, number)
            number += len(lines)


def _read_lines(file: RowFile, lines: Iterable[str], first: int) -> Iterator[Row]:
    """Yield the rows of lines one by one, so that a wrong one is named."""
    for number, line in enumerate(lines, first + 1):
        if line.isspace():
            continue
        try:
            value = _DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            message = f"line {number} is not JSON ({error}): {show(line.strip())}"
            fix = "write one whole JSON object a line"
            raise file.problem(*_recognize(file, message, fix)) from error
        yield _as_row(file, value, f"line {number}")


def iterate_lines(file: RowFile) -> Iterator[bytes]:
    """Yield the lines of a file of JSON lines that are not blank, as they are written."""
    unpack = gzip.open if file.path.suffix.lower() == ".gz" else open
    with unpack(file.path, "rb") as lines:
        for line in lines:
            if not line.isspace():
                yield line


def parse_line(line: bytes) -> Row | None:
    """Return the row of a line; None if there is none."""
    try:
        row = _DECODER.decode(line.decode("utf-8-sig").strip())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _read_json(file: RowFile) -> Iterator[Row]:
    with file.open() as text:
        content = text.read()
    if not content.strip():
        return
    try:
        value = json.loads(content, parse_constant=_CONSTANTS.get)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.lineno > 1:
            yield from _read_jsonl(file)
            return
        message = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise file.problem(message, "correct the file there") from error
    except (ValueError, RecursionError) as error:
        raise file.problem(f"cannot be read as JSON: {error}", "simplify that value") from error
    if isinstance(value, dict):
        value = value.get("data", value)
    if not isinstance(value, list):
        raise file.problem(
            f"holds {show(value)}",
            'make it a list of objects, {"data": [...]}, or one object a line in a .jsonl file',
        )
    for number, item in enumerate(value, 1):
        yield _as_row(file, item, f"row {number}")


def _as_row(file: RowFile, value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        fix = 'make every row an object, such as {"question": "…", "answer": "…"}'
        raise file.problem(f"{where} is not an object but {show(value)}", fix)
    return value


def _read_csv(file: RowFile) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_CELL)
    with file.open(newline="") as text:
        reader = csv.DictReader(text, strict=True)
        try:
            header = list(reader.fieldnames or [])
            if not header:
                raise file.problem("begins with an empty line", "put the column names in line 1")
            separator = next((mark for mark in ";\t|" if mark in header[0]), None)
            if len(header) == 1 and separator:
                mark = "tabs" if separator == "\t" else f"`{separator}`"
                message = f"the columns are separated by {mark}, not commas: {show(header[0])}"
                raise file.problem(message, "save it with commas between the cells, or as .jsonl")
            if len(set(header)) != len(header):
                twice = show_names(sorted({name for name in header if header.count(name) > 1}))
                raise file.problem(f"the header names {twice} twice", "rename one of them")
            for row in reader:
                if None in row:
                    message = (
                        f"line {reader.line_num} has more cells than the header's {len(header)}"
                    )
                    raise file.problem(message, 'put cells that hold commas in "quotes"')
                yield row
        except csv.Error as error:
            message = f"line {reader.line_num} is not CSV: {error}"
            raise file.problem(message, "correct the quotes, or save the rows as .jsonl") from error


def _read_parquet(file: RowFile) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(file.path).iter_batches(PREVIEW_ROWS):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        message = f"is not parquet: {str(error).rstrip('.')}"
        raise file.problem(*_recognize(file, message, "write the file again")) from error


_READERS: dict[str, Callable[[RowFile], Iterator[Row]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def preview_file(file: RowFile, most: int = PREVIEW_ROWS) -> tuple[list[Row], int, set[str]]:
    """Return the first rows of a file, at most `most`, the number of all of them, and the columns seen.

    A JSONL file is parsed for its first rows only and its other lines are counted; CSV and JSON are read
    whole; of parquet, the first rows and the count in its footer.
    """
    rows = iterate_rows(file)
    first = list(islice(rows, most))
    if len(first) < most:
        return first, len(first), {*columns_of(first)}
    if file.format == ".jsonl":
        return first, sum(1 for _ in iterate_lines(file)), {*columns_of(first)}
    if file.format == ".parquet":
        import pyarrow.parquet

        count = pyarrow.parquet.read_metadata(file.path).num_rows
        return first, int(count), {*columns_of(first)}
    rest = list(rows)
    return first, len(first) + len(rest), {*columns_of([*first, *rest])}
