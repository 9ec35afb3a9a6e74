from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from grpo_cli.recipe.dataset import DatasetConfig
from grpo_cli.recipe.recipe import Recipe

_ADAPTER: TypeAdapter[Any] = TypeAdapter(DatasetConfig)


@pytest.fixture
def section() -> Callable[..., Any]:
    """Makes a `dataset` section from its keys."""
    return lambda **keys: _ADAPTER.validate_python(keys)


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    """Makes a whole recipe around a `dataset` section."""

    def make(seed: int = 1, **keys: Any) -> Recipe:
        rewards = [{"kind": "exact"}]
        return Recipe.model_validate(
            {"name": "t", "seed": seed, "model": {"path": "m"}, "dataset": keys, "rewards": rewards}
        )

    return make


@pytest.fixture
def gsm8k() -> Path:
    folder = Path(__file__).parents[3] / "../shared/data/gsm8k"
    if not (folder / "train.jsonl").is_file():
        pytest.skip("GSM8K is not on this machine")
    return folder.resolve()
