"""Which models read images besides text, by their config.json. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from grpo_cli.models.folder import read_settings
from grpo_cli.models.source import find_folder, resolve_source
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.upstream.transformers import read_image_text_types


def reads_images(model: ModelConfig) -> bool | None:
    """Return whether a model reads images; None if its config.json is not on this machine.

    Raises `RecipeError` if `model.path` names nothing.
    """
    source = resolve_source(model)
    if source.kind == "gguf":
        return False
    folder = find_folder(source)
    settings = read_settings(folder / "config.json") if folder else None
    return None if settings is None else is_vision_language(settings)


def read_model_type(model: ModelConfig) -> str | None:
    """Return `model_type` of a model's config.json; None if that is not on this machine."""
    folder = find_folder(resolve_source(model))
    settings = read_settings(folder / "config.json") if folder else None
    return str(settings.get("model_type")) if settings else None


def is_vision_language(settings: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a model that `AutoModelForImageTextToText` loads, with a vision part."""
    has_vision = settings.get("vision_config") is not None
    return has_vision and settings.get("model_type") in read_image_text_types()
