"""Checks `training.stop_when`: whether its rules will have anything to look at."""

from collections.abc import Iterator

from grpo_cli.diagnosis.rules import RULES
from grpo_cli.errors import Problem
from grpo_cli.recipe.recipe import Recipe


def check_stop_when(recipe: Recipe) -> Iterator[Problem]:
    """A warning for each rule that can never stop this run."""
    bars = {rule.name: rule.bar(recipe) for rule in RULES}
    if recipe.training.eval_strategy == "no":
        # The measurement after training comes too late to stop it.
        bars["held_out_gap"] = "`eval_strategy` is `no`, so held-out prompts are not looked at"
    for place, name in enumerate(recipe.training.stop_when):
        if (why := bars[name]) is not None:
            yield Problem(
                f"`{name}` can never stop this run: {why}",
                f"remove `{name}`, or change that",
                f"training.stop_when.{place}",
                level="warning",
            )
