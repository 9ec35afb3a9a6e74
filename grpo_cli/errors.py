"""What can go wrong, as data: problems, the exception tree and the exit codes.

Owns the shape of every message a user reads (`file:line:col: dotted.path: what is wrong. Fix: …`)
and the search for the nearest valid name. Does not print: that is `cli/errors.py`.
"""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal

Level = Literal["error", "warning", "note"]


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    """The run failed, or the verdict of a check is no."""
    USAGE = 2
    """The command line or the recipe is wrong."""
    ENVIRONMENT = 3
    """The machine or the installation lacks something."""
    INTERRUPTED = 130
    """By Ctrl-C."""
    TERMINATED = 143
    """By SIGTERM."""


@dataclass(frozen=True, order=True)
class Location:
    """Where a value was written: a file with line and column (both from 1), or a flag."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, where it is, and how to mend it."""

    message: str
    """What is wrong, with the values seen."""
    fix: str
    """A concrete edit or command."""
    path: str = ""
    """Dotted path into the recipe, such as `training.learning_rate`; empty where there is none."""
    location: Location | None = None
    level: Level = "error"

    @property
    def is_missing_package(self) -> bool:
        """Whether this machine lacks a package; with it, the recipe may be right."""
        return self.message.endswith("is not installed")

    def __str__(self) -> str:
        parts = [str(self.location) if self.location else "", self.path, self.message]
        return f"{': '.join(part for part in parts if part)}. Fix: {self.fix}"

    def as_json(self) -> dict[str, object]:
        """The problem as plain values, for `--json`."""
        where = self.location
        return {
            "level": self.level,
            "file": where.source if where else None,
            "line": where.line or None if where else None,
            "column": where.column or None if where else None,
            "path": self.path or None,
            "message": self.message,
            "fix": self.fix,
        }


class GrpoError(Exception):
    """An error of ours: its text says what is wrong and how to mend it, so no traceback is shown."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str = "", path: str = "") -> None:
        self.path = path
        """Dotted path into the recipe; empty if there is none, or if it is not known."""
        super().__init__(message)


class ProblemsError(GrpoError):
    """One or more problems, sorted by where they stand."""

    exit_code = ExitCode.USAGE

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sort_problems(problems)
        if self.problems and all(problem.is_missing_package for problem in self.problems):
            self.exit_code = ExitCode.ENVIRONMENT
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RecipeError(ProblemsError):
    """The recipe, or what it points at, cannot be used."""


class UsageError(GrpoError):
    """The command line asks for something that cannot be done."""

    exit_code = ExitCode.USAGE


class SetupError(GrpoError):
    """The machine or the installation lacks something the command needs."""

    exit_code = ExitCode.ENVIRONMENT


class RunError(GrpoError):
    """A run, or something it depends on, failed."""


class RewardError(RunError):
    """A reward raised, or returned something that is not a list of numbers."""


def install_extra(extra: str) -> str:
    """Return the command that installs an extra of ours from where this grpo came from.

    Source: PEP 610, `direct_url.json`.
    """
    checkout = Path(__file__).parent.parent
    if (checkout / "pyproject.toml").is_file():
        return f'pip install -e "{checkout}[{extra}]"'
    # Importing it takes as long as all else in this module together.
    from importlib import metadata

    told = metadata.distribution("grpo-cli").read_text("direct_url.json")
    origin = json.loads(told) if told else {}
    url = origin.get("url", "")
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f'pip install "grpo-cli[{extra}]{f" @ {url}" if url else ""}"'


def sort_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Orders problems by file, line and column; those without a place come last."""
    nowhere = Location("\uffff")
    return sorted(problems, key=lambda problem: (problem.location or nowhere, problem.path))


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to `name`, or None where nothing is close."""
    candidates = list(valid)
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in candidates}
    key = name.lower().replace("-", "_")
    if key in folded:
        return folded[key]
    close = difflib.get_close_matches(key, folded, n=1, cutoff=0.76)
    return folded[close[0]] if close else None


def sort_by_likeness(name: str, valid: Iterable[str]) -> list[str]:
    """Return the valid names, the most similar to `name` first."""
    key = name.lower()

    def unlikeness(candidate: str) -> tuple[float, str]:
        return -difflib.SequenceMatcher(None, key, candidate.lower()).ratio(), candidate

    return sorted({*valid}, key=unlikeness)
