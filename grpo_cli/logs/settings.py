"""What is known of how a run of another tool was set up: from flags, a config, the log's text, or its numbers."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from grpo_cli.errors import UsageError
from grpo_cli.logs.names import read_table
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.metrics import Metrics, Series, read_rewards

LIMIT, GROUP, RATE = (
    "generation.max_completion_length",
    "generation.num_generations",
    "training.learning_rate",
)
LORA = "model.lora"
_CONFIGS = (
    "args.json",
    "training_args.json",
    "config.yaml",
    ".hydra/config.yaml",
    "grpo_config.json",
)
"""Files that tools write beside a log."""
_CLOSE = 1e-6
_FEWEST = 20
"""Records in which a reward is never above 0, from which on it is a penalty."""
_LOWEST = 1e6
_COMPARED = 1000
"""Records in which means are compared with spreads."""
_PINNED = 3
"""Records whose greatest length is the same, from which on it is the limit."""
_LORA_NAMES = ("lora_r", "lora_rank", "peft_config", "lora_alpha")
_ODD = re.compile(r"[^A-Za-z0-9_.-]+")
_VALUE = r"['\"]?\s*[:=]\s*['\"]?([-+.\w]+)"


def find_settings(
    tool: str, texts: Iterable[str], config: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that a config or the text of a log name, by the recipe's keys."""
    own = read_table()["tools"][tool]["settings"]
    named: dict[str, Any] = {}
    pattern = {
        key: re.compile(rf"(?<![\w.]){re.escape(name)}{_VALUE}") for key, name in own.items()
    }
    for text in texts:
        for key, each in pattern.items():
            if own[key] in text and (match := each.search(text)):
                named[key] = match[1]
        if "lora" in text.lower() and re.search(
            r"(?i)trainable.{0,30}%|lora_r(ank)?['\"]?\s*[:=]\s*[1-9]|LoRA: r=", text
        ):
            named[LORA] = True
    flat = dict(_flatten(config))
    last = {name.rpartition(".")[2]: value for name, value in flat.items()}
    for key, name in own.items():
        value = flat.get(name, last.get(name.rpartition(".")[2]))
        if value is not None:
            named[key] = value
    if config and any(last.get(name) for name in _LORA_NAMES):
        named[LORA] = True
    if "max_steps" in facts:
        named["training.max_steps"] = facts["max_steps"]
    return {
        key: value for key, each in named.items() if (value := _as_setting(key, each)) is not None
    }


def _as_setting(key: str, value: Any) -> Any:
    """Return a value as the recipe has it; None if it is none."""
    if key == LORA:
        return True
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    whole = (
        key not in (RATE, "training.beta", "training.max_grad_norm")
        and "temp" not in key
        and "top_p" not in key
    )
    return int(number) if whole and number == int(number) else number


def read_config(log: Path, named: Path | None) -> dict[str, Any]:
    """Return the config that is named, or the one beside a log; empty if there is none that can be read."""
    folders = (log, log.parent) if log.is_dir() else (log.parent, log.parent.parent)
    beside = (folder / name for folder in folders for name in _CONFIGS)
    for path in [named] if named else beside:
        if not path.is_file():
            if named:
                raise UsageError(f"{path} is not a file", "name a config with --config")
            continue
        try:
            text = path.read_text(encoding="utf-8")
            loaded = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            loaded = None
        if isinstance(loaded, dict):
            return loaded
        if named:
            raise UsageError(f"{path} holds no mapping", "name a config in YAML or JSON")
    return {}


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flatten(each, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def find_limit(metrics: Metrics) -> int | None:
    """Return the limit of the length, if completions reach it; None if that does not show."""
    series, clipped = metrics.series, metrics.series.get("completions/clipped_ratio")
    longest = series.get("completions/max_length") or series.get("completions/mean_length")
    values = longest.numbers() if longest else []
    if not values or not longest:
        return None
    most = max(values)
    if most != int(most) or values.count(most) < min(_PINNED, len(values)):
        return None
    if clipped is not None:
        cut = {step for step, share in clipped if share}
        pinned = any(step in cut for step, value in longest if value == most)
        return int(most) if pinned else None
    # A limit is a round number; answers that are all as long by themselves are short.
    is_round = most % 50 == 0 or most % 64 == 0
    return int(most) if is_round and len(values) >= _PINNED else None


def estimate_clipped(metrics: Metrics, limit: int) -> bool:
    """Add the share of completions that are cut off, if it is not logged and lengths are near the limit."""
    lengths = metrics.series.get("completions/mean_length")
    if "completions/clipped_ratio" in metrics.series or not lengths:
        return False
    # Those that end by themselves are at most this part of the limit in the mean.
    whole = 0.85
    shares = [max((value / limit - whole) / (1 - whole), 0.0) for value in lengths.values]
    metrics.series["completions/clipped_ratio"] = Series()
    metrics.series["completions/clipped_ratio"].extend(lengths.steps, shares)
    return True


def is_right_or_wrong(metrics: Metrics, reward: str) -> bool:
    """Return whether a reward is 0 or 1: its variance is then that of a share, m·(1 − m)."""
    both = (metrics.series.get(f"rewards/{reward}/{what}", ()) for what in ("mean", "std"))
    means, stds = (points[:_COMPARED] for points in both)
    spreads = dict(stds)
    ratios = []
    for step, mean in means:
        if mean is not None and not -_CLOSE < mean < 1 + _CLOSE:
            return False
        if mean is not None and (spread := spreads.get(step)) and 0.02 < mean < 0.98:
            ratios.append(spread * spread / (mean * (1 - mean)))
    # An average over several steps is a little lower, a sample's variance a little higher.
    close = [ratio for ratio in ratios if 0.75 < ratio < 1.25]
    return len(ratios) >= _PINNED and len(close) > 0.8 * len(ratios)


def find_bounds(metrics: Metrics, reward: str) -> dict[str, tuple[float, float]]:
    """Return the bounds of a reward as a recipe has them, if its records show them."""
    means = metrics.values(f"rewards/{reward}/mean")
    if is_right_or_wrong(metrics, reward):
        return {"clip": (0.0, 1.0)}
    # A penalty is never above 0, and seldom exactly 0 in all completions of every record.
    is_penalty = len(means) >= _FEWEST and max(means) <= 0 and min(means) < 0
    return {"clip": (-_LOWEST, 0.0)} if is_penalty else {}


def make_recipe(settings: Mapping[str, Any], metrics: Metrics) -> Recipe:
    """Return the recipe of a run of another tool, with what is known of it; the rest has defaults."""
    rewards = [*read_rewards(dict.fromkeys(metrics.series, 0.0))] or ["reward"]
    values: dict[str, Any] = {
        "name": "log",
        "model": {"path": "unknown"},
        "dataset": {"kind": "inline", "rows": [{"question": ""}]},
        "rewards": [
            {
                "kind": "python",
                "path": "unknown.py:score",
                "name": f"{at}.{_ODD.sub('_', name)}",
                **find_bounds(metrics, name),
            }
            for at, name in enumerate(rewards)
        ],
        "generation": {},
        "training": {},
    }
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if key == LORA:
            values["model"]["lora"] = {} if value else None
        elif section in ("generation", "training"):
            values[section][name] = value
    if "sampling/sampling_logp_difference/mean" in metrics.series:
        values["generation"]["backend"] = "vllm"
    if any(metrics.values("kl")):
        values["training"].setdefault("beta", 0.04)
    return Recipe.model_validate(values)
