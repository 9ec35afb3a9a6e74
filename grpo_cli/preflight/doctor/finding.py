"""One thing that was looked at, and the examination that all of them make.

Owns the shape of what is found. Looks at nothing itself.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

FindingLevel = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What was seen of one subject, how bad it is, and what mends it."""

    subject: str
    """What was looked at, such as `package torch` or `disk: runs`."""
    level: FindingLevel
    """`error`: training will fail. `warning`: some of it will, or will be slow. `note`: good to know."""
    seen: str
    """The values seen, and why they matter where they are not fine."""
    fix: str = ""
    """A concrete command or edit; empty only where nothing needs mending."""

    def __str__(self) -> str:
        text = f"{self.subject}: {self.seen.rstrip('.')}"
        return f"{text}. Fix: {self.fix}" if self.fix else text


@dataclass(frozen=True)
class Examination:
    """Everything that was found on a machine."""

    findings: tuple[Finding, ...]
    seconds: float
    """How long it took to look."""

    def at(self, level: FindingLevel) -> list[Finding]:
        """The findings of one level."""
        return [finding for finding in self.findings if finding.level == level]

    @property
    def errors(self) -> list[Finding]:
        """The findings that forbid a training."""
        return self.at("error")

    def as_json(self) -> dict[str, Any]:
        """The examination as plain values, for `--json`."""
        return {
            "healthy": not self.errors,
            "errors": len(self.errors),
            "warnings": len(self.at("warning")),
            "seconds": round(self.seconds, 1),
            "findings": [asdict(finding) for finding in self.findings],
        }
