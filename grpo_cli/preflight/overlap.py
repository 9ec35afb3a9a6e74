"""Checks `generation.sampling_parts`: whether there is something to do while a part is sampled."""

from collections.abc import Iterator, Mapping

from grpo_cli.errors import Problem
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.contract import RewardParams


def check_overlap(recipe: Recipe, params: Mapping[int, RewardParams]) -> Iterator[Problem]:
    """A note where a batch would be sampled in parts, and no reward waits.

    Args:
        recipe: The recipe.
        params: Those of its rewards that are right, by index.
    """
    waiting = [
        params[place].waits(limited=entry.timeout_s is not None)
        for place, entry in enumerate(recipe.rewards)
        if place in params
    ]
    if recipe.generation.sampling_parts > 1 and not any(waiting):
        yield Problem(
            "no reward waits for anything, so batches are sampled whole",
            "remove it; a `python` reward takes part where its function is `async`, or has a `timeout_s`",
            "generation.sampling_parts",
            level="note",
        )
