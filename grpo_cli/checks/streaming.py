"""Checks of `dataset.streaming`."""

from collections.abc import Iterator

from grpo_cli.checks.context import CheckContext
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import FIRST_ROWS


def check_streaming(context: CheckContext) -> Iterator[Issue]:
    """Find what has no end with streamed rows."""
    recipe = context.recipe
    if recipe.training.max_steps <= 0:
        seen = "is needed with `dataset.streaming`: rows are not counted, and no epoch ends"
        yield Issue(seen, "set the number of optimizer steps", "training.max_steps")
    warmup = recipe.warmup
    if warmup is not None and not warmup.train and warmup.limit > FIRST_ROWS:
        seen = f"is {warmup.limit:,}, and of streamed rows a warm-up reads the first {FIRST_ROWS:,}"
        yield Issue(seen, "lower it, or name files of its own by `warmup.train`", "warmup.limit")
