"""From a recipe to the numbers of its batch arithmetic."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from grpo_cli.batch.plan import BatchInputs

if TYPE_CHECKING:
    from grpo_cli.recipe.recipe import Recipe


def batch_inputs(
    recipe: "Recipe", num_processes: int, prompts: int | None, eval_prompts: int | None = None
) -> BatchInputs:
    """Return the numbers of a recipe's batch arithmetic.

    Args:
        recipe: The recipe.
        num_processes: Of the launch, never of the process that asks.
        prompts: Training prompts, None if they are not known yet.
        eval_prompts: Evaluation prompts, likewise.
    """
    training, dynamic = recipe.training, recipe.generation.dynamic_sampling
    values: dict[str, Any] = {
        field.name: getattr(section, field.name)
        for section in (training, recipe.generation)
        for field in fields(BatchInputs)
        if field.name in type(section).model_fields
    }
    return BatchInputs(
        **values,
        num_processes=num_processes,
        max_resample=dynamic.max_resample if dynamic is not None else None,
        dataset_size=prompts,
        evaluates=training.eval_strategy != "no" and recipe.is_sampled,
        eval_dataset_size=eval_prompts,
    )
