"""Whether a value is one that a field of the installed `GRPOConfig` takes."""

from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.base import OpenSection
from grpo_cli.recipe.generation import GenerationConfig, VllmConfig
from grpo_cli.recipe.logging import LoggingConfig
from grpo_cli.recipe.training import TrainingConfig

_OPEN: dict[str, type[OpenSection]] = {
    "generation": GenerationConfig,
    "generation.vllm": VllmConfig,
    "training": TrainingConfig,
    "logging": LoggingConfig,
}


def fits(name: str, value: Any) -> bool:
    """Whether a recipe's section takes a value for a field that has a home in it."""
    own = _OPEN[str(grpo_fields.home_of(name))].model_fields.get(name.removeprefix("vllm_"))
    kind: Any = (
        own.annotation
        if own is not None
        else grpo_fields.python_type(grpo_fields.read_grpo_fields()[name])
    )
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True
