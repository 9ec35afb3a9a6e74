"""Signs of life: each worker touches a file as it gets on, and the supervisor looks at their times.

Owns the files and what counts as a stall. A run whose workers have not begun to train gives no sign yet,
and is not judged: a download may take its time.
"""

import time
from pathlib import Path

from grpo_cli.runs.folder import RunFolder

_EVERY_S = 1.0


class Heartbeat:
    """One worker's sign of life."""

    def __init__(self, run: RunFolder, rank: int) -> None:
        self._file = _beat(run, rank)
        self._last = 0.0

    def beat(self) -> None:
        """Says that something was got done; costs nothing more often than once a second."""
        now = time.monotonic()
        if now - self._last >= _EVERY_S:
            self._last = now
            self._file.touch()


def seconds_since_beat(run: RunFolder) -> float | None:
    """How long every worker has been still; None where none has begun."""
    times = []
    for file in run.launch.glob("rank_*.beat"):
        try:
            times.append(file.stat().st_mtime)
        except FileNotFoundError:
            continue
    return time.time() - max(times) if times else None


def clear_beats(run: RunFolder) -> None:
    """Forgets the signs of an earlier attempt."""
    for file in run.launch.glob("rank_*.beat"):
        file.unlink(missing_ok=True)


def _beat(run: RunFolder, rank: int) -> Path:
    return run.launch / f"rank_{rank}.beat"
