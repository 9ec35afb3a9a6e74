"""What an examination of a machine comes to."""

from dataclasses import dataclass
from typing import Any

from grpo_cli.issues import Finding, FindingLevel


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
            "findings": [finding.as_json() for finding in self.findings],
        }
