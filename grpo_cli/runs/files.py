"""Writing files so that each is whole or not there at all, the version of what is written, and sizes."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

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


def measure_bytes(path: Path) -> int:
    """Bytes of a file, or of all files under a folder; nothing of what lies behind a link."""
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum(measure_bytes(child) for child in path.iterdir())
    except OSError:
        # It went meanwhile, or may not be read.
        return 0
