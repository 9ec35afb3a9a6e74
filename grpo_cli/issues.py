"""One thing that is wrong, or good to know: what checks, probe, doctor, reward tests and exports report."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, order=True)
class Location:
    """Where a value was written: a file with line and column (both from 1), or a flag."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Issue:
    """What was seen, where, how serious it is, and how to fix it."""

    seen: str
    """What is wrong, with the values seen."""
    fix: str = ""
    """A concrete edit or command; empty only if nothing needs fixing."""
    path: str = ""
    """Dotted path into the recipe, such as `training.learning_rate`; empty if there is none."""
    location: Location | None = None
    """Where that path stands in the recipe's file."""
    level: Level = "error"
    """`error`: the run will fail or learn nothing. `warning`: part of it will. `note`: good to know."""
    subject: str = ""
    """What was checked, such as `package torch` or `disk: runs`; empty for a key of the recipe."""
    why: str = ""
    """Why it matters, in one sentence; empty if the values speak for themselves."""
    package: str = ""
    """The package that this machine lacks; with it, the recipe may be right."""
    kind: str = ""
    """What kind of problem it is, where other code asks for it, such as `unknown key`."""
    details: tuple[str, ...] = ()
    """Lines to read beneath, such as a traceback."""

    def __str__(self) -> str:
        where = str(self.location) if self.location else ""
        text = ": ".join(filter(None, (where, self.path or self.subject, self.seen.rstrip("."))))
        why = f"; {self.why.rstrip('.')}" if self.why else ""
        text = f"{text}{why}. Fix: {self.fix}" if self.fix else f"{text}{why}"
        return "\n".join([text, *self.details])

    def as_json(self) -> dict[str, Any]:
        """Return the issue as plain values, for `--json`. `message` is `seen` by its older name."""
        where = self.location
        return {
            "subject": self.subject or None,
            "level": self.level,
            "seen": self.seen,
            "message": self.seen,
            "why": self.why or None,
            "package": self.package or None,
            "fix": self.fix or None,
            "path": self.path or None,
            "file": where.source if where else None,
            "line": (where.line or None) if where else None,
            "column": (where.column or None) if where else None,
            "details": list(self.details),
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Self:
        """Return the issue that `as_json` wrote."""
        file = entry["file"]
        location = Location(file, entry["line"] or 0, entry["column"] or 0) if file else None
        return cls(
            entry["seen"],
            entry["fix"] or "",
            entry["path"] or "",
            location,
            entry["level"],
            entry["subject"] or "",
            entry["why"] or "",
            entry.get("package") or "",
            details=tuple(entry.get("details") or ()),
        )


def sort_issues(issues: Iterable[Issue]) -> list[Issue]:
    """Sort issues by file, line and column; those without a place come last."""
    nowhere = Location("\uffff")
    return sorted(issues, key=lambda issue: (issue.location or nowhere, issue.path))
