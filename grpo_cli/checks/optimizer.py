"""Whether the package is there that brings the optimizer a recipe asks for.

Source: `transformers.trainer_optimizer`, 5.17, which asks for it only once the model is loaded.
"""

import importlib.util
from collections.abc import Iterator

from grpo_cli.checks.settings import read_setting
from grpo_cli.errors import Problem, install_extra
from grpo_cli.recipe.recipe import Recipe

_PACKAGES: dict[str, tuple[str, str | None]] = {
    "galore_": ("galore_torch", "pip install galore-torch"),
    "apollo_": ("apollo_torch", "pip install apollo-torch"),
    "schedule_free_": ("schedulefree", "pip install schedulefree"),
    "lomo": ("lomo_optim", "pip install lomo-optim"),
    "adalomo": ("lomo_optim", "pip install lomo-optim"),
    "grokadamw": ("grokadamw", "pip install grokadamw"),
    "stable_adamw": ("optimi", "pip install torch-optimi"),
    "adamw_anyprecision": ("torchdistx", "pip install torchdistx"),
    "adamw_torch_4bit": ("torchao", "pip install torchao"),
    "adamw_torch_8bit": ("torchao", "pip install torchao"),
    "adamw_8bit": ("bitsandbytes", None),
    "adamw_bnb_": ("bitsandbytes", None),
    "ademamix": ("bitsandbytes", None),
    "lion_": ("bitsandbytes", None),
    "paged_": ("bitsandbytes", None),
    "rmsprop_bnb": ("bitsandbytes", None),
}
"""Of optimizers whose names begin so: the module, and how to get it; None for our own extra. All others need
nothing more."""


def find_package(optimizer: str) -> tuple[str, str] | None:
    """The module that brings an optimizer, and how to get it; None where nothing more is needed."""
    for beginning, (module, install) in _PACKAGES.items():
        if optimizer.startswith(beginning):
            return module, install or install_extra("quantization")
    return None


def check_optimizer(recipe: Recipe) -> Iterator[Problem]:
    """An optimizer whose package is missing."""
    optimizer = str(read_setting(recipe, "optim"))
    needed = find_package(optimizer)
    if needed is not None and importlib.util.find_spec(needed[0]) is None:
        module, install = needed
        yield Problem(
            f"the optimizer {optimizer} needs {module}, which is not installed",
            f"{install}, or remove `optim`: adamw_torch_fused needs nothing more",
            "training.optim",
        )
