"""Which settings decide what a training gives, as short hashes that can be compared later.

Owns what counts. Looks at no files: where data lies plays no part, and what is in it is the data's
own fingerprint (`manifest.json`).
"""

import hashlib
import json
from pathlib import PurePath
from typing import Any

from grpo_cli.recipe.comparison import Difference, list_differences
from grpo_cli.recipe.recipe import Recipe

_WHOLE = ("model", "dataset", "rewards", "generation", "training", "evaluation")
"""Sections that count whole."""
_PARTS = {"launch": ("num_processes",), "logging": ("logging_steps",)}
"""What counts of others: which rows meet in a batch, and what one record is a mean of."""
_FREE = {"training": ("save_", "logging_", "resume_", "output_dir"), "evaluation": ("batch_size",)}
"""How settings begin that change what is kept or how fast it goes, not what is learnt."""
_PATHS = {"path", "train", "eval", "chat_template"}
"""Keys whose values may be places on a disk."""
_DIGITS = 8


def fingerprint_settings(recipe: Recipe) -> dict[str, str]:
    """A short hash of each section that training and its measurement depend on.

    In it: `model`, `dataset`, `rewards`, `generation`, `training` (less what only saves or logs),
    `evaluation` (less its batch size), `launch.num_processes` and `logging.logging_steps`. Not in it:
    `name`, `description`, `seed`, `expect`, the rest of `launch` and `logging`, and the folders of local
    paths. A value that is the default counts as not written, so that a later version with more settings
    agrees.

    Args:
        recipe: As resolved: `launch.num_processes: auto` is another text than the number it becomes.

    Returns:
        Section → the first hexadecimal digits of SHA-256, for sections that are not all default.
    """
    told = {name: value for name, value in _settings(recipe).items() if value}
    return {name: _hash(value) for name, value in told.items()}


def list_training_differences(old: Recipe, new: Recipe) -> list[Difference]:
    """The settings in which two recipes would train or measure otherwise, seed and names apart."""
    return [each for each in list_differences(old, new) if _counts(each)]


def _settings(recipe: Recipe) -> dict[str, Any]:
    plain = recipe.model_dump(mode="json", exclude_defaults=True)
    parts = {
        section: {name: plain[section][name] for name in names if name in plain[section]}
        for section, names in _PARTS.items()
        if section in plain
    }
    whole = {name: _without_folders(plain[name]) for name in _WHOLE if name in plain}
    for section, free in _FREE.items():
        written = whole.get(section, {}).items()
        whole[section] = {name: value for name, value in written if not name.startswith(free)}
    return {**whole, **parts}


def _counts(difference: Difference) -> bool:
    section, _, name = difference.path.replace("[", ".").partition(".")
    if _drop_folder(difference.old) == _drop_folder(difference.new) and _is_place(name):
        return False
    if section in _PARTS:
        return name in _PARTS[section]
    return section in _WHOLE and not name.startswith(_FREE.get(section, ()))


def _is_place(name: str) -> bool:
    return name.rpartition(".")[2] in _PATHS


def _without_folders(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _without_folders(item, name) for name, item in value.items()}
    if isinstance(value, list) and key not in _PATHS:
        return [_without_folders(item) for item in value]
    return _drop_folder(value) if key in _PATHS else value


def _drop_folder(value: Any) -> Any:
    if isinstance(value, list):
        return [_drop_folder(item) for item in value]
    return PurePath(value).name if isinstance(value, str) and value.startswith("/") else value


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:_DIGITS]
