"""The values a recipe gives the fields of `GRPOConfig`, and those that have no effect."""

import ast
from collections.abc import Iterator
from typing import Any

from grpo_cli.errors import Problem
from grpo_cli.recipe.grpo_fields import home_of, key_in_home, read_grpo_fields
from grpo_cli.recipe.recipe import Recipe


def read_setting(recipe: Recipe, name: str) -> Any:
    """The value of a `GRPOConfig` field that has a home in the recipe.

    Args:
        recipe: The recipe.
        name: TRL's name of the field, such as `beta` or `vllm_max_model_length`.

    Returns:
        The value; None for a default that is worked out when TRL runs.
    """
    section: Any = recipe
    for step in (home_of(name) or "").split("."):
        section = getattr(section, step)
    key = key_in_home(name).rsplit(".", 1)[1]
    if key in type(section).model_fields or key in section.extras:
        return getattr(section, key)
    try:
        return ast.literal_eval(read_grpo_fields()[name].default or "None")
    except ValueError:
        return None


def check_effects(recipe: Recipe, steps: int | None) -> Iterator[Problem]:
    """Find settings that have no effect, or the opposite of the one that is meant.

    Args:
        recipe: The recipe.
        steps: Optimizer steps of the training; None if they are not known.
    """
    generation, training = recipe.generation, recipe.training
    if recipe.is_sampled and generation.backend != "vllm" and generation.vllm.model_fields_set:
        yield Problem(
            f"has no effect: completions are sampled by {generation.backend}",
            "set `generation.backend: vllm`, or remove it",
            "generation.vllm",
            level="warning",
        )
    asked = generation.extras.get("generation_kwargs") or {}
    if asked.get("do_sample", True) is False:
        yield Problem(
            "greedy decoding gives every completion of a prompt the same tokens, so no group has a signal",
            "remove `do_sample`",
            "generation.generation_kwargs.do_sample",
        )
    if training.extras.get("greater_is_better") is False and _names_a_reward(recipe):
        yield Problem(
            "the model with the lowest reward would count as the best",
            "set it to true, or remove it",
            "training.greater_is_better",
            level="warning",
        )
    for index, reward in enumerate(recipe.rewards):
        if (reward.model_extra or {}).get("mode") == "relative" and reward.timeout_s is not None:
            yield Problem(
                "scores completions one by one, so `mode: relative` has no group to compare",
                "remove it; `request_timeout_s` limits each request",
                f"rewards.{index}.timeout_s",
            )
    yield from _check_beyond_the_end(recipe, steps)


def _names_a_reward(recipe: Recipe) -> bool:
    metric = str(read_setting(recipe, "metric_for_best_model") or "reward").removeprefix("eval_")
    return metric == "reward" or (metric.startswith("rewards/") and metric.endswith("/mean"))


def _check_beyond_the_end(recipe: Recipe, steps: int | None) -> Iterator[Problem]:
    """Find intervals that are longer than the training."""
    training = recipe.training
    if not steps:
        return
    for key, due in (
        ("eval", training.eval_strategy),
        ("save", read_setting(recipe, "save_strategy")),
    ):
        every = read_setting(recipe, f"{key}_steps")
        if due == "steps" and f"{key}_steps" in training.model_fields_set and (every or 0) > steps:
            yield Problem(
                f"{every:g} is after the last step of this training ({steps}), so it never happens"
                if key == "eval"
                else f"{every:g} is after the last step of this training ({steps}); only the last step is saved",
                f"set it to {max(steps // 4, 1)}, say",
                f"training.{key}_steps",
                level="warning",
            )
    warmup = read_setting(recipe, "warmup_steps") or 0
    if warmup >= steps:
        yield Problem(
            f"{warmup:g} warm-up steps of {steps} in all: the learning rate never reaches its value",
            f"set `warmup_steps: {max(steps // 10, 1)}`, or a fraction of the steps such as 0.1",
            "training.warmup_steps",
            level="warning",
        )
