"""Exclusive folder lock (flock), released when the process exits."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_cli.errors import UsageError


@contextmanager
def lock_folder(folder: Path, work: str) -> Iterator[None]:
    """Keep other commands from doing the same work in a folder.

    Args:
        folder: Where the lock lies, as `.lock`.
        work: What is done there, such as `measuring`.

    Raises:
        UsageError: Another command does it already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another command is {work} in {folder}. Fix: wait for it, or stop it"
            ) from None
        yield
