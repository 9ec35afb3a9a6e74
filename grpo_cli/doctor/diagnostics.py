"""Every check of a machine, in the order in which they are printed."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.doctor import child_checks, environment, hardware
from grpo_cli.issues import Issue, Level
from grpo_cli.machine import find_gpus


@dataclass(frozen=True)
class MachineReport:
    """What was found on a machine."""

    issues: tuple[Issue, ...]
    seconds: float
    """How long the checks took."""

    def at(self, level: Level) -> list[Issue]:
        """Return the issues of one level."""
        return [issue for issue in self.issues if issue.level == level]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, for `--json`."""
        return {
            "healthy": not self.at("error"),
            "errors": len(self.at("error")),
            "warnings": len(self.at("warning")),
            "seconds": round(self.seconds, 1),
            "findings": [issue.as_json() for issue in self.issues],
        }


def diagnose_machine(
    runs: Path, *, quick: bool = False, on_progress: Callable[[str], None] = lambda text: None
) -> MachineReport:
    """Check this machine without changing it.

    Args:
        runs: Where run folders go.
        quick: Leave out the imports, the training step and the hub, which take seconds.
        on_progress: Told what is being tried.
    """
    began, gpus = time.monotonic(), find_gpus()[0]
    checks: list[Iterable[Issue]] = [
        environment.check_packages(),
        hardware.check_gpus(),
        hardware.check_memory(),
        hardware.check_shared_memory(gpus),
        hardware.check_folders(runs),
        environment.check_variables(),
        environment.check_ports(),
    ]
    if not quick:
        checks += [child_checks.check_training(gpus, on_progress), environment.check_hub()]
    issues = tuple(issue for check in checks for issue in check)
    return MachineReport(issues, time.monotonic() - began)
