"""Checks of the adapter that training goes on from, without torch."""

import hashlib
from pathlib import Path

from grpo_cli.models.source import (
    hash_samples,
)
from grpo_cli.recipe.model import ADAPTER_WEIGHTS, ModelConfig

_PATH = "model.adapter"


def fingerprint_adapter(model: ModelConfig) -> str | None:
    """Return a hash of samples of the adapter that training begins with; None if there is none."""
    if model.adapter is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    hash_samples(digest, Path(model.adapter.path) / ADAPTER_WEIGHTS)
    return digest.hexdigest()
