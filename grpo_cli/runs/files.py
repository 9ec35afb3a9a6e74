"""Atomic writes, checked reads, sizes, and the lock of a folder."""

import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import UsageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA_VERSION = 1
"""Version of a run folder's layout and of every record in it."""


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name beside it, then rename it."""
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
    """Write JSON atomically; nulls and the order of keys are kept."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


_LONGEST_VALUE = 60
"""Characters of a value in a message."""
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; NaN and infinities become None. Raises `ValueError` for anything else."""
    # Several times as fast as `json`, but it knows no halves of surrogate pairs, and nests less deeply.
    import pydantic_core

    try:
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        pass
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def finite(value: Any) -> Any:
    """Return plain values with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of another program; empty if it is missing or damaged."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_file(
    path: Path,
    kind: Any,
    missing: Any = None,
    fix: str = "delete it, or the run with `grpo runs remove`",
) -> Any:
    """Return the JSON value of a type of `records.py` in a file of ours; raises `UsageError` if it is damaged.

    `missing` stands for the content if there is no such file; None is returned as it is.
    """
    try:
        value = parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if missing is None:
            return None
        value = missing
    except (OSError, ValueError) as error:
        raise damaged(path, error, fix) from None
    try:
        return type_adapter(kind).validate_python(value)
    except ValueError as error:
        raise damaged(path, error, fix) from None


@cache
def type_adapter(kind: Any) -> "TypeAdapter[Any]":
    """Return what validates values of a type."""
    # Files are written without it.
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def damaged(path: Path, error: OSError | ValueError, fix: str) -> UsageError:
    """Return the error of a file that is not what it should be: where, and what it holds there."""
    seen = "it is cut off, or not JSON"
    if isinstance(error, OSError):
        seen = (error.strerror or str(error)).lower()
    elif details := getattr(error, "errors", None):
        first = details(include_url=False)[0]
        where = f"`{'.'.join(map(str, first['loc']))}`" if first["loc"] else "it"
        value = json.dumps(first["input"], default=str, ensure_ascii=False)
        value = value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}…"
        should = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        seen = f"{where} is {value}; it {should}"
        if first["type"] == "dict_type":
            seen = f"{where} is {value}, not an object"
        elif first["type"] == "missing":
            seen = f"{where} is missing"
    return UsageError(f"{path} is damaged: {seen}", fix)


def read_tensors_header(path: Path) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Return how many bytes a safetensors file should have, and the shapes of its tensors, by its header.

    Source: safetensors' README: 8 bytes with the length of the header, the header as JSON, the data.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length < path.stat().st_size else b""
    try:
        tensors = parse_json(text)
        tensors.pop("__metadata__", None)
        end = max((each["data_offsets"][1] for each in tensors.values()), default=0)
        return 8 + length + end, {name: tuple(each["shape"]) for name, each in tensors.items()}
    except (AttributeError, LookupError, TypeError):
        raise ValueError("no safetensors header") from None


def measure_bytes(path: Path) -> int:
    """Return the bytes of a file, or of all files under a folder; links are not followed."""
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum(measure_bytes(child) for child in path.iterdir())
    except OSError:
        # Removed meanwhile, or not readable.
        return 0


@contextmanager
def lock_folder(folder: Path, work: str) -> Iterator[None]:
    """Lock a folder for some work until this process ends at the latest; raises `UsageError` if it is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another command is {work} in {folder}", "wait for it, or stop it"
            ) from None
        yield
