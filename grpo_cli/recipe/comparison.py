"""In what two recipes differ, what a recipe chooses, and short hashes of the settings that training depends on."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel

from grpo_cli.recipe.recipe import Recipe

_WHOLE = ("model", "dataset", "rewards", "generation", "training", "warmup", "evaluation")
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
    "teacher.base_url",
    "generation.vllm.server_",
    "generation.vllm.group_port",
    "generation.vllm.enable_lora",
    "generation.vllm.max_restarts",
    "generation.vllm.gpu_memory_utilization",
)
"""How settings begin that change what is kept, where it is done or how fast, not what is learnt."""
_ALONE = ("launch.num_processes", "logging.logging_steps")
"""What counts of other sections: which rows meet in a batch, and what one record is a mean of."""
_PATHS = {"path", "train", "eval", "chat_template"}
"""Keys whose values may be places on a disk."""


@dataclass(frozen=True)
class Difference:
    """One setting that two recipes give different values."""

    path: str
    """Dotted, such as `training.learning_rate`."""
    old: Any
    """None if it was not there."""
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.old} → {self.new}"


@dataclass(frozen=True)
class Choice:
    """One setting that a recipe has to make, or that differs from the schema's default."""

    path: str
    """Dotted, such as `training.learning_rate`."""
    value: Any
    """As plain values."""
    default: Any
    """None if there is none."""
    has_default: bool
    """False for what must be given, and for fields of TRL passed through by name."""


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of everything in plain values; lists of texts or numbers stay whole."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flatten(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}[{index}]")
    else:
        yield path, value


def list_differences(old: Recipe, new: Recipe) -> list[Difference]:
    """Return the settings in which two recipes differ, in the order of the schema."""
    before, after = (dict(flatten(each.model_dump(mode="json"))) for each in (old, new))
    return [
        Difference(path, before.get(path), after.get(path))
        for path in {**after, **before}
        if before.get(path) != after.get(path)
    ]


def list_training_differences(old: Recipe, new: Recipe) -> list[Difference]:
    """Return the settings in which two recipes would train or measure differently, seed and names apart."""
    return [
        each
        for each in list_differences(old, new)
        if _counts(each.path)
        and _without_folder(each.path, each.old) != _without_folder(each.path, each.new)
    ]


def list_choices(recipe: Recipe) -> list[Choice]:
    """Return the settings of a recipe that are not defaults, in the order of the schema."""
    return list(_walk(recipe, recipe.model_dump(mode="json"), ""))


def _walk(section: BaseModel, plain: dict[str, Any], path: str) -> Iterator[Choice]:
    for name, field in type(section).model_fields.items():
        at, shown = path + name, plain.get(field.serialization_alias or name)
        value, has_default = getattr(section, name), not field.is_required()
        default = field.get_default(call_default_factory=True) if has_default else None
        if isinstance(value, BaseModel) and isinstance(shown, dict):
            inner = list(_walk(value, shown, f"{at}."))
            # An optional section that is there is a choice, although all in it is as by default.
            is_optional = not inner and has_default and default is None
            yield from [Choice(at, shown, None, has_default)] if is_optional else inner
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for index, part in enumerate(value):
                yield from _walk(part, (shown or [])[index], f"{at}[{index}].")
        elif not has_default or value != default:
            yield Choice(at, shown, default, has_default)
    for name in section.model_extra or {}:
        yield Choice(path + name, plain.get(name), None, has_default=False)


def fingerprint_settings(recipe: Recipe) -> dict[str, str]:
    """Return a short hash of each section that training and its measurement depend on.

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
    sections: dict[str, dict[str, Any]] = {}
    for path, value in flatten(recipe.model_dump(mode="json", exclude_defaults=True)):
        if _counts(path):
            sections.setdefault(_section(path), {})[path] = _without_folder(path, value)
    return {section: _hash(values) for section, values in sections.items()}


def hash_code(recipe: Recipe) -> dict[str, str]:
    """Return the files of rewards, tools and environments, each with a short hash."""
    parts = [*recipe.rewards, *recipe.tools, *recipe.environment]
    # `/folder/file.py:function`
    files = {str(each.model_dump().get("path")).rpartition(":")[0] for each in parts}
    paths = [Path(file) for file in sorted(files) if file.endswith(".py")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}


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
    # A path of the file system may hold bytes that are not text.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
