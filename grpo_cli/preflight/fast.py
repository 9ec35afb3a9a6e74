"""Checks `training.fast`: which of its parts would not be exact with the rest of the recipe."""

from collections.abc import Iterator

from grpo_cli.errors import Problem
from grpo_cli.recipe.fast import find_left_off
from grpo_cli.recipe.recipe import Recipe

_INSTEAD = {
    "no_signal": "completions without signal are computed all the same",
    "shared_prompts": "prompts are computed once for each completion",
}
_WORDS = {
    "no_signal": "rows without signal left out",
    "shared_prompts": "prompts computed once",
    "sampling": "sampling from shared prompts",
}
_ATTENTION = (None, "sdpa", "eager")


def describe_fast(recipe: Recipe) -> str:
    """The parts that are on, as far as the recipe tells."""
    if recipe.training.mode == "async":
        return "TRL's own way, which async training has"
    left_off = _find_left_off(recipe)
    switches = recipe.training.fast.model_dump(include=set(_WORDS))
    switches["sampling"] &= recipe.is_sampled and recipe.generation.backend == "transformers"
    on = [_WORDS[part] for part, wanted in switches.items() if wanted and part not in left_off]
    return ", ".join(on) or "off: steps are TRL's"


def check_fast(recipe: Recipe) -> Iterator[Problem]:
    """A note for each part that is left off."""
    if recipe.training.mode == "async":
        return
    for part, why in _find_left_off(recipe).items():
        yield Problem(
            f"{_INSTEAD[part]}: {why}",
            f"nothing to mend; `training.fast: {{{part}: false}}` says that this is known",
            f"training.fast.{part}",
            level="note",
        )


def _find_left_off(recipe: Recipe) -> dict[str, str]:
    fast, training, model = recipe.training.fast, recipe.training, recipe.model
    found = find_left_off(fast, training.extras)
    dropout = model.lora.lora_dropout if model.lora else 0.0
    if not fast.shared_prompts or "shared_prompts" in found:
        return found
    if dropout and not training.extras.get("disable_dropout"):
        found["shared_prompts"] = (
            f"lora_dropout is {dropout:g}, drawn anew for each copy of a prompt"
        )
    elif model.attn_implementation not in _ATTENTION:
        found["shared_prompts"] = (
            f"attn_implementation {model.attn_implementation} takes no such rows"
        )
    return found
