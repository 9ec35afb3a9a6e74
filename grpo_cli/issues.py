"""One thing that was looked at before a training: the machine, the settings, the samples.

Owns the shape of what is found. Looks at nothing itself.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from grpo_cli.errors import Location, Problem

FindingLevel = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What was seen of one subject, how bad it is, and what mends it."""

    subject: str
    """What was looked at, such as `package torch`, `disk: runs` or `signal: groups without spread`."""
    level: FindingLevel
    """`error`: training will fail or learn nothing. `warning`: some of it will. `note`: good to know."""
    seen: str
    """The values seen."""
    fix: str = ""
    """A concrete command or edit; empty only where nothing needs mending."""
    why: str = ""
    """Why it matters, in one sentence; empty where the values speak for themselves."""
    path: str = ""
    """Dotted path into the recipe; empty where it is not a recipe's."""
    location: Location | None = None
    """Where in the recipe's file that path stands."""

    def __str__(self) -> str:
        parts = [str(self.location) if self.location else "", self.path or self.subject]
        text = f"{': '.join(filter(None, parts))}: {self.seen.rstrip('.')}"
        text = f"{text}. {self.why.rstrip('.')}" if self.why else text
        return f"{text}. Fix: {self.fix}" if self.fix else text

    @classmethod
    def of(cls, subject: str, problem: Problem) -> Self:
        """A problem that some other check found."""
        return cls(
            subject,
            problem.level,
            problem.message,
            problem.fix,
            path=problem.path,
            location=problem.location,
        )

    def placed(self, location: Location | None) -> Self:
        """The same finding with its place in the recipe."""
        return replace(self, location=self.location or location)

    def as_json(self) -> dict[str, Any]:
        """The finding as plain values, for `--json`."""
        where = self.location
        return {
            "subject": self.subject,
            "level": self.level,
            "seen": self.seen,
            "why": self.why or None,
            "fix": self.fix or None,
            "path": self.path or None,
            "file": where.source if where else None,
            "line": (where.line or None) if where else None,
            "column": (where.column or None) if where else None,
        }

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Self:
        """The finding that `as_json` told of."""
        source, line, column = told["file"], told["line"] or 0, told["column"] or 0
        return cls(
            told["subject"],
            told["level"],
            told["seen"],
            told["fix"] or "",
            told["why"] or "",
            told["path"] or "",
            Location(source, line, column) if source else None,
        )
