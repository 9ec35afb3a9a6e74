"""What a program holds on this machine: its working folder, files without names, threads.

Owns walking a tree that a hostile program made: deep, large, locked, full of links; and removing it.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

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


def is_over(folder: str, most_bytes: int, pids: Sequence[int] = (), file_bytes: int = 0) -> bool:
    """Whether files take more than this, or are more than a working folder may hold.

    Args:
        folder: The working folder, with all below it.
        most_bytes: How much files may take.
        pids: Processes whose deleted files count too.
        file_bytes: Size that a deleted file counts as if only a mapping of it is left.
    """
    size, entries = sum(_deleted_bytes(pid, folder, file_bytes) for pid in pids), 0
    waiting = [folder]
    while waiting and size <= most_bytes:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    entries += 1
                    size += _size_of(entry)
                    if size > most_bytes or entries > MOST_ENTRIES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            # It vanished; if it only moved, it is counted the next time.
            continue
        except OSError:
            # Locked against us, or deeper than a path can say: anything could be in there.
            return True
    return size > most_bytes


def find_descendants(pid: int) -> list[int]:
    """The processes that a process and its descendants started (Linux)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        own = [int(each) for each in file.read().split()]
        return own + [inner for each in own for inner in find_descendants(each)]
    return []


def count_threads(pids: Sequence[int]) -> int:
    """The threads of these processes, those that ended left out."""
    count = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            count += os.stat(f"/proc/{pid}/task").st_nlink - 2
    return count


def _deleted_bytes(pid: int, folder: str, file_bytes: int) -> int:
    """What the files take that a process keeps, open or mapped, after it deleted them."""
    sizes: dict[int, int] = {}
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as found:
        for entry in found:
            with contextlib.suppress(OSError):
                seen = entry.stat()
                if not seen.st_nlink and os.readlink(entry.path).startswith(folder):
                    sizes[seen.st_ino] = seen.st_blocks * 512
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
        for line in file:
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and parts[5].startswith(folder) and line.endswith(" (deleted)\n"):
                sizes.setdefault(int(parts[4]), file_bytes)
    return sum(sizes.values())


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
