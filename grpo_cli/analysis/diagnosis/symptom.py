"""One thing that is wrong with a run, as a rule saw it: where, how bad, why it matters, and what mends it."""

from dataclasses import dataclass
from typing import Any, Literal

SymptomLevel = Literal["note", "warning", "error"]


@dataclass(frozen=True)
class Symptom:
    """What a rule found in a run."""

    rule: str
    """The rule's name, as `training.stop_when` takes it."""
    level: SymptomLevel
    """`error`: the run learns nothing, or loses what it learned. `warning`: some of it. `note`: good to know."""
    step: int
    """The optimizer step of the last record that shows it."""
    seen: str
    """The values seen, beside the threshold."""
    why: str
    """Why it matters, in one sentence."""
    fix: str
    """An edit of the recipe, or a command."""
    metric: str
    """What was read, by its name in `metrics.jsonl`."""
    window: int
    """Over how many records."""
    threshold: str
    """In words, such as `above 0.8`."""
    source: str
    """Where the threshold is from."""

    def __str__(self) -> str:
        return f"{self.rule} (step {self.step}): {self.seen}. {self.why} Fix: {self.fix}"

    def as_json(self) -> dict[str, Any]:
        """The symptom as plain values, for `--json`."""
        return dict(vars(self))
