"""The local files a measurement depends on, told apart by their stamps.

An evaluation that goes on after a break must find the same weights, reward code and templates. Owns
which files those are; contents of models are not read, which would take minutes.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from grpo_cli.models.source import resolve_source
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe


def stamp_inputs(
    recipe: Recipe, models: Iterable[ModelConfig], adapters: Iterable[str]
) -> dict[str, str]:
    """A stamp for each local file or folder: path → hash of names, sizes and times of change.

    Args:
        recipe: Names reward code, and the chat template.
        models: What is measured.
        adapters: Folders of adapters.

    Raises:
        RecipeError: A model's path names nothing.
    """
    sources = [resolve_source(model) for model in models]
    places = {Path(source.location) for source in sources if source.kind != "hub"}
    places |= {Path(adapter) for adapter in adapters}
    rewards = [reward.model_dump() for reward in recipe.rewards]
    texts = [*_texts(rewards), recipe.model.chat_template or ""]
    places |= {place for text in texts if (place := _file_of(text)) is not None}
    return {str(place): _stamp(place) for place in sorted(places)}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _file_of(text: str) -> Path | None:
    """The file a parameter names: itself, or the part before `:function`."""
    for name in (text, text.rpartition(":")[0]):
        try:
            if name and Path(name).expanduser().is_file():
                return Path(name).expanduser().absolute()
        except OSError:
            # Longer than any file's name.
            continue
    return None


def _stamp(place: Path) -> str:
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    told = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
        if file.is_file()
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
