"""Every check of a machine, in the order in which they are printed."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.doctor import child_checks, environment, hardware
from grpo_cli.issues import Issue, Level
from grpo_cli.machine import count_gpus


@dataclass(frozen=True)
class MachineReport:
    """What was found on a machine."""

    issues: tuple[Issue, ...]
    seconds: float
    """How long the checks took."""

    def at(self, level: Level) -> list[Issue]:
        """Return the issues of one level."""
        return [issue for issue in self.issues if issue.level == level]

    @property
    def errors(self) -> list[Issue]:
        """What prevents a training."""
        return self.at("error")

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, for `--json`."""
        return {
            "healthy": not self.errors,
            "errors": len(self.errors),
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
    began, gpus = time.monotonic(), count_gpus()
    checks: list[Callable[[], Iterable[Issue]]] = [
        environment.check_packages,
        hardware.check_gpus,
        hardware.check_memory,
        lambda: hardware.check_shared_memory(gpus),
        hardware.check_processors,
        lambda: hardware.check_folders(runs),
        environment.check_variables,
        environment.check_launcher_config,
        environment.check_open_files,
        environment.check_ports,
    ]
    if not quick:
        checks += [lambda: child_checks.check_training(gpus, on_progress), environment.check_hub]
    issues: list[Issue] = []
    for check in checks:
        try:
            issues += check()
        except Exception as error:
            if os.environ.get("GRPO_DEBUG") == "1":
                raise
            seen = f"a check failed: {type(error).__name__}: {error}"
            fix = "run it with GRPO_DEBUG=1 and report the traceback"
            issues.append(Issue(seen, fix, level="warning", subject="doctor"))
    return MachineReport(tuple(issues), time.monotonic() - began)
