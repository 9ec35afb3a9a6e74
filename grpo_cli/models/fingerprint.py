"""Whether a model's weights are still those that they were, told without reading all of them.

Owns the fingerprint: the commit of a model on the hub, and for files their sizes and samples of their bytes.
"""

import hashlib
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from grpo_cli.models.source import resolve_source
from grpo_cli.recipe.model import ModelConfig

_WEIGHTS = (".safetensors", ".bin", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint_model(model: ModelConfig) -> str | None:
    """The fingerprint of a model's weights; None where a hub's commit is not known on this machine.

    Raises:
        RecipeError: `model.path` names nothing.
    """
    source = resolve_source(model)
    if source.kind == "hub":
        found = try_to_load_from_cache(source.location, "config.json", revision=source.revision)
        return Path(found).parent.name if isinstance(found, str) else None
    place = Path(source.location)
    files = [place] if place.is_file() else sorted(place.iterdir())
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        if file.suffix in _WEIGHTS:
            _add(digest, file)
    return digest.hexdigest()


def _add(digest: "hashlib.blake2b", file: Path) -> None:
    """Blocks spread evenly over a file, the first and the last among them."""
    size = file.stat().st_size
    digest.update(f"{file.name} {size}\n".encode())
    last = max(size - _SAMPLE_BYTES, 0)
    with file.open("rb") as content:
        for place in range(_SAMPLES):
            content.seek(last * place // (_SAMPLES - 1))
            digest.update(content.read(_SAMPLE_BYTES))
