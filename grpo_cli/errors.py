"""The exceptions of grpo, the exit codes, and the search for the nearest valid name."""

import difflib
import json
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import Any

from grpo_cli.issues import Issue, Location, sort_issues

_SIMILAR = 0.5
"""Likeness from which on a name is listed before others."""


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


class GrpoError(Exception):
    """An expected error: its text says what is wrong and how to fix it, so no traceback is shown."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str = "", path: str = "") -> None:
        self.path = path
        """Dotted path into the recipe; empty if there is none, or if it is not known."""
        super().__init__(message)

    def as_issue(self, path: str = "", **details: Any) -> Issue:
        """Return the error as an issue at a path; `details` are its level, subject and why."""
        seen, _, fix = str(self).partition(". Fix: ")
        return Issue(seen, fix, path or self.path, **details)


class ProblemsError(GrpoError):
    """One or more issues of a recipe, sorted by file and line."""

    exit_code = ExitCode.USAGE

    def __init__(self, problems: Iterable[Issue]) -> None:
        self.problems = sort_issues(problems)
        if self.problems and all(problem.is_missing_package for problem in self.problems):
            self.exit_code = ExitCode.ENVIRONMENT
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RecipeError(ProblemsError):
    """The recipe, or what it points at, cannot be used."""


def recipe_error(
    seen: str, fix: str, path: str = "", location: Location | None = None
) -> RecipeError:
    """Return the error of a single problem."""
    return RecipeError([Issue(seen, fix, path, location)])


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


def check_choice(flag: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Refuse a value that a flag does not have."""
    if value is not None and value not in choices:
        raise UsageError(f"there is no {flag} {value}. Fix: {' or '.join(choices)}")


def install_extra(extra: str) -> str:
    """Return the command that installs an extra of ours from where this grpo came from.

    Source: PEP 610, `direct_url.json`.
    """
    checkout = Path(__file__).parent.parent
    if (checkout / "pyproject.toml").is_file():
        return f'pip install -e "{checkout}[{extra}]"'
    # Importing it takes as long as all else in this module together.
    from importlib import metadata

    direct_url = metadata.distribution("grpo-cli").read_text("direct_url.json")
    origin = json.loads(direct_url) if direct_url else {}
    url = origin.get("url", "")
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f'pip install "grpo-cli[{extra}]{f" @ {url}" if url else ""}"'


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name closest to `name`; None if nothing is close."""
    candidates = list(valid)
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in candidates}
    key = name.lower().replace("-", "_")
    if key in folded:
        return folded[key]
    close = difflib.get_close_matches(key, folded, n=1, cutoff=0.76)
    return folded[close[0]] if close else None


def sort_by_likeness(name: str, valid: Iterable[str]) -> list[str]:
    """Return the valid names: the similar ones first, and the others in their order."""
    key = name.lower()

    def unlikeness(candidate: str) -> float:
        ratio = difflib.SequenceMatcher(None, key, candidate.lower()).ratio()
        return -ratio if ratio > _SIMILAR else 0.0

    return sorted(dict.fromkeys(valid), key=unlikeness)
