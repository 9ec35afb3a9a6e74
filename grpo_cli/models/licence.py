"""The licence of a model, as far as it is said on this machine."""

from pathlib import Path

from huggingface_hub import ModelCard, try_to_load_from_cache
from yaml import YAMLError

from grpo_cli.models.source import read_gguf_text, resolve_source
from grpo_cli.recipe.model import ModelConfig


def read_licence(model: ModelConfig) -> str | None:
    """What a model's own card, or the metadata of its GGUF file, says; None where nothing does.

    Raises:
        RecipeError: `model.path` names nothing.
    """
    source = resolve_source(model)
    if source.kind == "gguf":
        return read_gguf_text(Path(source.location), "general.license")
    if source.kind == "hub":
        found = try_to_load_from_cache(source.location, "README.md", revision=source.revision)
        card = Path(found) if isinstance(found, str) else None
    else:
        card = Path(source.location) / "README.md"
    if card is None or not card.is_file():
        return None
    try:
        named = ModelCard.load(card).data.license
    except (ValueError, YAMLError):
        return None
    return named if isinstance(named, str) else None
