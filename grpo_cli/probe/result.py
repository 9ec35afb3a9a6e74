"""What a probe comes to."""

from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_cli.analysis.samples import ScoredCompletion
from grpo_cli.checks.reward_tests.procedure import Trial
from grpo_cli.issues import Finding
from grpo_cli.probe.cost import DiskEstimate, TimeEstimate
from grpo_cli.probe.memory import MemoryEstimate
from grpo_cli.probe.prompts import PromptSample
from grpo_cli.probe.signal import Lengths, Signal


@dataclass
class Probe:
    """Everything a probe saw; what it did not come to is None or empty."""

    recipe: str
    """Path of the recipe."""
    findings: list[Finding] = field(default_factory=list)
    prompts: PromptSample | None = None
    trial: Trial | None = None
    memory: MemoryEstimate | None = None
    memory_available: int | None = None
    """Bytes for one process on the device it will train on."""
    disk: DiskEstimate | None = None
    time: TimeEstimate | None = None
    """None where nothing was sampled, or the number of steps is not known."""
    signal: Signal | None = None
    lengths: Lengths | None = None
    samples: list[ScoredCompletion] = field(default_factory=list)
    quick: bool = False
    """Whether all that needs weights was left out."""
    seconds: float = 0.0
    """How long the probe took."""

    @property
    def errors(self) -> list[Finding]:
        """What forbids a training."""
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def sorted_findings(self) -> list[Finding]:
        """The worst first."""
        order = ("error", "warning", "note", "ok")
        return sorted(self.findings, key=lambda finding: order.index(finding.level))

    def as_json(self) -> dict[str, Any]:
        """The probe as plain values."""
        return {
            "recipe": self.recipe,
            "quick": self.quick,
            "healthy": not self.errors,
            "errors": len(self.errors),
            "warnings": sum(finding.level == "warning" for finding in self.findings),
            "findings": [finding.as_json() for finding in self.sorted_findings],
            "prompts": self.prompts.as_json() if self.prompts else None,
            "signal": self.signal.as_json() if self.signal else None,
            "completion_lengths": asdict(self.lengths) if self.lengths else None,
            "reward_test": self.trial.as_json() if self.trial else None,
            "memory": self.memory.as_json() if self.memory else None,
            "memory_available_bytes": self.memory_available,
            "disk": {**asdict(self.disk), "total_bytes": self.disk.total} if self.disk else None,
            "time": asdict(self.time) if self.time else None,
            "samples": [asdict(sample) for sample in self.samples],
            "probe_seconds": round(self.seconds, 1),
        }
