"""A diagnosis rule: metrics, threshold, source, message."""

from collections.abc import Callable
from dataclasses import dataclass

from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.analysis.diagnosis.symptom import Symptom, SymptomLevel
from grpo_cli.recipe.recipe import Recipe

AXOLOTL = (
    "axolotl's guide to stability "
    "(github.com/axolotl-ai-cloud/axolotl, docs/training_stability.qmd, Key Metrics for RL)"
)
PROBE = "where `grpo probe` speaks up"


@dataclass(frozen=True)
class RuleHit:
    """What a rule found wrong."""

    level: SymptomLevel
    seen: str
    """The values, beside the threshold."""
    fix: str
    """An edit of the recipe with the run's own values, or a command."""


def sampled_only(recipe: Recipe) -> str | None:
    """Return why a rule about sampling does not apply to a recipe, or None."""
    return None if recipe.is_sampled else "scored data is not sampled"


def _nothing(recipe: Recipe) -> str | None:
    return None


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong with a run, and how it is reported."""

    name: str
    """As in `training.stop_when`."""
    title: str
    """What is wrong, in a few words."""
    metrics: tuple[str, ...]
    """Required metrics, named as in `metrics.jsonl`; NAME stands for any reward."""
    window: int
    """Number of newest records that are checked."""
    min_records: int
    """Records of these metrics that the check needs."""
    threshold: str
    """The threshold in words."""
    source: str
    """Where the threshold comes from; `ours: ` and the reason if it is our own."""
    why: str
    """Why it matters, in one sentence."""
    check: Callable[[History], RuleHit | None]
    """Return what is wrong, or None."""
    skip_reason: Callable[[Recipe], str | None] = _nothing
    """Return why the rule never applies to a recipe; None if it does."""
    missing_input: Callable[[History], str | None] | None = None
    """Return what a history lacks, for a rule that reads something other than records. `metrics` then names
    that input, and `window` and `min_records` are 0."""

    @property
    def metric(self) -> str:
        """The metrics in words."""
        return ", ".join(self.metrics)

    def unsupported_reason(self, history: History) -> str | None:
        """Return why the rule cannot be checked, yet or ever; None if it can."""
        if (reason := self.skip_reason(history.recipe)) is not None:
            return reason
        if self.missing_input is not None:
            return self.missing_input(history)
        if history.lost_at is not None and self.name == "nan_loss":
            return None
        counts = {metric: history.count(metric) for metric in self.metrics}
        lacking = [metric for metric, count in counts.items() if not count]
        if lacking:
            return f"{', '.join(lacking)} not logged"
        few = min(counts.values())
        return f"{few} of {self.min_records} records" if few < self.min_records else None

    def apply(self, history: History) -> Symptom | None:
        """Check a history; None if nothing is wrong or the rule cannot be checked."""
        hit = None if self.unsupported_reason(history) else self.check(history)
        if hit is None:
            return None
        return Symptom(
            self.name,
            hit.level,
            history.step,
            hit.seen,
            self.why,
            hit.fix,
            self.metric,
            self.window,
            self.threshold,
            self.source,
        )

    def as_json(self) -> dict[str, object]:
        """Return the rule as plain values, for `--json`."""
        names = ("name", "title", "metric", "window", "threshold", "source", "why")
        return {**{name: getattr(self, name) for name in names}, "fewest": self.min_records}
