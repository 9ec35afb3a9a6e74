"""`trackers.json`: which runs of which trackers a run folder has, and what went wrong with them.

By it an attempt goes on with the tracker's run of the attempt before, and what is handed over after
the end finds its way. Holds no secrets.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_cli.runs.files import SCHEMA_VERSION, read_object, write_json
from grpo_cli.runs.folder import RunFolder


@dataclass
class Ledger:
    """What is known of a run's trackers."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tracker → what finds its run again."""
    failures: dict[str, str] = field(default_factory=dict)
    """Tracker → why it is lacking something, in the present attempt."""

    def write(self, folder: RunFolder) -> None:
        """Writes it into a run folder."""
        write_json(folder.trackers, {"schema_version": SCHEMA_VERSION, **asdict(self)})


def read_ledger(folder: RunFolder) -> Ledger:
    """A run's trackers; none where nothing is written, or it is damaged."""
    try:
        told = read_object(folder.trackers)
        return Ledger(
            {name: dict(run) for name, run in told["runs"].items()},
            {name: str(why) for name, why in told["failures"].items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return Ledger()


def note_failure(folder: RunFolder, tracker: str, why: str) -> None:
    """Writes down what a tracker lacks; the first reason is kept. A full disk loses the note."""
    ledger = read_ledger(folder)
    ledger.failures.setdefault(tracker, why)
    try:
        ledger.write(folder)
    except OSError as error:
        print(f"{tracker}: {why} (and this cannot be written down: {error})")
