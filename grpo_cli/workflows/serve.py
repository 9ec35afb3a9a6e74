"""From what `grpo serve` names to a server's plan."""

from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from grpo_cli.errors import SetupError, UsageError, install_extra
from grpo_cli.launch.serve_plan import Served, ServePlan, find_served, plan_server
from grpo_cli.launch.server_plan import VLLM_SERVE, ServerPlan, plan_training_server
from grpo_cli.launch.server_process import find_vllm
from grpo_cli.machine import is_on_cpu, read_hardware
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.recipe.recipe import Recipe

_PORT = 8000


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and how much it may take."""

    host: str
    port: int | None
    """None is the recipe's, and 8000 where there is none."""
    max_model_len: int | None
    """Longest prompt and answer, in tokens; None leaves it to the model."""
    gpu_memory_utilization: float | None
    """Share of the memory; None leaves it to vLLM."""


def prepare(
    source: Path, checkpoint: str | None, listening: Listening, *, needs_vllm: bool
) -> ServePlan:
    """The plan of a server for a trained model.

    Raises:
        UsageError: There is no model to serve.
        SetupError: vLLM is not installed, and it is needed.
    """
    command = _find_command(needed=needs_vllm)
    served = find_served(source, checkpoint)
    return plan_server(
        _materialized(served) if needs_vllm else served,
        command,
        host=listening.host,
        port=listening.port or _PORT,
        max_model_len=listening.max_model_len,
        gpu_memory_utilization=listening.gpu_memory_utilization,
    )


def prepare_for_training(
    recipe: Path, overrides: list[str] | None, listening: Listening, *, needs_vllm: bool
) -> ServerPlan:
    """The plan of the server that a recipe's training samples from.

    Raises:
        RecipeError: The recipe cannot be read.
        UsageError: Its training samples in another way.
        SetupError: vLLM is not installed, and it is needed.
    """
    loaded = _with_limits(load_recipe(recipe, overrides), listening)
    if not loaded.generation.asks_server:
        raise UsageError(
            f"the training of {recipe} asks no server. Fix: give both commands --set generation.backend=vllm "
            "--set generation.vllm.mode=server"
        )
    command = _find_command(needed=needs_vllm)
    cpu = is_on_cpu(loaded.launch, read_hardware())
    return plan_training_server(
        loaded,
        command,
        model_folder_or_id(loaded.model) if needs_vllm else loaded.model.path,
        host=listening.host,
        port=listening.port or _port_of(loaded),
        device="cpu" if cpu else "cuda",
        visible_devices="" if loaded.launch.use_cpu else None,
    )


def _port_of(recipe: Recipe) -> int:
    """Where the training will look for the server."""
    address = recipe.generation.vllm.address
    return (urlsplit(address).port if address else None) or _PORT


def _with_limits(recipe: Recipe, listening: Listening) -> Recipe:
    """The recipe with what the command line says of memory and length."""
    flags = {
        "max_model_length": listening.max_model_len,
        "gpu_memory_utilization": listening.gpu_memory_utilization,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    vllm = recipe.generation.vllm.model_copy(update=given)
    return recipe.model_copy(
        update={"generation": recipe.generation.model_copy(update={"vllm": vllm})}
    )


def _find_command(*, needed: bool) -> tuple[str, ...]:
    command = find_vllm()
    if command is None and needed:
        raise SetupError(f"vllm is not installed. Fix: {install_extra('vllm')}")
    return command or VLLM_SERVE


def _materialized(served: Served) -> Served:
    """The same with a folder in the place of a GGUF file, which vLLM would not serve as trained."""
    return replace(served, model=model_folder_or_id(served.settings))
