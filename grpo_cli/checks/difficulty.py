"""Checks of `dataset.difficulty`: what prompts are drawn by."""

from collections.abc import Iterator
from contextlib import suppress

from pydantic import ValidationError

from grpo_cli.checks.context import CheckContext, collect
from grpo_cli.data.preview import Preview
from grpo_cli.data.rows import show_names, suggest
from grpo_cli.data.solve_rates import read_solve_rates
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import SOURCE
from grpo_cli.recipe.difficulty import (
    DifficultyConfig,
    OrderDifficulty,
    PoolsDifficulty,
    read_number,
)
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import name_rewards, right_answers, right_scores
from grpo_cli.rewards.registry import find_kind
from grpo_cli.rewards.scoring import clip_score

_DIFFICULTY = "dataset.difficulty"


def check_difficulty(context: CheckContext) -> Iterator[Issue]:
    """Check what prompts are drawn by."""
    recipe, seen = context.recipe, context.preview
    config = recipe.dataset.difficulty
    # `check_compatibility` reports scored data.
    if config is None or not recipe.is_sampled:
        return
    if isinstance(config, PoolsDifficulty):
        yield from _check_pools(config)
    if not isinstance(config, OrderDifficulty):
        problems = [*_check_reward(recipe, config.reward)]
        yield from problems
        if config.samples is not None and not problems:
            right = right_answers(recipe.rewards, config.reward)
            with collect(problems):
                read_solve_rates(config.samples, right)
            yield from problems
    if seen is not None and seen.columns is not None:
        yield from _check_drawn_by(recipe, config, seen)


def _check_pools(config: PoolsDifficulty) -> Iterator[Issue]:
    if config.hard >= config.easy:
        text = f"is {config.hard:g}, and `easy` is {config.easy:g}: every prompt would be one or the other"
        yield Issue(text, "set it below `easy`", f"{_DIFFICULTY}.hard")
    if config.easy_share + config.hard_share > 1:
        text = f"is, together with `easy_share`, {config.easy_share + config.hard_share:g}"
        yield Issue(text, "lower one of them: 1 is all prompts", f"{_DIFFICULTY}.hard_share")


def _check_reward(recipe: Recipe, named: str | None) -> Iterator[Issue]:
    names = name_rewards(recipe.rewards)
    if named is not None and named not in names:
        text = f"there is no reward `{named}`; there are {show_names(names)}"
        yield Issue(text, suggest(named, names, "name one of these"), f"{_DIFFICULTY}.reward")
    if named in names and named not in right_scores(recipe.rewards):
        config = recipe.rewards[names.index(named)]
        low, high = _range_of(config)
        if low < 0 or high > 1:
            text = f"`{named}` gives {low:g} to {high:g}, and shares of right answers are 0 to 1"
            yield Issue(
                text, "name a reward between 0 and 1, or `clip` it", f"{_DIFFICULTY}.reward"
            )
    if named is None and not right_scores(recipe.rewards):
        text = "no reward says whether an answer is right"
        ranges = zip(names, map(_range_of, recipe.rewards), strict=True)
        shares = [name for name, (low, high) in ranges if low >= 0 and high <= 1]
        fix = "add one that does, such as `kind: math`, or remove `difficulty`"
        if shares:
            fix = f"name one that is between 0 and 1: `reward: {shares[0]}`"
        yield Issue(text, fix, _DIFFICULTY)


def _range_of(config: RewardConfig) -> tuple[float, float]:
    """Return the least and the greatest score of a reward; 0 and 1 if only a function of the user's knows."""
    kind = find_kind(config.kind)
    low, high = 0.0, 1.0
    if kind is not None and config.kind not in ("python", "environment"):
        # Another check reports wrong parameters.
        with suppress(ValidationError):
            low, high = kind.model_validate(config.params).details().range
    return clip_score(low, config.clip), clip_score(high, config.clip)


def _check_drawn_by(recipe: Recipe, config: DifficultyConfig, seen: Preview) -> Iterator[Issue]:
    columns = frozenset(seen.columns or ()).union(*(p.columns for p in recipe.dataset.parts))
    columns |= {SOURCE} if recipe.dataset.shares else set()
    for key in ("column", "solve_rate", "by"):
        name = getattr(config, key, None)
        if name is not None and name not in columns:
            text = f"there is no column `{name}`; there are {show_names(sorted(columns))}"
            yield Issue(text, suggest(name, columns, "name one of these"), f"{_DIFFICULTY}.{key}")
        elif name is not None and key != "by":
            problems: list[Issue] = []
            with collect(problems):
                for row in seen.sample:
                    read_number(key, name, row.get(name))
            yield from problems
