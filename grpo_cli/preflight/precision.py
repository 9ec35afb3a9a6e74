"""Whether the processor computes in the precision that a recipe asks for."""

from collections.abc import Iterator

from grpo_cli.errors import Problem
from grpo_cli.preflight.hardware import Hardware, is_on_cpu
from grpo_cli.recipe.recipe import Recipe


def check_precision(recipe: Recipe, hardware: Hardware) -> Iterator[Problem]:
    """bfloat16 on a processor that emulates it: asked for, so taken, and slow."""
    if not is_on_cpu(recipe.launch, hardware) or hardware.bfloat16 is not False:
        return
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
