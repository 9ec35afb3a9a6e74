"""From a recipe or flags to the numbers of `batch.py`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_cli.batch import BatchInputs, BatchPlan, plan_batch
from grpo_cli.errors import RecipeError, UsageError
from grpo_cli.machine import (
    Hardware,
    processes_per_machine,
    read_hardware,
    resolve_num_processes,
)

if TYPE_CHECKING:
    from grpo_cli.recipe.recipe import Recipe


def batch_inputs(
    recipe: "Recipe", num_processes: int, prompts: int | None, eval_prompts: int | None = None
) -> BatchInputs:
    """The batch arithmetic of a recipe.

    Args:
        recipe: The recipe.
        num_processes: Of the launch, never of the process that asks.
        prompts: Training prompts, None where they are not known yet.
        eval_prompts: Evaluation prompts, likewise.
    """
    training, generation = recipe.training, recipe.generation
    dynamic = generation.dynamic_sampling
    return BatchInputs(
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        num_processes=num_processes,
        num_generations=generation.num_generations,
        steps_per_generation=generation.steps_per_generation,
        generation_batch_size=generation.generation_batch_size,
        max_resample=dynamic.max_resample if dynamic is not None else None,
        num_iterations=training.num_iterations,
        num_train_epochs=training.num_train_epochs,
        max_steps=training.max_steps,
        dataset_size=prompts,
        evaluates=training.eval_strategy != "no" and recipe.is_sampled,
        per_device_eval_batch_size=training.per_device_eval_batch_size,
        num_generations_eval=generation.num_generations_eval,
        eval_dataset_size=eval_prompts,
    )


def plan_from_flags(
    recipe_path: Path | None,
    overrides: list[str] | None,
    flags: dict[str, int | float | None],
    gpus: int | None = None,
) -> BatchPlan:
    """The batch plan of a recipe, of flags alone, or of a recipe with flags in place of some values.

    The number of processes is the launch's on a machine with `gpus` GPUs, by default this one, unless a flag
    gives it. Asking for an evaluation batch size by flag asks for the evaluation rule.

    Raises:
        RecipeError: The recipe cannot be read, or does not fit the schema.
        UsageError: Neither a recipe nor a flag was given.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if recipe_path is None and not given and gpus is None:
        raise UsageError(
            "there is nothing to check. Fix: name a recipe, or give flags such as "
            "--per-device-train-batch-size 8 --num-generations 8 --dataset-size 1000"
        )
    if recipe_path is None:
        processes = processes_per_machine(read_hardware(gpus))
        inputs, samples = BatchInputs(num_processes=processes), True
    else:
        inputs, samples = _inputs_of(recipe_path, overrides, read_hardware(gpus))
    if samples and given.keys() & {"per_device_eval_batch_size", "num_generations_eval"}:
        given["evaluates"] = True
    return plan_batch(replace(inputs, **given))  # type: ignore[arg-type]


def _inputs_of(
    recipe_path: Path, overrides: list[str] | None, hardware: Hardware
) -> tuple[BatchInputs, bool]:
    """The inputs, and whether the recipe samples, without which there is no rule for evaluation."""
    # The schema takes half of a command's time to import, and flags alone do without it.
    from grpo_cli.data.preview import preview
    from grpo_cli.recipe.loading import load_recipe

    recipe = load_recipe(recipe_path, overrides)
    processes = resolve_num_processes(recipe, hardware)
    seen = preview(recipe.dataset, recipe.seed)
    if seen.problems:
        raise RecipeError(seen.problems)
    return batch_inputs(recipe, processes, seen.train_rows, seen.eval_rows), recipe.is_sampled
