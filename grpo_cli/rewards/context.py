"""From a recipe to what its rewards may know about it."""

import math

from grpo_cli.batch.plan import batch_inputs, plan_batch
from grpo_cli.machine import read_hardware, resolve_num_processes
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.contract import RewardContext


def reward_context(
    recipe: Recipe, device: str = "cpu", train_rows: int | None = None
) -> RewardContext:
    """Return what rewards may know about a recipe.

    Args:
        device: Of rewards that are models.
        train_rows: Prompts of an epoch, which say how many steps are planned if `max_steps` does not; None if they
            are not known.
    """
    training, processes = recipe.training, resolve_num_processes(recipe, read_hardware())
    plan = plan_batch(batch_inputs(recipe, processes, train_rows))
    steps = training.max_steps if training.max_steps > 0 else plan.total_optimizer_steps or 1
    epochs = training.num_train_epochs
    if training.max_steps > 0 and plan.optimizer_steps_per_epoch:
        epochs = steps / plan.optimizer_steps_per_epoch
    length = recipe.generation.max_completion_length
    return RewardContext(length, device, steps, math.ceil(epochs))
