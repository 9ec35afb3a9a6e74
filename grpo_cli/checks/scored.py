"""Checks of `dataset.kind: scored`."""

from collections.abc import Iterator

from grpo_cli.checks.context import CheckContext
from grpo_cli.data.scored import GroupReport
from grpo_cli.issues import Issue

_EMPTY = 0.5
"""Share of empty places in groups beyond which most of a step is padding."""


def check_scored(context: CheckContext) -> Iterator[Issue]:
    """Find groups of scored responses that do not fit, and responses that nothing holds the model near."""
    recipe, seen = context.recipe, context.preview
    if not recipe.setting("beta"):
        text = (
            "is 0: nothing holds the model near where it started, and it did not write these responses itself, "
            "so their likelihoods can fall without bound"
        )
        yield Issue(text, "set `training.beta: 0.04`", "training.beta", level="warning")
    if seen is not None and seen.groups is not None:
        yield from _check_groups(recipe.generation.num_generations, seen.groups)


def _check_groups(size: int, groups: GroupReport) -> Iterator[Issue]:
    path, prompts, largest = "generation.num_generations", groups.prompts, groups.largest
    if groups.equal == prompts:
        seen = f"the responses of each of the {prompts} prompts have one and the same reward: nothing to learn"
        fix = "name another column, or score the responses again"
        yield Issue(seen, fix, "dataset.reward")
    if groups.single:
        left_out = f"{groups.single} prompts have a single response and are left out"
        seen = f"{left_out}: there is nothing to compare it with; {prompts} are left"
        yield Issue(seen, "score more responses of them", "dataset", level="note")
    if groups.empty:
        seen = f"{groups.empty} of {groups.responses} responses are empty"
        fix = "fill them, or leave such rows out, unless an empty answer is to be learned from"
        yield Issue(seen, fix, "dataset.response", level="warning")
    filled = groups.responses / (prompts * size)
    if largest > size:
        seen = f"prompts have up to {largest} responses, of which each visit takes {size} by chance"
        at_once = groups.responses / (prompts * largest)
        fix = f"set `num_generations: {largest}` to compare all of them at once"
        if at_once < _EMPTY:
            fix = f"keep it: with {largest}, {1 - at_once:.0%} of the places would stay empty"
        yield Issue(seen, fix, path, level="note")
    elif filled < _EMPTY:
        average = f"{groups.responses / prompts:.1f} responses on average"
        seen = f"prompts have {average}, so {1 - filled:.0%} of the places in a step stay empty"
        fix = f"set `num_generations: {largest if largest < size else max(groups.median, 2)}`"
        yield Issue(seen, fix, path, level="warning")
