"""The value a recipe gives a field of `GRPOConfig`, or TRL's default where it gives none."""

import ast
from typing import Any

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
