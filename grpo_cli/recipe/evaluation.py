"""The `evaluation` section: the held-out rows before and after training, and held-out sets during it."""

from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from grpo_cli.recipe.base import NAME, Integer, Number, Section


class HeldOutSetConfig(Section):
    """Held-out rows on which the model is also evaluated during training, as `grpo eval` does it."""

    name: str | None = Field(default=None, pattern=NAME)
    """What the set is called: its metrics are `eval_NAME/reward`, `eval_NAME/accuracy/REWARD` and so on. By
    default, the name of its source, or `held_out`."""
    every: Integer = Field(ge=1)
    """Optimizer steps between two evaluations."""
    source: str | None = None
    """One of `dataset.sources`, to use its held-out rows alone. By default, the held-out rows of the recipe."""
    limit: Integer | None = Field(default=None, ge=1)
    """Number of prompts. By default, `evaluation.limit`."""
    samples_per_prompt: Integer | None = Field(default=None, ge=1)
    """Completions sampled per prompt; with several, pass@k is measured too. By default,
    `evaluation.samples_per_prompt`."""
    temperature: Number | None = Field(default=None, ge=0)
    """Sampling temperature; 0 is greedy decoding. By default, `evaluation.temperature`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_task(cls, entry: Any) -> Any:
        if isinstance(entry, dict) and "task" in entry:
            seen = "names a task of lm-eval, and these are not evaluated during training"
            fix = "remove it, and run `grpo eval RUN --checkpoint N --harness lm-eval --tasks NAME`"
            raise PydanticCustomError("grpo_task", seen, {"fix": fix})
        return entry

    @property
    def label(self) -> str:
        """What the set is called."""
        return self.name or self.source or "held_out"

    @property
    def prefix(self) -> str:
        """What the names of its metrics begin with."""
        return f"eval_{self.label}/"


class EvaluationConfig(Section):
    """Evaluation on the held-out rows before and after training."""

    limit: Integer | None = Field(default=256, ge=0)
    """Number of prompts; 0 turns evaluation off, null uses all."""
    samples_per_prompt: Integer = Field(default=1, ge=1)
    """Completions sampled per prompt."""
    temperature: Number = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy decoding."""
    batch_size: Integer = Field(default=32, ge=1)
    """Completions generated at a time on each device."""
    during: tuple[HeldOutSetConfig, ...] = ()
    """Held-out sets that are evaluated during training, each every so many steps."""

    def settings_of(self, held_out: HeldOutSetConfig) -> "EvaluationConfig":
        """Return the settings by which a set is evaluated."""
        names = ("limit", "samples_per_prompt", "temperature")
        own = {name: value for name in names if (value := getattr(held_out, name)) is not None}
        return self.model_copy(update={**own, "during": ()})

    def repeats(self, held_out: HeldOutSetConfig) -> bool:
        """Return whether a set is what is evaluated before and after training, in the same way."""
        same = self.settings_of(held_out) == self.model_copy(update={"during": ()})
        return same and held_out.source is None
