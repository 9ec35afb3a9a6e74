"""What the parts of one probe share."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from grpo_cli.batch import BatchPlan
from grpo_cli.checks.recipe_checks import CheckedRecipe
from grpo_cli.errors import Location, Problem, RunError
from grpo_cli.issues import Finding, FindingLevel
from grpo_cli.models.shape import ModelShape
from grpo_cli.probe.result import Probe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.scoring import Reward

Progress = Callable[[str], None]
ROWS = 1000
"""Prompts whose tokens are counted, spread evenly over the data."""
_TRY = "correct it, and try it alone: grpo rewards test"


@dataclass
class Session:
    """A recipe, what was loaded for it, and what was found so far."""

    checked: CheckedRecipe
    recipe: Recipe
    probe: Probe
    tell: Progress
    tokenizer: Any = None
    data: Any = None
    """`BuiltData`."""
    plan: BatchPlan | None = None
    rewards: tuple[Reward, ...] = ()
    shape: ModelShape | None = None

    def add(self, findings: Iterable[Finding]) -> None:
        """Keeps findings, with their places in the recipe."""
        for finding in findings:
            self.probe.findings.append(finding.placed(self._locate(finding)))

    @contextmanager
    def failing(
        self, subject: str, why: str, path: str, level: FindingLevel = "error"
    ) -> Iterator[None]:
        """Makes a finding of a failure that would meet the training too."""
        try:
            yield
        except RunError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise
            message, _, fix = str(error).partition(". Fix: ")
            first, _, rest = message.strip().partition("\n")
            last = rest.rpartition("\n")[2].strip()
            seen = first if last in first else f"{first} {last}"
            self.add([Finding(subject, level, seen, fix or _TRY, why, path)])

    def _locate(self, finding: Finding) -> Location | None:
        if not finding.path:
            return None
        return self.checked.loaded.place(Problem("", "", finding.path)).location

    @property
    def chat_kwargs(self) -> dict[str, Any] | None:
        """The recipe's variables for the chat template."""
        return self.recipe.generation.extras.get("chat_template_kwargs")

    def sampled_at_once(self) -> int:
        """Completions one process samples at a time: its share of a generation batch."""
        steps = (self.plan.steps_per_generation if self.plan else None) or 1
        return steps * self.recipe.training.per_device_train_batch_size


def spread(total: int, wanted: int) -> list[int]:
    """ServerLocation spread evenly over the data."""
    count = min(total, wanted)
    return [index * total // count for index in range(count)]
