"""What a plan cannot know by itself: where vLLM and its model are, and which ports are free."""

from dataclasses import dataclass

from grpo_cli.launch.server_plan import GROUP_PORT, VLLM_SERVE
from grpo_cli.launch.server_process import find_vllm
from grpo_cli.machine import pick_free_port
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.recipe.recipe import Recipe


@dataclass(frozen=True)
class ServerLocation:
    """Where things are on this machine."""

    vllm: tuple[str, ...] = VLLM_SERVE
    """What starts a server of vLLM's, up to its model."""
    model: str | None = None
    """What vLLM reads in the place of `model.path`."""
    server_port: int = 8000
    group_port: int = GROUP_PORT


def find_server_location(recipe: Recipe) -> ServerLocation:
    """Where things are, for a recipe whose vLLM server is managed; the defaults for others.

    Raises:
        GrpoError: The model is a GGUF file that cannot be converted.
    """
    if not recipe.generation.has_managed_server:
        return ServerLocation()
    return ServerLocation(
        find_vllm() or VLLM_SERVE,
        model_folder_or_id(recipe.model),
        pick_free_port(),
        pick_free_port(),
    )
