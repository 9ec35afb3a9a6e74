"""The `teacher` section: a model whose answers are learned from, beside the rewards or without any."""

from pydantic import Field

from grpo_cli.recipe.base import Number, Section


class TeacherConfig(Section):
    """A model that training moves towards: its KL divergence on sampled completions is a term of the loss."""

    path: str = Field(min_length=1)
    """Hub id, folder of weights or of a LoRA adapter, or a finished run. An adapter is merged into its base."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    weight: Number = Field(default=0.1, gt=0)
    """Factor of the term, as TRL's `beta`; without rewards it only scales the gradient."""
