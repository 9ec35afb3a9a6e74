"""Checks of the batch arithmetic."""

from collections.abc import Iterator
from dataclasses import fields, replace

from grpo_cli.batch.plan import BatchInputs, BatchPlan
from grpo_cli.checks.context import CheckContext
from grpo_cli.checks.evaluation import MOST_HELD_OUT
from grpo_cli.errors import nearest
from grpo_cli.issues import Issue
from grpo_cli.recipe.recipe import Recipe


def check_batch(context: CheckContext) -> Iterator[Issue]:
    """Find batches that TRL refuses, unless a wrong key may be meant for the arithmetic."""
    if not any(_decides_batch(issue.path) for issue in context.loaded.problems):
        for issue in context.plan.problems:
            yield _blame_limit(issue, context.recipe, context.plan)


def _blame_limit(problem: Issue, recipe: Recipe, batch: BatchPlan) -> Issue:
    """Cite `dataset.limit` or `eval_fraction` if it is what leaves too few prompts."""
    held_out = recipe.dataset.eval_fraction or 0
    if problem.path == "dataset" and held_out > MOST_HELD_OUT:
        fix = f"set `eval_fraction: {1 - held_out:.2g}`, if {held_out:g} is the share to train on"
        return replace(problem, fix=f"{fix}; or {problem.fix}", path="dataset.eval_fraction")
    limit, needed = recipe.dataset.limit, batch.prompts_per_generation_batch
    if problem.path != "dataset" or limit is None or needed is None or limit >= needed:
        return problem
    fix = problem.fix.replace("add prompts", f"set dataset.limit to {needed:g} or more", 1)
    return replace(problem, fix=fix, path="dataset.limit")


def _decides_batch(path: str) -> bool:
    """Return whether a wrong key may be meant for the arithmetic; sums of defaults would only confuse."""
    names = [field.name for field in fields(BatchInputs)]
    return nearest(path.rpartition(".")[2], names) is not None
