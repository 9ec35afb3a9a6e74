"""What a recipe says about scored data, against the data and against what training does with it."""

from collections.abc import Iterator

from grpo_cli.analysis.ranking import GAP, RANKING
from grpo_cli.checks.settings import read_setting
from grpo_cli.checks.stopping import named_metrics
from grpo_cli.data.preview import Preview
from grpo_cli.data.scored import GroupReport
from grpo_cli.errors import Problem
from grpo_cli.recipe.launch import SHARED_WEIGHTS
from grpo_cli.recipe.recipe import Recipe

_EMPTY = 0.5
"""Share of empty places in groups beyond which most of a step is padding."""


def check_scored(recipe: Recipe, seen: Preview | None) -> Iterator[Problem]:
    """Settings that mean nothing without sampling, and groups that do not fit."""
    if recipe.is_sampled:
        return
    if recipe.generation.backend != "transformers":
        yield Problem(
            f"`{recipe.generation.backend}` would sample, and with scored data nothing is sampled",
            "remove it",
            "generation.backend",
        )
    if recipe.generation.dynamic_sampling is not None:
        yield Problem(
            "would sample other prompts, and with scored data nothing is sampled",
            "remove it",
            "generation.dynamic_sampling",
        )
    if not read_setting(recipe, "beta"):
        yield Problem(
            "is 0: nothing holds the model near where it started, and it did not write these responses "
            "itself, so their likelihoods can fall without bound",
            "set `training.beta: 0.04`",
            "training.beta",
            level="warning",
        )
    if recipe.launch.strategy in SHARED_WEIGHTS and recipe.training.eval_strategy != "no":
        yield Problem(
            f"needs all weights on each process, which {recipe.launch.strategy} does not have",
            "set `eval_strategy: no`, or `launch.strategy: ddp`",
            "training.eval_strategy",
        )
    for path, metric in named_metrics(recipe).items():
        if metric is not None and metric.removeprefix("eval_") not in (RANKING, GAP):
            yield Problem(
                f"`{metric}` is not measured on scored data; eval_{RANKING} (the share of pairs ranked right) "
                f"and eval_{GAP} are",
                f"set it to eval_{RANKING}",
                path,
            )
    if seen is not None and seen.groups is not None:
        yield from _check_groups(recipe.generation.num_generations, seen.groups)


def _check_groups(size: int, groups: GroupReport) -> Iterator[Problem]:
    path = "generation.num_generations"
    if groups.equal == groups.prompts:
        yield Problem(
            f"the responses of each of the {groups.prompts} prompts have one and the same reward, so they "
            "teach nothing",
            "name another column, or score the responses again",
            "dataset.reward",
        )
    if groups.single:
        yield Problem(
            f"{groups.single} prompts have a single response and are left out: there is nothing to compare "
            f"it with; {groups.prompts} are left",
            "score more responses of them",
            "dataset",
            level="note",
        )
    filled = groups.responses / (groups.prompts * size)
    if groups.largest > size:
        at_once = groups.responses / (groups.prompts * groups.largest)
        yield Problem(
            f"prompts have up to {groups.largest} responses, of which each visit takes {size} by chance",
            f"set `num_generations: {groups.largest}` to compare all of them at once"
            if at_once >= _EMPTY
            else f"keep it: with {groups.largest}, {1 - at_once:.0%} of the places would stay empty",
            path,
            level="note",
        )
    elif filled < _EMPTY:
        yield Problem(
            f"prompts have {groups.responses / groups.prompts:.1f} responses on average, so {1 - filled:.0%} "
            "of the places in a step stay empty",
            f"set `num_generations: {groups.largest}`"
            if groups.largest < size
            else f"set `num_generations: {max(groups.median, 2)}`",
            path,
            level="warning",
        )
