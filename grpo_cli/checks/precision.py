"""The precision of weights and of the computation."""

from collections.abc import Iterator
from dataclasses import replace

from grpo_cli.checks.context import CheckContext
from grpo_cli.issues import Issue
from grpo_cli.machine import is_on_cpu
from grpo_cli.recipe.launch import KEEPS_FLOAT32
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe

_FINE_ENOUGH = 5e-5
"""The learning rate from which an update by AdamW moves a usual weight, of 0.02, by half a step of bfloat16."""

_COMPENSATED = ("use_kahan_summation", "bf16_stochastic_round", "kahan_sum")
"""`optim_args` of optimizers that do not lose what bfloat16 rounds away."""


def resolve_dtype(loaded: LoadedRecipe) -> LoadedRecipe:
    """Replace `model.dtype: auto` by float32 if all weights are trained."""
    recipe = loaded.recipe
    if recipe is None or recipe.model.dtype != "auto" or not _trains_all(recipe):
        return loaded
    model = recipe.model.model_copy(update={"dtype": "float32"})
    return replace(loaded, recipe=recipe.model_copy(update={"model": model}))


def check_precision(context: CheckContext) -> Iterator[Issue]:
    """Find 16-bit weights that lose what they learn, and bfloat16 that the processor emulates.

    Source: trl 1.16, `GRPOTrainer._generate_single_turn`, `unwrapped_model.to(torch.bfloat16)`.
    """
    recipe, hardware = context.recipe, context.hardware
    cpu = is_on_cpu(recipe.launch, hardware)
    extras = recipe.training.extras
    if extras.get("fp16") and extras.get("bf16"):
        seen = "`fp16` and `bf16` are both true, and a model is computed in one precision"
        yield Issue(seen, "remove `fp16`", "training.fp16")
    elif extras.get("fp16") and cpu:
        seen = "fp16 needs a GPU, and this training is on a CPU"
        yield Issue(seen, "remove `fp16`", "training.fp16")
    names = {"bf16": "bfloat16", "fp16": "float16", "no": None}
    mixed, dtype = names[recipe.training.mixed_precision(cpu=cpu)], recipe.model.dtype
    if _loses_updates(recipe, mixed):
        rate = float(recipe.setting("learning_rate"))
        seen = (
            f"with all weights in bfloat16, a learning rate of {rate:g} is lost: a weight changes only if its "
            "update is more than 1/512 of it, and most updates are rounded away"
        )
        fix = (
            "set `dtype: float32` (on a GPU it is computed in bfloat16 all the same), or add `lora`"
        )
        yield Issue(seen, fix, "model.dtype")
    trained = dtype if _trains_all(recipe) else "float32"
    if mixed == trained == "float16":
        seen = "with fp16, torch scales gradients and refuses those of float16 weights"
        yield Issue(
            seen, "set `dtype: float32`: it is computed in float16 all the same", "model.dtype"
        )
    attention = str(recipe.model.attn_implementation)
    if attention.startswith("flash_attention") and mixed is None and dtype == "float32":
        seen = f"{attention} computes in 16 bits alone, and these weights are float32 without `bf16` or `fp16`"
        yield Issue(seen, "set `training.bf16: true`", "model.attn_implementation", level="warning")
    batching = recipe.generation.backend == "transformers_continuous_batching"
    if batching and mixed not in (None, trained):
        seen = f"before each sampling it turns the whole model to {mixed}, and rounds the trained weights with it"
        fix = "set `backend: vllm` or `backend: transformers`, or `training.bf16: false`"
        yield Issue(seen, fix, "generation.backend")
    if not cpu or hardware.bfloat16 is not False:
        return
    for path, is_set, value in (
        ("model.dtype", dtype == "bfloat16", "auto"),
        ("training.bf16", extras.get("bf16"), "false"),
    ):
        if is_set:
            seen = (
                "this processor emulates bfloat16 (it has none of avx512_bf16, amx_bf16 and ARM's bf16), which "
                "takes two to ten times as long as float32"
            )
            yield Issue(seen, f"set `{path}: {value}`", path, level="warning")


def _trains_all(recipe: Recipe) -> bool:
    return recipe.model.lora is None and recipe.model.quantization is None


def _loses_updates(recipe: Recipe, mixed: str | None) -> bool:
    rate, launch = float(recipe.setting("learning_rate")), recipe.launch
    if not _trains_all(recipe) or recipe.model.dtype != "bfloat16" or rate >= _FINE_ENOUGH:
        return False
    if launch.accelerate_config or (mixed and launch.strategy in KEEPS_FLOAT32):
        return False
    options = str(recipe.setting("optim_args") or "").lower().replace(" ", "")
    return not any(f"{name}=true" in options for name in _COMPENSATED)
