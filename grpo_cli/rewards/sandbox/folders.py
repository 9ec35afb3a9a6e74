"""The working folder of a program: how much it holds, and its end.

Owns walking a tree that a hostile program made: deep, large, locked, full of links.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

MOST_ENTRIES = 2000
"""Files and folders a working folder may hold; bounds the walk too."""


@contextlib.contextmanager
def working_folder() -> Iterator[str]:
    """A new folder, gone afterwards whatever it then holds."""
    folder = tempfile.mkdtemp(prefix="grpo-code-")
    try:
        yield folder
    finally:
        _remove(folder)


def is_over(folder: str, most_bytes: int) -> bool:
    """Whether the files below a folder take more than this, or are more than it may hold."""
    size = entries = 0
    waiting = [folder]
    while waiting:
        # What vanishes, or is locked against us, is the program's business: it is counted later.
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as found:
            for entry in found:
                entries += 1
                size += _size_of(entry)
                if size > most_bytes or entries > MOST_ENTRIES:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return False


def _size_of(entry: os.DirEntry[str]) -> int:
    with contextlib.suppress(OSError):
        return entry.stat(follow_symlinks=False).st_blocks * 512
    return 0


def _remove(folder: str) -> None:
    """Removes a tree; links in it are removed, not followed."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(folder)
        return
    # Folders without rights, or deeper than Python can walk.
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", folder], capture_output=True, check=False)
