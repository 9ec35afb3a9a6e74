"""Checks `training.fast`: which of its parts would not be exact with the rest of the recipe."""

from collections.abc import Iterator

from grpo_cli.errors import Problem
from grpo_cli.recipe.fast import find_left_off
from grpo_cli.recipe.recipe import Recipe

_INSTEAD = {
    "no_signal": "completions without signal are computed all the same",
    "shared_prompts": "prompts are computed once for each completion",
}


def check_fast(recipe: Recipe) -> Iterator[Problem]:
    """A note for each part that is left off."""
    if not recipe.is_sampled or recipe.training.mode == "async":
        return
    for part, why in find_left_off(recipe.training.fast, recipe.training.extras).items():
        yield Problem(
            f"{_INSTEAD[part]}: {why}",
            f"nothing to mend; `training.fast: {{{part}: false}}` says that this is known",
            f"training.fast.{part}",
            level="note",
        )
