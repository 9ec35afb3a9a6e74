"""Plan the server that `grpo serve` starts."""

from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from grpo_cli.errors import SetupError, UsageError, install_extra
from grpo_cli.launch.server_plan import (
    PORT,
    VLLM_SERVE,
    Listening,
    ServePlan,
    ServerPlan,
    find_served,
    find_vllm,
    plan_server,
    plan_training_server,
)
from grpo_cli.machine import is_on_cpu, read_hardware
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.recipe import Recipe


def prepare(
    source: Path, checkpoint: str | None, listening: Listening, *, needs_vllm: bool
) -> ServePlan:
    """Return the plan of a server for a trained model; vLLM may be missing unless it is needed."""
    command = _find_command(needed=needs_vllm)
    served = find_served(source, checkpoint)
    if needs_vllm:
        # vLLM would not serve a GGUF file as trained: it gets the converted folder.
        served = replace(served, model=model_folder_or_id(served.settings))
    return plan_server(served, command, listening, on_gpu=bool(read_hardware().gpus))


def prepare_for_training(
    recipe: Path, overrides: list[str] | None, listening: Listening, *, needs_vllm: bool
) -> ServerPlan:
    """Return the plan of the server that a recipe's training samples from."""
    loaded = _with_limits(load_recipe(recipe, overrides), listening)
    if not loaded.generation.asks_server:
        raise UsageError(
            f"{recipe} does not train with a vLLM server",
            "give both commands --set generation.backend=vllm --set generation.vllm.mode=server",
        )
    address, hardware = loaded.generation.vllm.address, read_hardware()
    return plan_training_server(
        loaded,
        _find_command(needed=needs_vllm),
        model_folder_or_id(loaded.model) if needs_vllm else loaded.model.path,
        host=listening.host,
        port=listening.port or (urlsplit(address).port if address else None) or PORT,
        device="cpu" if is_on_cpu(loaded.launch, hardware) else "cuda",
        visible_devices=hardware.select(()) if loaded.launch.use_cpu else None,
    )


def _with_limits(recipe: Recipe, listening: Listening) -> Recipe:
    """Return the recipe with the memory and length limits of the command line."""
    flags = {
        "max_model_length": listening.max_model_len,
        "gpu_memory_utilization": listening.gpu_memory_utilization,
    }
    limits = {name: value for name, value in flags.items() if value is not None}
    vllm = recipe.generation.vllm.model_copy(update=limits)
    return recipe.model_copy(
        update={"generation": recipe.generation.model_copy(update={"vllm": vllm})}
    )


def _find_command(*, needed: bool) -> tuple[str, ...]:
    command = find_vllm()
    if command is None and needed:
        raise SetupError("vllm is not installed", install_extra("vllm"))
    return command or VLLM_SERVE
