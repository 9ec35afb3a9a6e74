"""Whether a recipe's `expect` block can be met at all. What a run gave is `expectations`'."""

from collections.abc import Iterator
from contextlib import suppress

from grpo_cli.errors import Problem, RewardError, nearest
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import name_rewards

_OF_REWARDS = ("accuracy", "rewards")


def check_expect(recipe: Recipe, total_steps: int | None) -> Iterator[Problem]:
    """Find bands at steps that the training never reaches, or of rewards that the recipe does not have.

    Args:
        recipe: With its `expect` block, if it has one.
        total_steps: Optimizer steps of the whole training; None if they are not known.
    """
    for index, each in enumerate(recipe.expect.metrics if recipe.expect else ()):
        kind, _, name = each.metric.partition("/")
        if kind in _OF_REWARDS and recipe.is_sampled:
            with suppress(RewardError):
                names = name_rewards(recipe.rewards)
                if name.removesuffix("/mean").removesuffix("/std") not in names:
                    yield Problem(
                        f"no reward of this recipe is named `{name}`, so nothing will be compared",
                        f"write `{kind}/{nearest(name, names) or names[0]}`, or remove the band",
                        f"expect.metrics.{index}.metric",
                        level="warning",
                    )
        if total_steps is not None and each.step > total_steps:
            yield Problem(
                f"{each.step} is after the last step of this training ({total_steps}), so nothing will be "
                "compared",
                "train as many steps, or measure anew with grpo expect RUN",
                f"expect.metrics.{index}.step",
                level="warning",
            )
