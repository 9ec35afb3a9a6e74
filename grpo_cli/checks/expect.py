"""Checks of the `expect` section."""

from collections.abc import Iterator
from contextlib import suppress

from grpo_cli.checks.context import CheckContext
from grpo_cli.errors import RewardError, nearest
from grpo_cli.issues import Issue
from grpo_cli.recipe.expect import ExpectedMetric
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import name_rewards

_HELD_OUT = ("completion_length", "clipped")
"""Metrics of the evaluation after training, besides those of rewards."""


def check_expect(context: CheckContext) -> Iterator[Issue]:
    """Find bands at steps that the training never reaches, or of rewards that the recipe does not have."""
    recipe, total_steps = context.recipe, context.steps
    unused = "so nothing will be compared"
    for index, each in enumerate(recipe.expect.metrics if recipe.expect else ()):
        path, (kind, _, name) = f"expect.metrics.{index}", each.metric.partition("/")
        if kind in ("accuracy", "rewards") and recipe.is_sampled:
            with suppress(RewardError):
                names = name_rewards(recipe.rewards)
                if name.removesuffix("/mean").removesuffix("/std") not in names:
                    seen = f"no reward of this recipe is named `{name}`, {unused}"
                    fix = f"write `{kind}/{nearest(name, names) or names[0]}`, or remove the band"
                    yield Issue(seen, fix, f"{path}.metric", level="warning")
        if _is_logged(each.metric):
            yield from _check_records(recipe, each, path, total_steps)
        if total_steps is not None and each.step > total_steps:
            seen = f"{each.step} is after the last step of this training ({total_steps}), {unused}"
            fix = "train as many steps, or measure again with grpo expect RUN"
            yield Issue(seen, fix, f"{path}.step", level="warning")


def _is_logged(metric: str) -> bool:
    kind, _, name = metric.partition("/")
    held_out = kind == "accuracy" or (kind == "rewards" and "/" not in name)
    return not held_out and metric not in _HELD_OUT and not metric.startswith("eval_")


def _check_records(
    recipe: Recipe, band: ExpectedMetric, path: str, total_steps: int | None
) -> Iterator[Issue]:
    """Find bands at steps between two records, and of more records than there are by then."""
    every = int(recipe.logging.logging_steps)
    if every < 1 or recipe.setting("logging_strategy") != "steps":
        return
    records, rest = divmod(band.step, every)
    # `grpo expect` writes the last step, which need not have a record.
    if (rest or not records) and band.window == 1 and band.step != total_steps:
        seen = f"step {band.step} has no record: `logging.logging_steps` is {every}"
        fix = f"set it to {max(records, 1) * every}, or `logging_steps: 1`"
        yield Issue(seen, fix, f"{path}.step", level="warning")
    if band.window > max(records, 1):
        seen = f"{band.window} is more than the records up to step {band.step}, which are {records}"
        yield Issue(seen, f"set it to {max(records, 1)}", f"{path}.window", level="warning")
