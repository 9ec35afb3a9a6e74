"""Which precision weights are held in, and whether the processor and the optimizer can work with it."""

from collections.abc import Iterator
from dataclasses import replace

from grpo_cli.checks.settings import read_setting
from grpo_cli.errors import Problem
from grpo_cli.machine import Hardware, is_on_cpu
from grpo_cli.recipe.launch import KEEPS_FLOAT32
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe

FINE_ENOUGH = 5e-5
"""The learning rate from which an update by AdamW moves a usual weight, of 0.02, by half a step of bfloat16."""
_COMPENSATED = ("use_kahan_summation", "bf16_stochastic_round", "kahan_sum")
"""`optim_args` of optimizers that do not lose what bfloat16 rounds away."""


def settle_dtype(loaded: LoadedRecipe) -> LoadedRecipe:
    """Put float32 in the place of `model.dtype: auto` if all weights are trained."""
    recipe = loaded.recipe
    if recipe is None or recipe.model.dtype != "auto" or not _trains_all(recipe):
        return loaded
    model = recipe.model.model_copy(update={"dtype": "float32"})
    return replace(loaded, recipe=recipe.model_copy(update={"model": model}))


def check_precision(recipe: Recipe, hardware: Hardware) -> Iterator[Problem]:
    """Find 16-bit weights that lose what they learn, and bfloat16 that the processor emulates."""
    cpu = is_on_cpu(recipe.launch, hardware)
    names = {"bf16": "bfloat16", "fp16": "float16", "no": None}
    mixed = names[recipe.training.mixed_precision(cpu=cpu)]
    yield from _check_lost_updates(recipe, mixed)
    yield from _check_continuous_batching(recipe, mixed)
    if cpu and hardware.bfloat16 is False:
        yield from _check_emulation(recipe)


def _trains_all(recipe: Recipe) -> bool:
    return recipe.model.lora is None and recipe.model.quantization is None


def _check_continuous_batching(recipe: Recipe, mixed: str | None) -> Iterator[Problem]:
    """Find trained weights that TRL would round before each sampling.

    Source: trl 1.16, `GRPOTrainer._generate_single_turn`, `unwrapped_model.to(torch.bfloat16)`.
    """
    backend = "transformers_continuous_batching"
    trained = recipe.model.dtype if _trains_all(recipe) else "float32"
    if recipe.generation.backend == backend and mixed not in (None, trained):
        yield Problem(
            f"before each sampling it turns the whole model to {mixed}, and rounds the trained weights with it",
            "set `backend: vllm` or `backend: transformers`, or `training.bf16: false`",
            "generation.backend",
        )


def _check_lost_updates(recipe: Recipe, mixed: str | None) -> Iterator[Problem]:
    rate = float(read_setting(recipe, "learning_rate"))
    if not _trains_all(recipe) or recipe.model.dtype != "bfloat16" or rate >= FINE_ENOUGH:
        return
    launch = recipe.launch
    if launch.accelerate_config or (mixed and launch.strategy in KEEPS_FLOAT32):
        return
    told = str(read_setting(recipe, "optim_args") or "").lower().replace(" ", "")
    if any(f"{name}=true" in told for name in _COMPENSATED):
        return
    yield Problem(
        f"with all weights in bfloat16, a learning rate of {rate:g} is lost: a weight changes only if its update "
        "is more than 1/512 of it, and most updates are rounded away",
        "set `dtype: float32` (on a GPU it is computed in bfloat16 all the same), or add `lora`",
        "model.dtype",
    )


def _check_emulation(recipe: Recipe) -> Iterator[Problem]:
    asked = [
        ("model.dtype", recipe.model.dtype == "bfloat16", "auto"),
        ("training.bf16", bool(recipe.training.extras.get("bf16")), "false"),
    ]
    for path, is_asked, instead in asked:
        if is_asked:
            yield Problem(
                "this processor emulates bfloat16 (it has none of avx512_bf16, amx_bf16 and ARM's bf16), "
                "which takes two to ten times as long as float32",
                f"set `{path}: {instead}`",
                path,
                level="warning",
            )
