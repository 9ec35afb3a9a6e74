"""The exceptions of grpo, the exit codes, and the search for the nearest valid name."""

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Self

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
    TERMINATED = 143


class GrpoError(Exception):
    """An expected error: its text says what is wrong and how to fix it, so no traceback is shown."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(
        self, seen: str = "", fix: str = "", path: str = "", details: Sequence[str] = ()
    ) -> None:
        super().__init__(seen, fix, path, details)
        self.seen = seen
        """What is wrong, with the values seen."""
        self.fix = fix
        """A concrete edit or command; empty if nothing in particular mends it."""
        self.path = path
        """Dotted path into the recipe; empty if there is none, or if it is not known."""
        self.details = tuple(details)
        """Lines to read beneath, such as a traceback or the end of a log."""

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.details])

    @property
    def headline(self) -> str:
        """What was seen, and the fix."""
        return f"{self.seen}. Fix: {self.fix}" if self.fix else self.seen

    def about(self, subject: str) -> Self:
        """Return the same error, with what it is about before what was seen."""
        error = type(self).__new__(type(self), *self.args)
        vars(error).update(vars(self), seen=f"{subject}: {self.seen}")
        return error

    def as_issue(self, path: str = "", **more: Any) -> Issue:
        """Return the error as an issue at a path; `more` are its level, subject and why."""
        return Issue(self.seen, self.fix, path or self.path, details=self.details, **more)


class ProblemsError(GrpoError):
    """One or more issues of a recipe, sorted by file and line."""

    exit_code = ExitCode.USAGE

    def __init__(self, problems: Iterable[Issue]) -> None:
        self.problems = sort_issues(problems)
        if self.problems and all(problem.package for problem in self.problems):
            self.exit_code = ExitCode.ENVIRONMENT
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RecipeError(ProblemsError):
    """The recipe, or what it points at, cannot be used."""


def recipe_error(
    seen: str, fix: str, path: str = "", location: Location | None = None, package: str = ""
) -> RecipeError:
    """Return the error of a single problem."""
    return RecipeError([Issue(seen, fix, path, location, package=package)])


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
        raise UsageError(f"there is no {flag} {value}", " or ".join(choices))


def pip(command: str) -> str:
    """Return how to give pip a command, such as `install trl`, for the environment of this interpreter.

    Source: the files that uv 0.9 and pipx 1.8 leave in an environment: `uv-receipt.toml`, `pipx_metadata.json`,
    and `uv` in `pyvenv.cfg`.
    """
    import shutil

    prefix, python = Path(sys.prefix), Path(sys.executable)
    action, _, arguments = command.partition(" ")
    if (prefix / "pipx_metadata.json").is_file():
        return f"pipx runpip grpo-cli {command}"
    if (prefix / "uv-receipt.toml").is_file():
        if action == "install" and not arguments.startswith("-"):
            added = "".join(f" --with {package}" for package in arguments.split())
            return f"uv tool install{added} {_read_receipt()}"
        return f"uv pip {action} --python {python} {arguments}"
    settings = prefix / "pyvenv.cfg"
    if settings.is_file() and re.search(
        "^uv = ", settings.read_text(encoding="utf-8"), re.MULTILINE
    ):
        is_chosen = (
            os.environ.get("VIRTUAL_ENV") == str(prefix) or Path(".venv").resolve() == prefix
        )
        return f"uv pip {action} {'' if is_chosen else f'--python {python} '}{arguments}"
    first = shutil.which("pip")
    return (
        f"{'' if first and Path(first).parent == python.parent else f'{python} -m '}pip {command}"
    )


def _read_receipt(extra: str | None = None) -> str:
    """Return the arguments of `uv tool install` that made this environment, with an extra of ours besides."""
    import tomllib

    text = (Path(sys.prefix) / "uv-receipt.toml").read_text(encoding="utf-8")
    parts = []
    for each in tomllib.loads(text)["tool"]["requirements"]:
        is_ours = each["name"] == "grpo-cli"
        extras = sorted({*each.get("extras", ()), *([extra] if is_ours and extra else ())})
        name = f"{each['name']}[{','.join(extras)}]" if extras else each["name"]
        path = each.get("editable") or each.get("directory") or each.get("path") or each.get("url")
        origin = f"git+{each['git']}" if "git" in each else path
        requirement = f'"{name} @ {origin}"' if origin else f'"{name}{each.get("specifier", "")}"'
        parts.append(requirement if is_ours else f"--with {requirement}")
    return " ".join(parts)


def install_extra(extra: str) -> str:
    """Return the command that installs an extra of ours from where this grpo came from.

    Source: PEP 610, `direct_url.json`.
    """
    if (Path(sys.prefix) / "uv-receipt.toml").is_file():
        return f"uv tool install {_read_receipt(extra)}"
    checkout = Path(__file__).parent.parent
    if (checkout / "pyproject.toml").is_file():
        return pip(f'install -e "{checkout}[{extra}]"')
    # Importing it takes as long as all else in this module together.
    from importlib import metadata

    direct_url = metadata.distribution("grpo-cli").read_text("direct_url.json")
    origin = json.loads(direct_url) if direct_url else {}
    url = origin.get("url", "")
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return pip(f'install "grpo-cli[{extra}]{f" @ {url}" if url else ""}"')


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
