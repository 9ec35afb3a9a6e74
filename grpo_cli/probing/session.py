"""What a probe of a recipe keeps: what was loaded for it, and what was found."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from grpo_cli.analysis.metrics import Metric
from grpo_cli.analysis.samples import ScoredCompletion
from grpo_cli.batch.plan import BatchPlan
from grpo_cli.errors import RunError
from grpo_cli.issues import Issue, Level
from grpo_cli.probing.cost import DiskEstimate, TimeEstimate
from grpo_cli.probing.memory import MemoryEstimate
from grpo_cli.probing.prompts import PromptSample
from grpo_cli.probing.signal import Lengths, Signal
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.reward_test.testing import RewardTestResult
from grpo_cli.rewards.scoring import Reward

if TYPE_CHECKING:
    from grpo_cli.probing.counting import ModelShape

PROMPTS = 16
Progress = Callable[[str], None]
_LEVELS: Sequence[Level] = ("error", "warning", "note", "ok")


class HangError(BaseException):
    """A function of the user's hangs; no `except Exception` or `on_error` takes it for a failed completion."""

    def __init__(self, issue: Issue) -> None:
        self.issue = issue
        super().__init__(str(issue))


@dataclass
class Probe:
    """Everything a probe saw; what it did not come to is None or empty."""

    recipe: str
    """Path of the recipe."""
    findings: list[Issue] = field(default_factory=list)
    prompts: PromptSample | None = None
    trial: RewardTestResult | None = None
    memory: MemoryEstimate | None = None
    memory_available: int | None = None
    """Bytes for one process on the device it will train on."""
    disk: DiskEstimate | None = None
    time: TimeEstimate | None = None
    """None if nothing was sampled, or the number of steps is not known."""
    signal: Signal | None = None
    episodes: dict[str, Metric] | None = None
    """What became of the episodes, by the names of `EPISODE_METRICS`; None if there were none."""
    lengths: Lengths | None = None
    samples: list[ScoredCompletion] = field(default_factory=list)
    quick: bool = False
    """Whether all that needs weights was left out."""
    seconds: float = 0.0
    """How long the probe took."""

    @property
    def errors(self) -> list[Issue]:
        """What forbids a training."""
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def sorted_findings(self) -> list[Issue]:
        """The worst first."""
        return sorted(self.findings, key=lambda finding: _LEVELS.index(finding.level))

    def as_json(self) -> dict[str, Any]:
        """Return the probe as plain values."""
        return {
            "recipe": self.recipe,
            "quick": self.quick,
            "healthy": not self.errors,
            "errors": len(self.errors),
            "warnings": sum(finding.level == "warning" for finding in self.findings),
            "findings": [finding.as_json() for finding in self.sorted_findings],
            "prompts": self.prompts.as_json() if self.prompts else None,
            "signal": asdict(self.signal) if self.signal else None,
            "episodes": {name: each.as_json() for name, each in self.episodes.items()}
            if self.episodes
            else None,
            "completion_lengths": asdict(self.lengths) if self.lengths else None,
            "reward_test": self.trial.as_json() if self.trial else None,
            "memory": self.memory.as_json() if self.memory else None,
            "memory_available_bytes": self.memory_available,
            "disk": {**asdict(self.disk), "total_bytes": self.disk.total} if self.disk else None,
            "time": asdict(self.time) if self.time else None,
            "samples": [asdict(sample) for sample in self.samples],
            "probe_seconds": round(self.seconds, 1),
        }


@dataclass
class Session:
    """A recipe, what was loaded for it, and what was found so far."""

    recipe: Recipe
    probe: Probe
    tell: Progress
    tokenizer: Any = None
    processing_class: Any = None
    """The processor if prompts may hold images, otherwise the tokenizer."""
    data: Any = None
    """`BuiltData`."""
    prompts_sampled: int = PROMPTS
    """Prompts to sample completions for."""
    plan: BatchPlan | None = None
    rewards: tuple[Reward, ...] = ()
    shape: "ModelShape | None" = None

    def add(self, findings: Iterable[Issue]) -> None:
        """Keep what was found, once."""
        known = self.probe.findings
        known += [finding for finding in findings if finding not in known]

    @contextmanager
    def failing(
        self, subject: str, path: str, level: Level = "error", why: str = ""
    ) -> Iterator[None]:
        """Make a finding of a failure that the training would meet too."""
        try:
            yield
        except RunError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise
            # Names of parameters alone are relative to the entry of the recipe that failed.
            path = error.path if "." in error.path else path
            issue = error.as_issue(path, level=level, subject=subject)
            fix = (
                issue.fix or f"correct it, and try it alone: grpo rewards test {self.probe.recipe}"
            )
            why = why or "the same error would end the training"
            self.add([replace(issue, fix=fix, why=why, details=())])
        except HangError as error:
            why = "a training would wait for it"
            self.add([replace(error.issue, level=level, subject=subject, why=why)])

    @property
    def prompt_limit(self) -> int | None:
        """The longest prompt that is not dropped; None if none is, or what an environment adds is not counted."""
        return None if self.recipe.has_episodes else self.recipe.dataset.longest_prompt

    @property
    def chat_kwargs(self) -> dict[str, Any] | None:
        """The recipe's variables for the chat template."""
        return self.recipe.setting("chat_template_kwargs")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def sampled_at_once(self) -> int:
        """Return the completions one process samples at a time: its share of a generation batch."""
        steps = (self.plan.steps_per_generation if self.plan else None) or 1
        return steps * self.recipe.training.per_device_train_batch_size
