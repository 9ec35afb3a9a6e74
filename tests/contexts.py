"""Makes what checks read of a recipe alone, with a machine that a test does not have."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_cli.batch.plan import BatchInputs, plan_batch
from grpo_cli.checks.compatibility import is_set
from grpo_cli.checks.context import Check, CheckContext, read_context
from grpo_cli.checks.recipe import RECIPE_CHECKS
from grpo_cli.issues import Issue
from grpo_cli.machine import Hardware
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.yaml_tree import read_text


def make_context(
    recipe: Recipe | LoadedRecipe, hardware: Hardware | None = None, **derived: Any
) -> CheckContext:
    """Return the context of a recipe; `derived` takes the place of what would be worked out for it."""
    if isinstance(recipe, Recipe):
        tree = read_text("name: made", "made.yaml")
        recipe = LoadedRecipe(recipe, tree, (), Path("made.yaml"), "")
    context = read_context(recipe, hardware or Hardware(gpus=0, cpus=2))
    if "plan" in derived:
        derived["steps"] = derived["plan"].total_optimizer_steps
    return replace(context, **derived)


def plan_of(steps: int) -> Any:
    """Return the plan of a training of some steps."""
    return plan_batch(BatchInputs(max_steps=steps, dataset_size=1000))


def run_check(check: Check, context: CheckContext) -> list[Issue]:
    """Return what a check finds as `grpo check` runs it: only for recipes with the setting that it is about."""
    (setting,) = [setting for setting, each in RECIPE_CHECKS if each is check]
    return [*check(context)] if is_set(context.recipe, setting) else []
