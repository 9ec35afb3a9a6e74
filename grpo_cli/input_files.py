"""Files that a user names, opened in one place: a pipe or a device, which might never end, is refused."""

import errno
import os
from pathlib import Path
from typing import IO

_SPECIAL = "is a pipe, a socket or a device, not a file"


def find_fault(path: Path | str) -> str | None:
    """Return why a path cannot be opened as a file, such as `there is no file a.py`; None if it can be."""
    if not os.path.exists(path):
        return f"there is no file {path}"
    if os.path.isdir(path):
        return f"{path} is a folder, not a file"
    return f"{path} {_SPECIAL}" if _is_special(path) else None


def open_input(path: Path | str) -> IO[bytes]:
    """Open a file to read its bytes, or raise `OSError`."""
    if _is_special(path):
        raise OSError(errno.ENODEV, f"it {_SPECIAL}", str(path))
    return open(path, "rb")


def read_input(path: Path | str) -> bytes:
    """Return the bytes of a file; raises as `open_input` does."""
    with open_input(path) as file:
        return file.read()


def read_input_text(path: Path | str, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8; raises as `open_input` does, or `UnicodeDecodeError`."""
    return read_input(path).decode("utf-8", errors)


def _is_special(path: Path | str) -> bool:
    # The pipe of a shell (`/dev/stdin`, `<(…)`) leads to no path; one that has a path may never be written to.
    target = os.path.realpath(path)
    return os.path.exists(target) and not (os.path.isfile(target) or os.path.isdir(target))
