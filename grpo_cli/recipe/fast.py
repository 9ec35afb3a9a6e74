"""Which parts of `training.fast` are on with a recipe, and why others are off."""

from collections.abc import Mapping

from grpo_cli.recipe.launch import SHARED_WEIGHTS
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.training import (
    ATTENTION,
    BUDGET,
    GRAPHS,
    IMAGES,
    PARTS,
    FastConfig,
    find_left_off,
    leave_off,
)


def describe_fast(
    recipe: Recipe, *, cpu: bool = False, excluded: Mapping[str, str] | None = None
) -> str:
    """Return the parts that are on, and why others are off: `shared_prompts; off: no_signal (beta is …)`.

    Args:
        recipe: Whose `training.fast` is described.
        cpu: Whether the machine has no GPU.
        excluded: Parts that the training turned off on the model, and why.
    """
    if recipe.training.mode == "async":
        return "as TRL's asynchronous trainer does"
    if cpu:
        launch = recipe.launch.model_copy(update={"use_cpu": True})
        recipe = recipe.model_copy(update={"launch": launch})
    left_off = {**_find_left_off(recipe), **(excluded or {})}
    resolved = leave_off(resolve_fast(recipe), left_off)
    on = [part for part in (*PARTS, GRAPHS) if getattr(resolved, part)]
    if resolved.max_tokens_per_micro_batch:
        on.append(f"{BUDGET} {resolved.max_tokens_per_micro_batch}")
    off: dict[str, list[str]] = {}
    more = [BUDGET] * (BUDGET in left_off) + [GRAPHS] * recipe.training.fast.cuda_graphs
    for part in (*PARTS, *more):
        samples_itself = part == "sampling" and recipe.generation.backend == "vllm"
        if part not in on and not samples_itself:
            off.setdefault(left_off.get(part) or _why_not_wanted(recipe, part), []).append(part)
    reasons = "; ".join(f"{', '.join(parts)} ({why})" for why, parts in off.items())
    return "; ".join(filter(None, [", ".join(on), f"off: {reasons}" if off else ""]))


def _why_not_wanted(recipe: Recipe, part: str) -> str:
    if not getattr(recipe.training.fast, part):
        return "switched off"
    if not recipe.is_sampled:
        return "scored data is not sampled"
    return f"backend {recipe.generation.backend} samples in its own way"


def resolve_fast(recipe: Recipe) -> FastConfig:
    """Return the switches without the parts that are not exact with this recipe; a model may exclude more."""
    off = (*PARTS, BUDGET) if recipe.training.mode == "async" else _find_left_off(recipe)
    return leave_off(requested_parts(recipe), off)


def requested_parts(recipe: Recipe) -> FastConfig:
    """Return the switches; `sampling` only if transformers samples."""
    fast = recipe.training.fast
    if recipe.is_sampled and recipe.generation.backend in ("transformers", "auto"):
        return fast
    return leave_off(fast, ["sampling"])


def _find_left_off(recipe: Recipe) -> dict[str, str]:
    fast, training, model = requested_parts(recipe), recipe.training, recipe.model
    options = recipe.generation.backend_kwargs
    settings = {**training.extras, "beta": recipe.kl_weight, "generation_kwargs": options}
    settings[IMAGES] = recipe.has_images
    left_off = find_left_off(fast, settings)
    if fast.cuda_graphs and (why := _why_no_graphs(recipe)):
        left_off.setdefault(GRAPHS, why)
    strategy = recipe.launch.strategy
    if fast.sampling and strategy in SHARED_WEIGHTS:
        why = f"with strategy {strategy} each process holds a part of the weights"
        left_off |= {"sampling": why} | ({GRAPHS: why} if fast.cuda_graphs else {})
    dropout = model.lora.lora_dropout if model.lora else 0.0
    attention = model.attn_implementation or ATTENTION[0]
    if not fast.shared_prompts or "shared_prompts" in left_off:
        return left_off
    if dropout and not recipe.setting("disable_dropout"):
        why = f"lora_dropout is {dropout:g}, drawn again for each copy of a prompt"
        left_off["shared_prompts"] = why
    elif not any(part in attention for part in ATTENTION):
        why = f"attn_implementation {attention} takes no such rows"
        left_off["shared_prompts"] = why
    return left_off


def _why_no_graphs(recipe: Recipe) -> str | None:
    """Return what of `graph_decoding.graph_unsupported_reason` the recipe decides."""
    model, attention = recipe.model, recipe.model.attn_implementation or ATTENTION[0]
    if attention != ATTENTION[0]:
        return f"attention {attention} needs other masks"
    if model.quantization is not None:
        return "adapters cannot be merged in a copy of quantized weights"
    if model.lora and model.lora.lora_dropout and not recipe.setting("disable_dropout"):
        return "dropout in an adapter ends when it is merged"
    return "there is no GPU" if recipe.launch.use_cpu else None
