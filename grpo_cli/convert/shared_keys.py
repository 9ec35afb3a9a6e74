"""Keys that the tools share: the model, rewards, where vLLM runs, processes and sharding.

Source: `ModelConfig`, `get_peft_config`, `trl/scripts/grpo.py`, "vLLM integration" and
`trl/accelerate_configs/` of trl 1.16; `vllm_device` is of trl 0.14; `accelerate launch` 1.15.
"""

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from grpo_cli.convert.key_report import (
    EMPTY,
    KeyReport,
    Rule,
    Table,
    by_value,
    dropped,
    find,
    read_keys,
    read_table,
    settled,
    switch,
    writes,
)
from grpo_cli.errors import nearest
from grpo_cli.recipe.explanation import Path, dotted
from grpo_cli.recipe.grpo_fields import fields_in

LORA_NAMES = {target.rpartition(".")[2]: name for name, target in read_keys("lora")["keep"].items()}
"""Arguments of peft's `LoraConfig` → their names in TRL's `ModelConfig`."""
LORA_ONLY = tuple(name for name in fields_in("model.lora") if name not in LORA_NAMES)
"""Arguments that recipes take and TRL's `ModelConfig` lacks."""
LORA_ARGUMENTS = {
    **LORA_NAMES,
    **{name: name for name in LORA_ONLY},
    "task_type": "lora_task_type",
}
"""Arguments of `LoraConfig` → the keys by which they are read here."""
INIT_KWARGS: dict[str, str] = read_keys("init_kwargs")
"""Keyword arguments of `from_pretrained` that have a place of their own."""
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_NO_LORA = "all weights are trained: neither `use_peft` nor axolotl's `adapter: lora` is set"


def _plain_dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name)


def _with_lora(rule: Rule) -> Rule:
    """Return a rule that drops its key unless the recipe has an adapter."""

    def take(report: KeyReport, key: Path) -> None:
        has_lora = find(report.recipe, "model.lora") is not None
        report.apply(rule if has_lora else dropped(_NO_LORA), key)

    return take


def _take_init_kwargs(report: KeyReport, key: Path) -> None:
    value = report.get(*key)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if not isinstance(value, dict):
        report.drop(key, "is neither a mapping nor JSON")
        return
    report.settle(key, "model", "its keys")
    for name in INIT_KWARGS.keys() & {each for each in value if value[each] is not None}:
        plain = _plain_dtype(value[name]) if "dtype" in name else value[name]
        report.keep(key, INIT_KWARGS[name], plain, f"its {name}")
    others = {name: each for name, each in value.items() if name not in INIT_KWARGS}
    if others:
        report.keep(key, "model.init_kwargs", others)


_LORA: Table = {
    **read_table("lora"),
    **{name: f"model.lora.{name}" for name in LORA_ONLY},
    "lora_task_type": settled("model.lora", "recipes train causal language models"),
}
_DTYPE = by_value(lambda value: writes("model.dtype", _plain_dtype(value)))
MODEL: Table = {
    **read_table("model"),
    "torch_dtype": _DTYPE,
    "dtype": _DTYPE,
    "model_init_kwargs": _take_init_kwargs,
    "lora_model_dir": by_value(lambda path: writes("model.adapter", path)),
    **{name: _with_lora(rule) for name, rule in _LORA.items()},
}
"""TRL's `ModelConfig`."""


def take_model(report: KeyReport) -> None:
    """Take every key of `ModelConfig`, and write the defaults of TRL's command line that differ."""
    report.take(MODEL)
    if find(report.recipe, "model.dtype") == "auto" and find(report.recipe, "model.lora") is None:
        note = "was auto, the checkpoint's own; bfloat16 would round most updates away"
        report.add("model.dtype", "float32", note)
    report.add_missing("model.dtype", "float32", f"{report.tool}'s default")
    if find(report.recipe, "model.lora") is None or find(report.recipe, "model.adapter"):
        return
    note = f"the default of {report.tool}'s command line"
    report.add_missing("model.lora.lora_dropout", 0.05, note)
    note = "peft's default for Llama, Mistral, Qwen and Gemma; all-linear learns more"
    report.add_missing("model.lora.target_modules", ["q_proj", "v_proj"], note)


_MODE = "generation.vllm.mode"
_BACKEND = "generation.backend"
_ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
SERVER_KEYS = (*_ADDRESS, "vllm_server_timeout", "vllm_group_port")
SHARED_GPU = "only a server has it, and vLLM shares the training's GPUs"
_BATCHING = switch(_BACKEND, "transformers_continuous_batching")
VLLM: Table = {
    "use_transformers_continuous_batching": _BATCHING,
    "use_transformers_paged": _BATCHING,
    "use_vllm": switch(_BACKEND, "vllm"),
    "vllm_device": writes(_MODE, "server", "vLLM had a GPU of its own"),
    "vllm_mode": _MODE,
}
"""Where TRL samples; further fields of vLLM's are those of `GRPOConfig`."""


def take_sampling(report: KeyReport, *, server_first: bool = False, managed: bool = False) -> None:
    """Take the switches between `generate()` and vLLM.

    With `server_first`, vLLM is a server if no mode is given; with `managed`, the address is of a
    server that `grpo train` starts itself.
    """
    uses_vllm = report.is_on("use_vllm")
    if not uses_vllm:
        unread = ("vllm_mode", "vllm_device", *SERVER_KEYS)
        report.drop_all((), unread, "`use_vllm` is not set, so nothing reads it")
    report.take(VLLM)
    if not uses_vllm:
        report.add_missing(_BACKEND, "transformers", "`use_vllm` is not set")
        return
    seen = [name for name in SERVER_KEYS if report.get(name) is not None and not managed]
    if seen or server_first:
        note = f"as {seen[0]} says" if seen else f"{report.tool}'s default"
        report.add_missing(_MODE, "server", note)
    if find(report.recipe, _MODE) != "server":
        report.drop_all((), seen, SHARED_GPU)
    elif not set(seen) & set(_ADDRESS):
        report.comment(_MODE, "`grpo train` starts it, on the last visible GPUs; see `managed`")
    elif "vllm_server_base_url" in seen:
        report.take({"vllm_server_base_url": "generation.vllm.base_url"})
        report.drop_all((), _ADDRESS[1:], "`vllm_server_base_url` is given too, and wins")


_STRATEGIES = {
    **{name: name for name in ("zero1", "zero2", "zero3", "fsdp2", "ddp")},
    "fsdp1": "fsdp2",
    "multi_gpu": "ddp",
    "single_gpu": "single",
}
"""Accelerate configs that TRL and open-r1 ship, by name, and the strategies that do the same."""
_STAGE = re.compile(r"zero[-_]?([123])(?![0-9])|\bstage\W+([123])\b")
_OFFLOAD = re.compile(r"offload(?!_\w+\W+device\W+none\b)")
_PARTIAL_FSDP = re.compile(r"shard_grad_op|hybrid|'(fsdp_)?offload_params': true|\boffload\b")
_FSDP = ("fsdp", "fsdp_config", "fsdp_version")
_NO_STAGE = (
    "it is no plain ZeRO stage; set `launch.strategy: zero1|zero2|zero3`, or write it into an accelerate "
    "config and name that in `launch.accelerate_config`"
)


def _choose_accelerate_config(value: Any) -> Rule:
    text = str(value)
    strategy = _STRATEGIES.get(text if FilePath(text).is_file() else FilePath(text).stem)
    if strategy is None:
        return writes("launch.accelerate_config", text)
    return writes("launch.strategy", strategy, f"by the name of `{text}`")


def _choose_stage(value: Any) -> Rule:
    """Take the stage of a DeepSpeed config: a mapping, a JSON file, or a file known by its name."""
    if not value:
        return dropped(EMPTY)
    text = str(value)
    try:
        text = FilePath(text).read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = text.rpartition("/")[2] if text.endswith(".json") else text
    stage = _STAGE.search(text.lower())
    if stage is None or _OFFLOAD.search(text.lower()):
        return dropped(_NO_STAGE)
    return writes("launch.strategy", f"zero{stage[1] or stage[2]}", "its stage alone")


def _take_fsdp(report: KeyReport, key: Path) -> None:
    settings = {name: report.get(name) for name in _FSDP if report.get(name)}
    if key[0] not in settings:
        report.drop(key, EMPTY)
    elif _PARTIAL_FSDP.search(str(settings).lower()):
        report.drop(key, "`launch.strategy: fsdp2` shares everything and offloads nothing")
    else:
        is_first = key[0] == next(iter(settings))
        report.keep(key, "launch.strategy", "fsdp2", "its sharding alone" if is_first else "")


LAUNCH: Table = {
    **read_table("launch"),
    "accelerate_config": by_value(_choose_accelerate_config),
    "config_file": by_value(_choose_accelerate_config),
    "deepspeed": by_value(_choose_stage),
    **dict.fromkeys(_FSDP, _take_fsdp),
}
"""On how many devices to train, and how they share the model."""


@dataclass(frozen=True)
class Reward:
    """A reward of a recipe, or the reason why there is none."""

    entry: dict[str, Any] | None
    note: str = ""


Rewards = Mapping[str, Reward]
"""A tool's reward names, and what each is in a recipe."""


def read_rewards(name: str) -> Rewards:
    """Return a tool's rewards, a part of `keys.yaml`."""
    return {
        key: Reward(each.get("entry"), each.get("note", ""))
        for key, each in read_keys(name).items()
    }


TRL_REWARDS = read_rewards("trl-rewards")
_MODEL_KEY = "reward_model_name_or_path"


def take_rewards(
    report: KeyReport,
    table: Rewards,
    folders: tuple[FilePath, ...],
    default: tuple[str, ...] = (),
) -> None:
    """Take a list of reward functions and their weights; `table` has the tool's own names.

    A reward model, if a key of its own names one, comes first.
    """
    rewards: list[tuple[Path | None, Reward]] = []
    if report.tool == "TRL" and report.get(_MODEL_KEY) is not None:
        entry = {"kind": "model", "path": str(report.get(_MODEL_KEY))}
        rewards.append(((_MODEL_KEY,), Reward(entry)))
    listed = report.get("reward_funcs")
    names = list_names(listed)
    for index, name in enumerate(names or ()):
        key: Path = ("reward_funcs",) if isinstance(listed, str) else ("reward_funcs", index)
        rewards.append((key, _translate(name, table, report.tool, folders)))
    if names is not None:
        report.credit(("reward_funcs",), "rewards")
    else:
        report.drop_all((), ["reward_funcs"], "should be a list of names")
        rewards += [(None, table[name]) for name in default]
    weights = _take_weights(report, len(rewards))
    for index, (origin, reward) in enumerate(rewards):
        _write(report, origin, reward, {"weight": weights[index]} if weights else {})
    if "rewards" not in report.recipe:
        text = "write at least one reward; `grpo rewards list` names the kinds"
        report.to_do.setdefault("rewards", text)
    unused = None if weights else report.get("reward_weights")
    if unused is not None and "rewards" in report.to_do:
        report.to_do["rewards"] += f". Their weights (`weight`) were {unused}"


def list_names(value: Any) -> list[str] | None:
    """Return the names of a list, or one name alone; None for anything else."""
    if isinstance(value, str):
        return [value]
    return [str(name) for name in value] if isinstance(value, list) else None


def _write(report: KeyReport, key: Path | None, reward: Reward, weight: dict[str, Any]) -> None:
    written = report.recipe.get("rewards", [])
    target = f"rewards.{len(written)}"
    if key is None:
        source = f"{report.tool}'s default"
    elif reward.entry is None:
        report.drop(key, f"`{report.get(*key)}`: {reward.note}")
        return
    else:
        report.settle(key, target, reward.note)
        source = f"{dotted(report.origin(key[:1]))}: {report.get(*key)}"
    report.recipe["rewards"] = [*written, {**(reward.entry or {}), **weight}]
    report.comment(target, source, reward.note)


def _take_weights(report: KeyReport, count: int) -> list[Any] | None:
    weights = report.get("reward_weights")
    if isinstance(weights, list) and len(weights) == count:
        report.credit(("reward_weights",), "rewards")
        return weights
    if weights is None:
        reason = EMPTY
    elif not count or "rewards" in report.to_do:
        reason = f"set `weight` on each entry of `rewards` that you write (they were {weights})"
    else:
        size = len(weights) if isinstance(weights, list) else 1
        reason = f"{size} weights for {count} rewards, which {report.tool} refuses too: {weights}"
    report.drop_all((), ["reward_weights"], reason)
    return None


def _translate(name: str, table: Rewards, tool: str, folders: tuple[FilePath, ...]) -> Reward:
    module, _, function = name.rpartition(".")
    if name in table:
        return table[name]
    if "/" in name:
        return Reward({"kind": "model", "path": name}, "a reward model")
    if module:
        return Reward({"kind": "python", "path": place_function(module, function, folders)})
    close = nearest(name, table)
    hint = f"; did you mean `{close}`?" if close else ""
    return Reward(None, f"unknown to {tool}{hint}")


def name_file(file: FilePath, folder: FilePath) -> str:
    """Return how a recipe in a folder names a file."""
    text = os.path.relpath(file, folder)
    return text if text.startswith(".") else f"./{text}"


def place_function(module: str, function: str, folders: tuple[FilePath, ...]) -> str:
    """Return how a recipe in the first of some folders names a function: by its file if one has it."""
    relative = FilePath(*module.split("."))
    for folder in folders:
        for file in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if file.is_file():
                return f"{name_file(file, folders[0])}:{function}"
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        return f"{module}:{function}"
    return f"./{relative.with_suffix('.py')}:{function}"
