"""`metrics.jsonl`: one record a line, append-only, and how to follow it while it grows."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import SCHEMA_VERSION


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Appends one record as a line; NaN and infinities become null, since JSON has neither."""
    stamped = {"schema_version": SCHEMA_VERSION, "time": round(time.time(), 3), **record}
    line = json.dumps(_finite(stamped), ensure_ascii=False, allow_nan=False, default=str)
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{line}\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records; none where the file is not there."""
    return list(RecordTail(path).read_new())


class RecordTail:
    """Reads what was appended since the last look; a line that is still being written waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read_new(self) -> Iterator[dict[str, Any]]:
        """The records that came since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole, newline, _ = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            record = _read(line)
            if record is not None:
                yield record


def _read(line: bytes) -> dict[str, Any] | None:
    """A record; None for a line that a killed process left torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
