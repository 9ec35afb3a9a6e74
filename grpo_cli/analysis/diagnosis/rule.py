"""What a rule is: where it looks, from what value on it speaks, by whose word, and what it says."""

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
class Sighting:
    """What a rule saw in a history that is out of order."""

    level: SymptomLevel
    seen: str
    """The values, beside the threshold."""
    fix: str
    """An edit of the recipe with the run's own values, or a command."""


def sampled_only(recipe: Recipe) -> str | None:
    """Why a rule on what the model samples has nothing to look at."""
    return None if recipe.is_sampled else "scored data is not sampled"


def _nothing(recipe: Recipe) -> str | None:
    return None


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong with a run, and how it is told."""

    name: str
    """As `training.stop_when` takes it."""
    title: str
    """What is wrong, in a few words."""
    metrics: tuple[str, ...]
    """What it cannot do without, by the names in `metrics.jsonl`; NAME stands for any reward's."""
    window: int
    """Over how many of the newest records it looks."""
    fewest: int
    """Records of these metrics before which it says nothing."""
    threshold: str
    """From where on it speaks, in words."""
    source: str
    """Where the threshold is from; `ours: ` and the reason where it is of our own making."""
    why: str
    """Why it matters, in one sentence."""
    look: Callable[[History], Sighting | None]
    """Gives what is wrong, or None."""
    bar: Callable[[Recipe], str | None] = _nothing
    """Why a recipe never gives it anything to look at; None where it does."""

    lack: Callable[[History], str | None] | None = None
    """Why a history has nothing for it, where it looks at something else than records; `metrics` then name
    that, and `window` and `fewest` are 0."""

    @property
    def metric(self) -> str:
        """What it looks at, in words."""
        return ", ".join(self.metrics)

    def find_obstacle(self, history: History) -> str | None:
        """Why it cannot look yet, or ever; None where it can."""
        if (barred := self.bar(history.recipe)) is not None:
            return barred
        if self.lack is not None:
            return self.lack(history)
        if history.lost_at is not None and self.name == "nan_loss":
            return None
        counts = {metric: history.count(metric) for metric in self.metrics}
        lacking = [metric for metric, count in counts.items() if not count]
        if lacking:
            return f"{', '.join(lacking)} not logged"
        few = min(counts.values())
        return f"{few} of {self.fewest} records" if few < self.fewest else None

    def apply(self, history: History) -> Symptom | None:
        """What it finds in a history, if it can look and something is wrong."""
        found = None if self.find_obstacle(history) else self.look(history)
        if found is None:
            return None
        return Symptom(
            self.name,
            found.level,
            history.step,
            found.seen,
            self.why,
            found.fix,
            self.metric,
            self.window,
            self.threshold,
            self.source,
        )

    def as_json(self) -> dict[str, object]:
        """The rule as plain values, for `--json`."""
        names = ("name", "title", "metric", "window", "fewest", "threshold", "source", "why")
        return {name: getattr(self, name) for name in names}
