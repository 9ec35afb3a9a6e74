"""The `training.asynchronous` section: how far sampling may run ahead of learning."""

from pydantic import Field

from grpo_cli.recipe.base import Integer, Section


class AsyncConfig(Section):
    """Sampling and learning at the same time, read where `mode` is `async`."""

    max_staleness: Integer = Field(default=4, ge=1)
    """Hand-overs of weights that a sample may lag behind, which are steps where `weight_sync_steps` is 1. Older
    samples are left out, and no more are sampled ahead than that many steps use up."""
    weight_sync_steps: Integer = Field(default=1, ge=1)
    """Steps after which the server is given the weights."""
    token_budget: Integer | None = Field(default=None, ge=1)
    """Most tokens of one micro-step on each device; its completions are then as many as fit, and those longer
    than it are left out. Without it a micro-step takes `per_device_train_batch_size` completions."""
