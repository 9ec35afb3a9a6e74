"""`metrics.jsonl`: one record a line, append-only, and how to follow it while it grows."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from grpo_cli.runs.files import SCHEMA_VERSION, finite, parse_json

_KNOWN_BY = 256
"""Bytes: records bear their time, so no two of a run's files have the same at the same place."""


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Appends one record as a line; NaN and infinities become null, since JSON has neither."""
    stamped = {"schema_version": SCHEMA_VERSION, "time": round(time.time(), 3), **record}
    line = json.dumps(finite(stamped), ensure_ascii=False, allow_nan=False, default=str)
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{line}\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records; none where the file is not there."""
    return list(RecordTail(path).read_new())


@dataclass(frozen=True)
class Ends:
    """The beginning and the end of a file of records, read as far as somebody looks."""

    first: tuple[bytes, ...]
    last: tuple[bytes, ...]
    """Lines, the newest at the end; the same as `first` where the file is read whole."""
    share: float
    """Of the file that each of them is."""

    def count(self, event: str) -> int:
        """Records of an event in the whole file; an estimate where it is not read whole."""
        mark = f'"event": "{event}"'.encode()
        return round(sum(mark in line for line in self.first) / self.share)

    def from_first(self) -> Iterator[dict[str, Any]]:
        """Records in their order."""
        return (each for line in self.first if (each := _read(line)) is not None)

    def from_last(self) -> Iterator[dict[str, Any]]:
        """Records from the newest backwards."""
        return (each for line in reversed(self.last) if (each := _read(line)) is not None)


def read_ends(path: Path, block: int) -> Ends:
    """The two ends of a file of records; empty where it is not there.

    Args:
        path: The file.
        block: Bytes to read at each end; a file of up to twice as many is read whole.
    """
    if not path.is_file():
        return Ends((), (), 1.0)
    try:
        with path.open("rb") as file:
            head = file.read(2 * block)
            size = file.seek(0, os.SEEK_END)
            if size <= 2 * block:
                lines = tuple(head.rpartition(b"\n")[0].splitlines())
                return Ends(lines, lines, 1.0)
            file.seek(size - block)
            tail = file.read()
    except OSError:
        return Ends((), (), 1.0)
    first = head[:block].rpartition(b"\n")[0]
    last = tail.partition(b"\n")[2].rpartition(b"\n")[0]
    return Ends(tuple(first.splitlines()), tuple(last.splitlines()), block / size)


class RecordTail:
    """Reads what was appended since the last look; a line that is still being written waits.

    A file that was cut or replaced meanwhile (a run that goes on from a checkpoint) is read from its
    beginning again; `rewinds` counts that.
    """

    def __init__(self, path: Path, *, last_bytes: int | None = None) -> None:
        """Begins at the start of the file.

        Args:
            path: The file; it need not be there yet.
            last_bytes: Begin so many bytes before the end instead: for what is too large to read whole.
        """
        self.path = path
        self.rewinds = 0
        self._last_bytes = last_bytes
        self._offset = 0
        self._seen = b""
        """The end of what was read, by which the same file is known again."""

    def read_new(self) -> Iterator[dict[str, Any]]:
        """The records that came since the last call."""
        if not self.path.is_file():
            return
        try:
            with self.path.open("rb") as file:
                self._place(file)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return
        whole, newline, _ = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        self._seen = (self._seen + whole + newline)[-_KNOWN_BY:]
        for line in whole.splitlines():
            record = _read(line)
            if record is not None:
                yield record

    def _place(self, file: BinaryIO) -> None:
        """Goes to where reading ended, to the start of a file that is another one now."""
        if self._offset == 0 and self._last_bytes is not None:
            size = file.seek(0, os.SEEK_END)
            # The line in the middle of which this begins is no record, and is passed over as torn.
            self._offset = max(size - self._last_bytes, 0)
        file.seek(max(self._offset - len(self._seen), 0))
        if file.read(len(self._seen)) != self._seen:
            self._offset, self._seen = 0, b""
            self.rewinds += 1
        file.seek(self._offset)


def _read(line: bytes) -> dict[str, Any] | None:
    """A record; None for a line that a killed process left torn."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
