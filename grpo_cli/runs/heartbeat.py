"""Signs of life: each worker touches a file as it gets on, and the supervisor looks at their times.

Owns the files and what counts as a stall. A run whose workers have not begun to train gives no sign yet,
and is not judged: a download may take its time.
"""

import time
from pathlib import Path

from grpo_cli.runs.folder import RunFolder

_EVERY_S = 1.0
_LONGEST_LOOK_S = 5.0
"""More between two looks was not spent awake."""


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


class BeatWatch:
    """How long every worker has been still, by the time that the watcher itself was awake.

    Neither a step of the clock counts, nor the time for which the machine, or this process with its workers, was
    suspended.
    """

    def __init__(self, run: RunFolder) -> None:
        """Forget the signs of an earlier attempt: those of this one's workers come only once they have begun."""
        for file in run.launch.glob("rank_*.beat"):
            file.unlink(missing_ok=True)
        self._run = run
        self._seen: set[tuple[str, int]] = set()
        self._still_s = 0.0
        self._looked = time.monotonic()

    def look(self) -> float:
        """Return the seconds since the last sign; 0 if no worker has begun. To be called every second or so."""
        now = time.monotonic()
        beats = {(file.name, _read_time(file)) for file in self._run.launch.glob("rank_*.beat")}
        if beats != self._seen or not beats:
            self._seen, self._still_s = beats, 0.0
        else:
            self._still_s += min(now - self._looked, _LONGEST_LOOK_S)
        self._looked = now
        return self._still_s


def _read_time(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _beat(run: RunFolder, rank: int) -> Path:
    return run.launch / f"rank_{rank}.beat"
