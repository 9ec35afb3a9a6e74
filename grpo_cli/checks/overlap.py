"""Checks `generation.sampling_parts`: whether there are as many, and something to do while one is sampled."""

from collections.abc import Iterator, Mapping

from grpo_cli.batch import BatchPlan
from grpo_cli.errors import Problem
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.contract import RewardParams


def check_overlap(
    recipe: Recipe, params: Mapping[int, RewardParams], plan: BatchPlan
) -> Iterator[Problem]:
    """A note where a batch would be sampled in parts, and no reward waits, or it has fewer groups.

    Args:
        recipe: The recipe.
        params: Those of its rewards that are right, by index.
        plan: Its batch arithmetic.
    """
    parts = recipe.generation.sampling_parts
    groups = (plan.prompts_per_generation_batch or parts) / plan.num_processes
    waiting = [
        params[place].waits(limited=entry.timeout_s is not None)
        for place, entry in enumerate(recipe.rewards)
        if place in params
    ]
    if parts > 1 and not any(waiting):
        yield Problem(
            "no reward waits for anything, so batches are sampled whole",
            "remove it; a `python` reward takes part where its function is `async`, or has a `timeout_s`",
            "generation.sampling_parts",
            level="note",
        )
    elif parts > max(groups, 1):
        each = f"{groups:g} {'group' if groups == 1 else 'groups'}"
        # A group that stands in two processes is not cut.
        fit = max(int(groups), 1) if groups == int(groups) else 1
        yield Problem(
            f"a process samples {each} at a time, and a part is at least one; {fit} it is",
            f"set it to {fit}, or sample more prompts at a time",
            "generation.sampling_parts",
            level="note",
        )
