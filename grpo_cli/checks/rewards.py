"""Checks of the `rewards` section."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_cli.checks.context import CheckContext
from grpo_cli.issues import Issue
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.contract import RewardParams
from grpo_cli.rewards.scoring import clip_score


def check_rewards(context: CheckContext) -> Iterator[Issue]:
    """Find rewards with a single score, or whose score counts twice or not at all."""
    recipe = context.recipe
    for index, config in enumerate(recipe.rewards):
        if index in context.rewards:
            yield from _check_range(config, context.rewards[index], f"rewards.{index}")
    yield from _check_repeated(recipe.rewards, context.rewards)
    yield from _check_weights(recipe)
    yield from _check_sources(recipe)
    yield from _check_unfit(recipe, context.kinds)


def _check_unfit(recipe: Recipe, kinds: Mapping[str, Any]) -> Iterator[Issue]:
    """Find rewards that score episodes or images without there being any."""
    for index, reward in enumerate(recipe.rewards):
        path = f"rewards.{index}"
        if reward.kind == "environment" and not recipe.environment:
            seen = "takes the score that an environment gives, and the recipe has no `environment`"
            yield Issue(seen, "add one, or remove the reward", path)
        if reward.kind == "tool_use" and not _may_call(recipe, kinds):
            seen = "scores calls of tools, and the recipe has none that the model may call"
            yield Issue(seen, "add `tools`, or remove the reward", path)
        if reward.reads != "last" and not recipe.has_episodes:
            seen = f"`{reward.reads}` has no effect: completions have one message without tools and environment"
            yield Issue(
                seen,
                "add `tools` or an `environment`, or remove it",
                f"{path}.reads",
                level="warning",
            )
        if reward.kind == "judge" and reward.params.get("images") and not recipe.has_images:
            seen = "has no effect: no prompt has images"
            yield Issue(seen, "remove it", f"{path}.images", level="warning")


def _may_call(recipe: Recipe, kinds: Mapping[str, Any]) -> bool:
    """Return whether the model may call tools; True if only opening an environment tells."""
    own = [params for path, params in kinds.items() if path.startswith("environment")]
    is_unread = len(recipe.environment) > len(own)
    return bool(recipe.tools or is_unread or any(each.tool_names() != [] for each in own))


def _check_sources(recipe: Recipe) -> Iterator[Issue]:
    names = [source.source_name for source in recipe.dataset.parts]
    for index, reward in enumerate(recipe.rewards):
        if reward.source and reward.source not in names:
            fix = f"name one of {', '.join(map(str, names))}" if names[0] else "remove it"
            yield Issue(f"there is no source `{reward.source}`", fix, f"rewards.{index}.source")


def _check_weights(recipe: Recipe) -> Iterator[Issue]:
    """Find rewards that weigh nothing, and comparisons within groups that a time limit takes apart."""
    # Beside a teacher, rewards may merely measure.
    has_weight = recipe.teacher is not None or any(reward.weight for reward in recipe.rewards)
    if recipe.rewards and not has_weight:
        seen = "every reward has the weight 0, so nothing is learned"
        yield Issue(seen, "give at least one reward a weight", "rewards.0.weight")
    for index, reward in enumerate(recipe.rewards):
        if (reward.model_extra or {}).get("mode") == "relative" and reward.timeout_s is not None:
            seen = "scores completions one by one, so `mode: relative` has no group to compare"
            fix = "remove it; `request_timeout_s` limits each request"
            yield Issue(seen, fix, f"rewards.{index}.timeout_s")


def _check_range(config: RewardConfig, params: RewardParams, path: str) -> Iterator[Issue]:
    """Find rewards whose parameters or `clip` leave a single score."""
    low, high = params.details().range
    if clip_score(low, config.clip) == clip_score(high, config.clip):
        clip = f"with `clip: {list(config.clip)}` " if config.clip else ""
        yield Issue(
            f"{clip}every score is {clip_score(high, config.clip):g}, so the reward teaches nothing "
            f"(`{config.kind}` gives {low:g} to {high:g})",
            "choose bounds within that range, or remove `clip`"
            if clip
            else "correct its parameters",
            f"{path}.clip" if clip else path,
        )
    elif high <= 0 and config.weight < 0:
        yield Issue(
            f"`{config.kind}` gives {low:g} to {high:g}, so a negative weight rewards what it is a penalty for",
            f"write `weight: {-config.weight:g}`",
            f"{path}.weight",
            level="warning",
        )


def _check_repeated(
    rewards: Sequence[RewardConfig], valid: Mapping[int, RewardParams]
) -> Iterator[Issue]:
    """Find rewards whose name is taken, or whose score counts twice."""
    names = [each.name for each in rewards]
    for index, name in enumerate(names):
        if name in names[:index] and name is not None:
            seen = f"two rewards have the name `{name}`"
            yield Issue(seen, "rename one of them", f"rewards.{index}.name")
    plain = [each.model_copy(update={"name": None}) for each in rewards]
    unsigned = [each.model_copy(update={"weight": abs(each.weight)}) for each in plain]
    for index, each in enumerate(plain):
        first = unsigned.index(unsigned[index])
        if rewards[first].weight == -each.weight != 0.0:
            seen = f"is the same as rewards.{first} with the weight {-each.weight:g}: they cancel each other out"
            yield Issue(seen, "remove one of them", f"rewards.{index}", level="warning")
        if (first := plain.index(each)) < index and rewards[index].weight:
            seen = f"is the same as rewards.{first}, so its score counts twice"
            fix = f"remove it, and set `weight: {2 * rewards[index].weight:g}` there if that is what you want"
            yield Issue(seen, fix, f"rewards.{index}", level="warning")
        nested = getattr(valid.get(index), "of", None)
        for other, entry in enumerate(rewards if nested is not None else ()):
            alike = valid.get(other) == nested and entry.condition == rewards[index].condition
            if alike and entry.weight:
                seen = f"judges answers as rewards.{other} does, so a right one counts twice"
                fix = f"remove rewards.{other}, or give it `weight: 0` to measure its accuracy only"
                yield Issue(seen, fix, f"rewards.{index}.of", level="warning")
