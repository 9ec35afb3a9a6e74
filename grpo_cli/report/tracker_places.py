"""Where the trackers of a run keep it, for people: from the run folder's ledger alone."""

from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trackers.ledger import read_ledger

_PARTS = ("folder", "entity", "project", "name", "id")
"""What a tracker may know its run by, from the outside in."""
_FILES = {"wandb": "wandb"}
"""Folders in the run folder that hold what has not been sent yet."""


def list_places(run: RunFolder) -> dict[str, str]:
    """Tracker → what finds the run there; empty where it has none."""
    found = {}
    for tracker, known in read_ledger(run).runs.items():
        parts = [str(known[part]) for part in _PARTS if known.get(part)]
        files = run.path / _FILES.get(tracker, "")
        beside = f", files in {files}" if tracker in _FILES and files.is_dir() else ""
        found[tracker] = "/".join(parts) + beside
    return found
