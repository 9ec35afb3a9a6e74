"""Checks of the batch arithmetic of a recipe, or of flags."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_cli.batch.plan import BatchInputs, BatchPlan, batch_inputs, plan_batch
from grpo_cli.errors import RecipeError, UsageError, nearest
from grpo_cli.issues import Issue, Location
from grpo_cli.machine import Hardware, processes_per_machine, read_hardware, resolve_num_processes

if TYPE_CHECKING:
    from grpo_cli.checks.context import CheckContext
    from grpo_cli.recipe.recipe import Recipe

MOST_HELD_OUT = 0.5
"""Share of the prompts held out beyond which `eval_fraction` is taken for the share to train on."""


def check_batch(context: "CheckContext") -> Iterator[Issue]:
    """Find batches that TRL refuses, unless a wrong key may be meant for the arithmetic."""
    if not any(_decides_batch(issue.path) for issue in context.loaded.problems):
        for issue in context.plan.problems:
            yield _blame_limit(issue, context.recipe, context.plan)


def _blame_limit(problem: Issue, recipe: "Recipe", batch: BatchPlan) -> Issue:
    """Name `dataset.limit` or `eval_fraction` if it is what leaves too few prompts."""
    held_out = recipe.dataset.eval_fraction or 0
    if problem.path == "dataset" and held_out > MOST_HELD_OUT:
        fix = f"set `eval_fraction: {1 - held_out:.2g}`, if {held_out:g} is the share to train on"
        return replace(problem, fix=f"{fix}; or {problem.fix}", path="dataset.eval_fraction")
    limit, needed = recipe.dataset.limit, batch.prompts_per_generation_batch
    if problem.path != "dataset" or limit is None or needed is None or limit >= needed:
        return problem
    return replace(problem, path="dataset.limit")


def _decides_batch(path: str) -> bool:
    """Return whether a wrong key may be meant for the arithmetic; sums of defaults would only confuse."""
    names = [field.name for field in fields(BatchInputs)]
    return nearest(path.rpartition(".")[2], names) is not None


def plan_from_flags(
    recipe_path: Path | None,
    overrides: list[str] | None,
    flags: dict[str, int | float | None],
    gpus: int | None = None,
) -> BatchPlan:
    """Return the batch plan of a recipe, of flags alone, or of a recipe with flags in place of some values.

    The number of processes is the launch's on a machine with `gpus` GPUs, by default this one, unless a flag
    gives it. Asking for an evaluation batch size by flag asks for the evaluation rule.

    Raises:
        RecipeError: The recipe cannot be read, or does not fit the schema.
        UsageError: Neither a recipe nor a flag was given.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if recipe_path is None and not given and gpus is None:
        raise UsageError(
            "there is nothing to check",
            "name a recipe, or give flags such as "
            "--per-device-train-batch-size 8 --num-generations 8 --dataset-size 1000",
        )
    hardware, recipe = read_hardware(gpus), None
    if recipe_path is None:
        inputs = BatchInputs(num_processes=processes_per_machine(hardware))
    else:
        inputs, recipe = _inputs_of(recipe_path, overrides, hardware)
    if (recipe is None or recipe.is_sampled) and given.keys() & {
        "per_device_eval_batch_size",
        "num_generations_eval",
    }:
        given["evaluates"] = True
    plan = plan_batch(replace(inputs, **given))  # type: ignore[arg-type]
    launch: list[Issue] = []
    if recipe is not None:
        from grpo_cli.checks.launch import check_gpus

        issues = check_gpus(recipe, plan.num_processes, hardware)
        launch = [issue for issue in issues if issue.level == "error"]
    problems = [_cite_flag(each, given) for each in (*plan.problems, *launch)]
    return replace(plan, problems=tuple(problems), valid=plan.valid and not launch)


def _cite_flag(problem: Issue, flags: dict[str, int | float]) -> Issue:
    """Name the flag that gave a wrong value."""
    name = problem.path.rpartition(".")[2]
    if name not in flags:
        return problem
    return replace(problem, location=Location(f"--{name.replace('_', '-')} {flags[name]}"))


def _inputs_of(
    recipe_path: Path, overrides: list[str] | None, hardware: Hardware
) -> tuple[BatchInputs, "Recipe"]:
    """Return the inputs, and the recipe: if it does not sample, there is no rule for evaluation."""
    # The schema takes half of a command's time to import, and flags alone do without it.
    from grpo_cli.data.preview import preview
    from grpo_cli.recipe.loading import load_recipe

    recipe = load_recipe(recipe_path, overrides)
    processes = resolve_num_processes(recipe, hardware)
    seen = preview(recipe.dataset, recipe.seed)
    if seen.problems:
        raise RecipeError(seen.problems)
    return batch_inputs(recipe, processes, seen.train_rows, seen.eval_rows), recipe
