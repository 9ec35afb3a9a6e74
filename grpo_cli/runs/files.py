"""Writing files so that each is whole or not there at all, reading them as they come, and sizes.

Owns the version of what is written, and what is made of numbers that no measurement gives.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LONGEST_NUMBER = 18
SCHEMA_VERSION = 1
"""Version of a run folder's layout and of every record in it."""


def write_text(path: Path, text: str) -> None:
    """Writes a file under a temporary name beside it, then renames."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        # JSON's own escape stands for what UTF-8 cannot hold: half of a surrogate pair.
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes JSON (nulls kept, keys in the order given) as `write_text` does."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def parse_json(text: str | bytes) -> Any:
    """What a text of JSON says; NaN, infinities and numbers of more than 18 digits become null.

    Raises:
        ValueError: It is no JSON, or nested too deeply to read.
    """
    try:
        return json.loads(
            text, parse_constant=lambda _: None, parse_float=_read_float, parse_int=_read_int
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def finite(value: Any) -> Any:
    """Plain values with null in the place of NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; an empty one where there is no such file, or it is damaged."""
    try:
        # Anything but a file may keep its reader waiting.
        found = parse_json(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_float(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _read_int(text: str) -> int | None:
    return int(text) if len(text) <= _LONGEST_NUMBER else None


def measure_bytes(path: Path) -> int:
    """Bytes of a file, or of all files under a folder; nothing of what lies behind a link."""
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum(measure_bytes(child) for child in path.iterdir())
    except OSError:
        # It went meanwhile, or may not be read.
        return 0
