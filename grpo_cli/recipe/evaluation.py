"""The `evaluation` section: how the model is measured before and after training."""

from pydantic import Field

from grpo_cli.recipe.base import Integer, Number, Section


class EvaluationConfig(Section):
    """Measurement on the evaluation rows, before the first step and after the last."""

    limit: Integer | None = Field(default=256, ge=0)
    """Prompts to measure on; 0 leaves the measurement out, null takes all."""
    samples_per_prompt: Integer = Field(default=1, ge=1)
    """Completions sampled for each prompt."""
    temperature: Number = Field(default=0.0, ge=0)
    """0 is greedy decoding."""
    batch_size: Integer = Field(default=32, ge=1)
    """Completions generated at a time on each device."""
