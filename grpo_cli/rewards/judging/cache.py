"""Verdicts kept on disk, so that an answer judged once costs nothing again.

Owns the files: content-addressed, whole or absent, shared by any number of processes. Holds
verdicts only, neither texts nor keys.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_cli.rewards.judging.replies import Verdict, read_verdict_pairs
from grpo_cli.runs.files import write_text

_FORMAT_VERSION = 1
"""Raise it where verdicts of the same request would mean something else."""

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where verdicts are kept: `judge` under `$GRPO_CACHE`, or under `grpo` in the user's cache."""
    if own := os.environ.get("GRPO_CACHE"):
        return Path(own).expanduser() / "judge"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo" / "judge"


def hash_content(content: Any) -> str:
    """The SHA-256 of plain values, in hexadecimal."""
    # ASCII escapes keep lone surrogates, which UTF-8 cannot write.
    written = json.dumps([_FORMAT_VERSION, content], sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()


class VerdictCache:
    """A folder of verdicts; a folder that cannot be written is reported once and then left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writes = True

    def read(
        self, key: str, answers: int, scale: tuple[float, float]
    ) -> tuple[Verdict, ...] | None:
        """The verdicts under a key; None where there are none, or the file is broken."""
        try:
            content = json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        pairs = content.get("verdicts") if isinstance(content, dict) else None
        return read_verdict_pairs(pairs, answers, scale)

    def write(self, key: str, verdicts: Sequence[Verdict]) -> None:
        """Keeps verdicts under a key."""
        if not self._writes:
            return
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({"verdicts": [list(each) for each in verdicts]}))
        except OSError as error:
            self._writes = False
            _log.warning("judge: verdicts are not cached: %s", error)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key[2:]}.json"
