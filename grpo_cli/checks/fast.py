"""What `training.fast` comes to: the parts that are on, and why the others are not, as far as the recipe tells."""

from grpo_cli.recipe.fast import ATTENTION, BUDGET, PARTS, FastConfig, find_left_off, leave_off
from grpo_cli.recipe.launch import SHARED_WEIGHTS
from grpo_cli.recipe.recipe import Recipe


def describe_fast(recipe: Recipe) -> str:
    """The parts that are on, and why others are off, such as `shared_prompts; off: no_signal (beta is …)`."""
    if recipe.training.mode == "async":
        return "as TRL's asynchronous trainer does"
    settled, left_off = settle_fast(recipe), _find_left_off(recipe)
    on = [part for part in PARTS if getattr(settled, part)]
    if settled.max_tokens_per_micro_batch:
        on.append(f"{BUDGET} {settled.max_tokens_per_micro_batch}")
    off: dict[str, list[str]] = {}
    for part in (*PARTS, *([BUDGET] if BUDGET in left_off else [])):
        if part not in on:
            off.setdefault(left_off.get(part) or _why_not_wanted(recipe, part), []).append(part)
    reasons = [f"{', '.join(parts)} ({why})" for why, parts in off.items()]
    return (
        ", ".join(on) + ("; " if on and off else "") + ("off: " + "; ".join(reasons) if off else "")
    )


def _why_not_wanted(recipe: Recipe, part: str) -> str:
    if not getattr(recipe.training.fast, part):
        return "switched off"
    if not recipe.is_sampled:
        return "scored data is not sampled"
    return f"backend {recipe.generation.backend} samples in its own way"


def settle_fast(recipe: Recipe) -> FastConfig:
    """The switches as they stand when all is left off that would not be exact, as far as the recipe tells."""
    wanted = wanted_parts(recipe)
    off = (*PARTS, BUDGET) if recipe.training.mode == "async" else _find_left_off(recipe)
    return leave_off(wanted, off)


def wanted_parts(recipe: Recipe) -> FastConfig:
    """The switches, `sampling` where transformers samples alone."""
    fast = recipe.training.fast
    if recipe.is_sampled and recipe.generation.backend in ("transformers", "auto"):
        return fast
    return fast.model_copy(update={"sampling": False})


def _find_left_off(recipe: Recipe) -> dict[str, str]:
    fast, training, model = wanted_parts(recipe), recipe.training, recipe.model
    asked = recipe.generation.extras.get("generation_kwargs")
    found = find_left_off(fast, {**training.extras, "generation_kwargs": asked})
    strategy = recipe.launch.strategy
    if fast.sampling and strategy in SHARED_WEIGHTS:
        found["sampling"] = f"with strategy {strategy} each process holds a part of the weights"
    dropout = model.lora.lora_dropout if model.lora else 0.0
    if not fast.shared_prompts or "shared_prompts" in found:
        return found
    if dropout and not training.extras.get("disable_dropout"):
        found["shared_prompts"] = (
            f"lora_dropout is {dropout:g}, drawn anew for each copy of a prompt"
        )
    elif model.attn_implementation not in (None, *ATTENTION):
        found["shared_prompts"] = (
            f"attn_implementation {model.attn_implementation} takes no such rows"
        )
    return found
