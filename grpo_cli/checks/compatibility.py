"""What does not work together: one table, which checks, backends, evaluation and the recipe reference read."""

from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from grpo_cli.checks.context import CheckContext
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import MixtureDataset
from grpo_cli.recipe.episode import EpisodeConfig
from grpo_cli.recipe.generation import VllmConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.training import AsyncConfig

VLLM, DURING, EPISODE_IMAGES = "generation.backend: vllm", "evaluation.during", "images of episodes"
_TABLE = Path(__file__).with_name("compatibility.txt")

_IS_SET: dict[str, Callable[[Recipe], bool]] = {
    "dataset.streaming": lambda recipe: recipe.dataset.streams is not None,
    "dataset.sources": lambda recipe: isinstance(recipe.dataset, MixtureDataset),
    "episode": lambda recipe: (
        recipe.has_episodes or recipe.episode != EpisodeConfig.model_construct()
    ),
    "generation.backend": lambda recipe: recipe.generation.backend != "transformers",
    "generation.vllm": lambda recipe: (
        recipe.generation.backend == "vllm"
        or recipe.generation.vllm != VllmConfig.model_construct()
    ),
    "generation.temperature": lambda recipe: recipe.generation.temperature != 1,
    "generation.sampling_parts: 2 or more": lambda recipe: recipe.generation.sampling_parts > 1,
    "launch.num_machines: 2 or more": lambda recipe: recipe.launch.num_machines > 1,
    "launch.strategy": lambda recipe: recipe.launch.strategy not in ("auto", "single", "ddp"),
    "model.lora.bias": lambda recipe: _of_lora(recipe, "bias") not in (None, "none"),
    "model.lora.target_parameters": lambda recipe: bool(_of_lora(recipe, "target_parameters")),
    "images": lambda recipe: recipe.has_images,
    EPISODE_IMAGES: lambda recipe: recipe.has_images and recipe.has_episodes,
    "no rewards": lambda recipe: not recipe.rewards,
    "no reward with a weight": lambda recipe: not recipe.learns_from_rewards,
    "training.asynchronous": lambda recipe: (
        recipe.training.mode == "async"
        or recipe.training.asynchronous != AsyncConfig.model_construct()
    ),
    "training.eval_strategy of scored data": lambda recipe: (
        not recipe.is_sampled and recipe.training.eval_strategy != "no"
    ),
    "training.sync_ref_model of an adapter": lambda recipe: bool(
        recipe.setting("sync_ref_model") and recipe.kl_weight and recipe.model.lora
    ),
}
"""Names of the table, and of checks, that are not a field with any value, or with one of those named."""


def _of_lora(recipe: Recipe, key: str) -> object:
    return recipe.model.lora.extras.get(key) if recipe.model.lora else None


class Conflict(NamedTuple):
    """Two settings that do not work together."""

    setting: str
    """Where the issue stands."""
    other: str
    why: str
    """What is reported; `-` for "does not work with" the other. `{strategy}` is the recipe's."""
    fix: str


@cache
def read_conflicts() -> tuple[Conflict, ...]:
    """Return every pair that is refused; what depends on the machine or the data is a check of its section."""
    lines = _TABLE.read_text(encoding="utf-8").splitlines()
    return tuple(Conflict(*line.split(" | ")) for line in lines if not line.startswith("#"))


def check_compatibility(context: CheckContext) -> Iterator[Issue]:
    """Find settings that do not work together."""
    yield from find_conflicts(context.recipe)


def find_conflicts(recipe: Recipe, setting: str = "") -> Iterator[Issue]:
    """Yield what does not work together in a recipe; only conflicts of `setting` if one is named."""
    for conflict in read_conflicts():
        named = (conflict.setting, conflict.other)
        if (not setting or setting in named) and all(is_set(recipe, name) for name in named):
            seen = f"does not work with `{_show(recipe, conflict.other)}`"
            if conflict.why != "-":
                seen = conflict.why.format(
                    strategy=recipe.launch.strategy,
                    backend=recipe.generation.backend,
                    scheduler=recipe.setting("lr_scheduler_type"),
                )
            yield Issue(seen, conflict.fix, _path(conflict.setting))


def is_set(recipe: Recipe, name: str) -> bool:
    """Return whether a recipe has a setting of the table, such as `training.mode: async`; yes if none is named."""
    if not name:
        return True
    if (condition := _IS_SET.get(name)) is not None:
        return condition(recipe)
    path, _, values = name.partition(": ")
    actual = _read(recipe, path)
    return actual in values.split(", ") if values else actual not in (None, False, 0, ())


def _read(recipe: Recipe, path: str) -> object:
    """Return the value of a setting; None if a section before it is left out."""
    section, _, key = path.rpartition(".")
    if section == "training":
        return recipe.setting(key)
    value: object = recipe
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _path(name: str) -> str:
    return name.partition(":")[0].partition(" ")[0]


def _show(recipe: Recipe, name: str) -> str:
    path, mark, _ = name.partition(": ")
    return f"{path}: {attrgetter(path)(recipe)}" if mark else name
