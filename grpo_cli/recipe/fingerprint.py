"""Which settings decide what a training gives, as short hashes that can be compared later.

Owns what counts. Looks at no files: where data lies plays no part, and what is in it is the data's
own fingerprint (`manifest.json`).
"""

import hashlib
import json
from pathlib import PurePath
from typing import Any

from grpo_cli.recipe.comparison import Difference, flatten, list_differences
from grpo_cli.recipe.recipe import Recipe

_WHOLE = ("model", "dataset", "rewards", "generation", "training", "evaluation")
"""Sections that count whole, but for what follows."""
_FREE = (
    "training.save_",
    "training.logging_",
    "training.resume_",
    "training.output_dir",
    "training.stop_when",
    "training.fast",
    "evaluation.batch_size",
    "generation.vllm.mode",
    "generation.vllm.managed",
    "generation.vllm.base_url",
    "generation.vllm.server_",
    "generation.vllm.group_port",
    "generation.vllm.max_restarts",
    "generation.vllm.gpu_memory_utilization",
)
"""How settings begin that change what is kept, where it is done or how fast, not what is learnt."""
_ALONE = ("launch.num_processes", "logging.logging_steps")
"""What counts of other sections: which rows meet in a batch, and what one record is a mean of."""
_PATHS = {"path", "train", "eval", "chat_template"}
"""Keys whose values may be places on a disk."""
_DIGITS = 8


def fingerprint_settings(recipe: Recipe) -> dict[str, str]:
    """A short hash of each section that training and its measurement depend on.

    In it: `model`, `dataset`, `rewards`, `generation` (less where a vLLM server is), `training` (less what
    only saves, logs or stops), `evaluation` (less its batch size), `launch.num_processes` and
    `logging.logging_steps`. Not in it: `name`, `description`, `seed`, `expect`, the rest of `launch` and
    `logging`, and the folders of local paths. A value that is the default counts as not written, so that a
    later version with more settings agrees.

    Args:
        recipe: As resolved: `launch.num_processes: auto` is another text than the number it becomes.

    Returns:
        Section → the first hexadecimal digits of SHA-256, for sections that are not all default.
    """
    told: dict[str, dict[str, Any]] = {}
    for path, value in flatten(recipe.model_dump(mode="json", exclude_defaults=True)):
        if _counts(path):
            told.setdefault(_section(path), {})[path] = _without_folder(path, value)
    return {section: _hash(values) for section, values in told.items()}


def list_training_differences(old: Recipe, new: Recipe) -> list[Difference]:
    """The settings in which two recipes would train or measure otherwise, seed and names apart."""
    return [
        each
        for each in list_differences(old, new)
        if _counts(each.path)
        and _without_folder(each.path, each.old) != _without_folder(each.path, each.new)
    ]


def _counts(path: str) -> bool:
    return path in _ALONE or (_section(path) in _WHOLE and not path.startswith(_FREE))


def _section(path: str) -> str:
    return path.partition(".")[0].partition("[")[0]


def _without_folder(path: str, value: Any) -> Any:
    if path.rpartition(".")[2] not in _PATHS:
        return value
    if isinstance(value, list):
        return [_without_folder(path, item) for item in value]
    return PurePath(value).name if isinstance(value, str) and value.startswith("/") else value


def _hash(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    # A path of the file system may hold bytes that are no text.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
