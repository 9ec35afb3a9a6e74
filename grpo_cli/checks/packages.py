"""Packages that a recipe needs."""

import importlib.util
from collections.abc import Iterator

from grpo_cli.checks.context import CheckContext
from grpo_cli.errors import install_extra, pip
from grpo_cli.issues import Issue

_OPTIMIZER_PACKAGES = {
    "galore_": ("galore_torch", "galore-torch"),
    "apollo_": ("apollo_torch", "apollo-torch"),
    "schedule_free_": ("schedulefree", "schedulefree"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "adalomo": ("lomo_optim", "lomo-optim"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "adamw_anyprecision": ("torchdistx", "torchdistx"),
    "adamw_torch_4bit": ("torchao", "torchao"),
    "adamw_torch_8bit": ("torchao", "torchao"),
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_", "ademamix", "lion_", "paged_", "rmsprop_bnb"),
        ("bitsandbytes", ""),
    ),
}
"""Of optimizers whose names begin so: the module, and its distribution (empty for our own extra). All others
need nothing more."""


def check_packages(context: CheckContext) -> Iterator[Issue]:
    """Find packages and devices that a setting needs and this machine lacks."""
    recipe = context.recipe
    attention, path = recipe.model.attn_implementation or "", "model.attn_implementation"
    if attention.startswith("flash_attention"):
        fix = "set `attn_implementation: sdpa`, or remove it"
        if context.on_cpu:
            yield Issue(f"{attention} needs a GPU", fix, path)
        elif not has_module("flash_attn") and not has_module("kernels"):
            seen = f"{attention} needs flash-attn, which is not installed"
            fix = f"{pip('install flash-attn --no-build-isolation')}, or {fix}"
            yield Issue(seen, fix, path, package="flash-attn")
    bits = recipe.model.quantization
    if bits is not None and recipe.launch.use_cpu:
        seen = f"{bits} needs a GPU, and `launch.use_cpu` is true"
        yield Issue(seen, "remove `quantization`, or `use_cpu`", "model.quantization")
    if recipe.generation.backend == "vllm" and not has_module("vllm"):
        fix = f"{install_extra('vllm')}, or set `generation.backend: transformers`"
        yield Issue("vllm is not installed", fix, "generation.backend", package="vllm")
    if recipe.setting("use_liger_kernel") and not has_module("liger_kernel"):
        fix = f"{pip('install liger-kernel')}, or remove `use_liger_kernel`"
        path, package = "training.use_liger_kernel", "liger-kernel"
        yield Issue("liger-kernel is not installed", fix, path, package=package)
    optimizer = str(recipe.setting("optim"))
    needed = find_package(optimizer)
    without = "or remove `optim`: adamw_torch_fused needs nothing more"
    if needed is not None and needed[0] == "bitsandbytes" and recipe.launch.use_cpu:
        seen = f"the optimizer {optimizer} needs a GPU, and `launch.use_cpu` is true"
        yield Issue(seen, f"remove `use_cpu`, {without}", "training.optim")
    elif needed is not None and not has_module(needed[0]):
        seen = f"the optimizer {optimizer} needs {needed[0]}, which is not installed"
        yield Issue(seen, f"{needed[1]}, {without}", "training.optim", package=needed[0])


def has_module(package: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def find_package(optimizer: str) -> tuple[str, str] | None:
    """Return the module that brings an optimizer, and how to install it; None if torch has it."""
    for beginning, (module, name) in _OPTIMIZER_PACKAGES.items():
        if optimizer.startswith(beginning):
            return module, pip(f"install {name}") if name else install_extra("quantization")
    return None
