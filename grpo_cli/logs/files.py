"""Opens a log and yields its records as they were logged, whatever file it is; told apart by content."""

import csv
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from grpo_cli.errors import SetupError, UsageError, pip
from grpo_cli.logs.completions import TEXTS
from grpo_cli.logs.console import Raw, TextReader, read_tables

_HEAD = 2**16
"""Bytes that tell what a file is."""
_CHUNK = 2**20
_LIST = re.compile(r'"log_history"\s*:\s*\[')
_FACT = re.compile(r'"(max_steps|logging_steps|num_train_epochs|global_step)"\s*:\s*(\d+)')
_NAMED = re.compile(r"reward|loss|step|score", re.I)


class LogFile:
    """A log: its records in order, and what it says of settings beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        """Settings that the file names outside of its records."""
        self.notes: list[str] = []
        """Lines of text that are no records."""
        self.kind = "console"
        """What kind of file it is."""

    def read(self) -> Iterator[Raw]:
        """Yield the records; raises `UsageError` if this file cannot hold any."""
        with self.path.open("rb") as file:
            head = file.read(_HEAD)
        if not head.strip():
            raise UsageError(f"{self.path} is empty", "name a log with records")
        if head.startswith(b"PAR1"):
            yield from self._as("parquet", self._read_parquet())
        elif head.startswith(b"SQLite format 3"):
            yield from self._as("database", self._read_database())
        elif head.startswith(b":W&B"):
            yield from self._as("W&B", self._read_wandb())
        elif _is_events(head):
            yield from self._as("TensorBoard", self._read_events())
        elif head.startswith(b"PK\x03\x04") or b"\x00\x00\x00" in head[:4096]:
            raise UsageError(
                f"{self.path} is a binary file, not a log", "name a log, or its folder"
            )
        else:
            yield from self._read_text(head)

    def _as(self, kind: str, records: Iterable[Raw]) -> Iterator[Raw]:
        self.kind = kind
        yield from records

    def _read_text(self, head: bytes) -> Iterator[Raw]:
        with _open_text(self.path, head) as file:
            start = file.read(_HEAD)
            file.seek(0)
            begin = start.lstrip()
            if re.match(r"\[\s*\{", begin):
                yield from self._as("JSON", map(_flat, _stream_list(file)))
            elif begin.startswith("{") and not _is_lines(begin):
                yield from self._as("JSON", self._read_object(file))
            elif begin.startswith("{"):
                yield from self._as("JSON Lines", self._read_lines(file))
            elif (delimiter := _find_delimiter(begin)) is not None:
                yield from self._as("CSV", csv.DictReader(file, delimiter=delimiter))
            elif "<table" in start and "<th" in start:
                yield from self._as("HTML", read_tables(file.read()))
            else:
                yield from self._read_console(file)

    def _read_console(self, lines: Iterable[str]) -> Iterator[Raw]:
        reader = TextReader()
        self.notes = reader.notes
        yield from reader.read(lines)

    def _read_lines(self, file: IO[str]) -> Iterator[Raw]:
        for line in file:
            # A line that is torn is passed over.
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield _flat(record)

    def _read_object(self, file: IO[str]) -> Iterator[Raw]:
        """Yield the records of one JSON object: of `trainer_state.json`, a notebook, a table, or a summary."""
        start = file.read(_HEAD)
        if (match := _LIST.search(start)) is not None:
            self.facts |= dict(_FACT.findall(start[: match.start()]))
            yield from map(_flat, _stream_list(chain([start[match.end() - 1 :]], _chunks(file))))
            return
        try:
            value = json.loads(start + file.read())
        except (ValueError, RecursionError):
            # Lines that begin with a dict, of which the first is torn or in Python's spelling.
            file.seek(0)
            self.kind = "console"
            yield from self._read_console(file)
            return
        yield from self._unpack(value)

    def _unpack(self, value: dict[str, Any]) -> Iterator[Raw]:
        """Yield the records of an object: itself, or those in its list."""
        if isinstance(cells := value.get("cells"), list):
            self.kind = "notebook"
            yield from self._read_notebook(cells)
        elif isinstance(history := value.get("log_history"), list):
            self.facts |= {key: each for key, each in value.items() if isinstance(each, int)}
            yield from map(_flat, history)
        elif isinstance(columns := value.get("columns"), list) and "data" in value:
            for row in value["data"]:
                yield dict(zip(columns, row, strict=False))
        else:
            lists = [each for each in value.values() if isinstance(each, list)]
            records = [
                each for each in lists if each and all(isinstance(one, dict) for one in each)
            ]
            numbers = {
                name: each
                for name, each in value.items()
                if isinstance(each, list) and each and isinstance(each[0], int | float)
            }
            longest = max(records, key=len, default=[])
            if len(longest) > 1 and not TEXTS & value.keys():
                yield from map(_flat, longest)
            elif numbers and max(map(len, numbers.values())) > 1:
                width = max(map(len, numbers.values()))
                alike = {name: each for name, each in numbers.items() if len(each) == width}
                yield from (
                    dict(zip(alike, row, strict=True)) for row in zip(*alike.values(), strict=True)
                )
            else:
                yield _flat(value)

    def _read_notebook(self, cells: list[Any]) -> Iterator[Raw]:
        for output in (each for cell in cells for each in cell.get("outputs", ())):
            data = output.get("data", {})
            if "text/html" in data and "<table" in (page := _join(data["text/html"])):
                yield from read_tables(page)
                continue
            text = _join(output.get("text") or data.get("text/plain") or "")
            reader = TextReader()
            yield from reader.read(io.StringIO(text, newline=None))
            self.notes += reader.notes

    def _read_parquet(self) -> Iterator[Raw]:
        parquet = cast(Any, _import("pyarrow.parquet", "pyarrow"))
        for batch in parquet.ParquetFile(self.path).iter_batches():
            yield from batch.to_pylist()

    def _read_events(self) -> Iterator[Raw]:
        """Yield the scalars of a TensorBoard file, by step."""
        loader = cast(
            Any, _import("tensorboard.backend.event_processing.event_file_loader", "tensorboard")
        )
        util = cast(Any, _import("tensorboard.util.tensor_util", "tensorboard"))
        steps: dict[int, Raw] = {}
        for event in loader.EventFileLoader(str(self.path)).Load():
            for value in event.summary.value:
                with suppress(TypeError, ValueError):
                    array = util.make_ndarray(value.tensor)
                    steps.setdefault(event.step, {"step": event.step})[value.tag] = float(array)
        yield from (steps[step] for step in sorted(steps))

    def _read_wandb(self) -> Iterator[Raw]:
        """Yield the history of an offline `.wandb` file."""
        datastore = cast(Any, _import("wandb.sdk.internal.datastore", "wandb"))
        proto = cast(Any, _import("wandb.proto.wandb_internal_pb2", "wandb"))
        store = datastore.DataStore()
        store.open_for_scan(str(self.path))
        while (data := store.scan_data()) is not None:
            record = proto.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                names = ["/".join(each.nested_key) or each.key for each in items]
                yield {
                    name: json.loads(each.value_json)
                    for name, each in zip(names, items, strict=True)
                }

    def _read_database(self) -> Iterator[Raw]:
        """Yield the metrics of Trackio's database: a table `metrics` with `step` and a column of JSON."""
        import sqlite3

        connection = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
        try:
            query = "SELECT run_name, step, metrics FROM metrics ORDER BY id"
            rows = connection.execute(query).fetchall()
        except sqlite3.Error as error:
            raise UsageError(f"{self.path}: {error}", "name a database of Trackio") from None
        finally:
            connection.close()
        # The run that was logged last.
        newest = rows[-1][0] if rows else ""
        for name, step, metrics in rows:
            if name == newest:
                yield {"step": step, **json.loads(metrics)}


def _import(module: str, package: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise SetupError(
            f"this log needs {package}, which is not installed", pip(f"install {package}")
        ) from None


def _open_text(path: Path, head: bytes) -> IO[str]:
    """Open a text, also one that is packed or of a Windows shell; `\\r` ends a line too."""
    if head.startswith(b"\x1f\x8b"):
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    marks = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb": "utf-8-sig"}
    return path.open(encoding=marks.get(head[:2], "utf-8"), errors="replace")


def _is_events(head: bytes) -> bool:
    """Return whether a file is TensorBoard's: its first record names the version of the format."""
    return b"brain.Event:" in head[:64]


def _is_lines(text: str) -> bool:
    """Return whether a text that begins with `{` is JSON Lines: its first line is whole."""
    first, _, rest = text.partition("\n")
    if len(first) >= _HEAD - 1:
        return False
    try:
        json.loads(first)
    except ValueError:
        return False
    return bool(rest.strip())


def _find_delimiter(text: str) -> str | None:
    """Return what separates the columns of a CSV file; None if it is not one."""
    first = text.partition("\n")[0]
    for delimiter in (",", "\t", ";"):
        names = first.split(delimiter)
        if len(names) > 2 and len(_NAMED.findall(first)) > 1 and "{" not in first:
            return None if any(":" in name or len(name) > 80 for name in names) else delimiter
    return None


def _chunks(file: IO[str] | io.TextIOBase) -> Iterator[str]:
    while chunk := file.read(_CHUNK):
        yield chunk


def _stream_list(texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON list, one by one; what follows it, or is torn, is left out."""
    decoder, buffer, place = json.JSONDecoder(), "", 0
    texts = iter(_chunks(texts) if isinstance(texts, io.TextIOBase) else texts)
    buffer = next(texts, "")
    place = buffer.find("[") + 1
    while True:
        while place < len(buffer) and buffer[place] in " \t\r\n,":
            place += 1
        try:
            value, place = decoder.raw_decode(buffer, place)
        except ValueError:
            if buffer[place : place + 1] == "]" or not (more := next(texts, "")):
                return
            buffer, place = buffer[place:] + more, 0
            continue
        if isinstance(value, dict):
            yield value


def _flat(record: dict[str, Any], prefix: str = "") -> Raw:
    """Return a record whose nested numbers have one name; `data` and `metrics` only hold them."""
    if not prefix and dict not in map(type, record.values()):
        return record
    values: Raw = {}
    for name, value in record.items():
        if isinstance(value, dict):
            own = prefix if name in ("data", "metrics", "logs") else f"{prefix}{name}/"
            values |= _flat(value, own)
        else:
            values[f"{prefix}{name}"] = value
    return values


def _join(text: Any) -> str:
    return "".join(text) if isinstance(text, list) else str(text)
