"""`status.json`: where a run stands, written whole by whoever is in charge at that moment."""

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from grpo_cli.errors import UsageError
from grpo_cli.runs.files import SCHEMA_VERSION, parse_json, write_json

State = Literal["pending", "running", "completed", "stopped", "failed"]
Moment = Annotated[float, Field(ge=0, lt=1e11)]
FINAL: frozenset[State] = frozenset({"completed", "stopped", "failed"})


@dataclass(frozen=True)
class Status:
    """Where a run stands."""

    state: State = "pending"
    phase: str = "starting"
    """What is going on now, in words: loading the model, measuring before training, training, …"""
    detail: str = ""
    """How far the phase is, where that is known."""
    step: int = 0
    """Optimizer steps done."""
    total_steps: int | None = None
    """Optimizer steps planned."""
    reason: str | None = None
    """Why it stopped or failed."""
    stopped_by: str | None = None
    """The rule of `training.stop_when` that stopped it, if one did."""
    traceback: str | None = None
    """Of a failure."""
    started_at: Moment = field(default_factory=time.time)
    """Seconds since the epoch."""
    updated_at: Moment = field(default_factory=time.time)
    """Seconds since the epoch."""
    schema_version: int = SCHEMA_VERSION

    @property
    def seconds(self) -> float:
        """From the start to the last sign of life; 0 if the clock was set back in between."""
        return max(self.updated_at - self.started_at, 0.0)


_STATUS = TypeAdapter(Status)


class StatusFile:
    """Reads and replaces `status.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Status:
        """The status; a fresh one where the file is not there yet.

        Raises:
            UsageError: The file is damaged.
        """
        if not self.path.exists():
            return Status()
        try:
            # Anything but a file may keep its reader waiting.
            values = parse_json(self.path.read_bytes()) if self.path.is_file() else None
            return _STATUS.validate_python(values)
        except FileNotFoundError:
            return Status()
        except ValueError:
            raise UsageError(
                f"{self.path} is damaged. Fix: delete it; the run's steps are in metrics.jsonl"
            ) from None

    def update(self, **changes: Any) -> Status:
        """Changes some fields and writes the file; a new phase starts without a detail."""
        status = self.read()
        if "phase" in changes:
            changes.setdefault("detail", "")
        status = replace(status, **changes, updated_at=time.time())
        write_json(self.path, asdict(status))
        return status
