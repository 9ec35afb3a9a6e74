"""TRL's config (`trl grpo --config`, or a dump of `GRPOConfig`) and open-r1's as a recipe.

Source: `trl/scripts/grpo.py`, `ModelConfig`, `GRPOConfig` and `accelerate_configs/` of trl 0.14 to 1.16,
`TrainingArguments` of transformers 4.48 to 5.17; open-r1, `configs.py`, `rewards.py` and `grpo.py`.
"""

import json
import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.convert.datasets import MIXTURE_KEYS, NAMED, take_dataset, take_entries
from grpo_cli.convert.key_report import (
    EMPTY,
    KeyReport,
    Table,
    find,
    read_keys,
    read_table,
    settled,
)
from grpo_cli.convert.rewards import (
    TRL_REWARDS,
    Rewards,
    listed_rewards,
    read_rewards,
    take_parameters,
    take_rewards,
)
from grpo_cli.errors import recipe_error
from grpo_cli.input_files import read_input_text
from grpo_cli.recipe import grpo_fields
from grpo_cli.recipe.yaml_tree import KeyPath

LORA_NAMES = {target.rpartition(".")[2]: name for name, target in read_keys("lora")["keep"].items()}
"""Arguments of peft's `LoraConfig` → their names in TRL's `ModelConfig`."""
LORA_ONLY = tuple(name for name in grpo_fields.fields_in("model.lora") if name not in LORA_NAMES)
"""Arguments that recipes take and TRL's `ModelConfig` lacks."""
INIT_KWARGS: dict[str, str] = read_keys("init_kwargs")
"""Keyword arguments of `from_pretrained` that have a place of their own."""
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
NOT_JSON = "is neither a mapping nor JSON"
_NO_LORA = "all weights are trained: neither `use_peft` nor axolotl's `adapter: lora` is set"


def _plain_dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name)


def _take_dtype(report: KeyReport, key: KeyPath, value: Any) -> None:
    report.keep(key, "model.dtype", _plain_dtype(value))


def read_json(value: Any) -> dict[str, Any] | None:
    """Return a mapping, which may be written as JSON; None if it is neither."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _take_init_kwargs(report: KeyReport, key: KeyPath, value: Any) -> None:
    options = read_json(value)
    if options is None:
        report.drop(key, NOT_JSON)
        return
    report.settle(key, "model", "its keys")
    for name, target in INIT_KWARGS.items():
        if options.get(name) is not None:
            option = _plain_dtype(options[name]) if "dtype" in name else options[name]
            report.keep(key, target, option, f"its {name}")
    others = {name: option for name, option in options.items() if name not in INIT_KWARGS}
    if others:
        report.keep(key, "model.init_kwargs", others)


MODEL: Table = {
    **read_table("model"),
    "torch_dtype": _take_dtype,
    "dtype": _take_dtype,
    "model_init_kwargs": _take_init_kwargs,
}


def _take_target_modules(report: KeyReport, key: KeyPath, value: Any) -> None:
    """Take names; TRL takes a list of one as its text, which may be a pattern or `all-linear`."""
    only = str(value[0]) if isinstance(value, list) and len(value) == 1 else ""
    is_name = re.fullmatch(r"[\w.]*", only)
    report.keep(key, "model.lora.target_modules", value if is_name else only)


LORA: Table = {
    **read_table("lora"),
    "lora_target_modules": _take_target_modules,
    **{name: f"model.lora.{name}" for name in LORA_ONLY},
    "lora_task_type": settled("model.lora", "recipes train causal language models"),
}


def take_model(report: KeyReport, lora_defaults: str = "trl-lora-defaults") -> None:
    """Take every key of `ModelConfig`, and write the tool's defaults that differ from a recipe's."""
    report.take(MODEL)
    has_lora = find(report.recipe, "model.lora") is not None
    if has_lora or "model.lora" in report.to_do:
        report.take(LORA)
    report.drop_all(LORA.keys() & report.rest(), _NO_LORA)
    is_open = {"model.lora", "model.dtype"} & report.to_do.keys() or "model" in report.unread
    if find(report.recipe, "model.dtype") == "auto" and not has_lora and not is_open:
        note = "was auto, the checkpoint's own; bfloat16 would round most updates away"
        report.add("model.dtype", "float32", note)
    report.add_missing("model.dtype", "float32", f"{report.tool}'s default")
    if has_lora and not find(report.recipe, "model.adapter"):
        for name, (value, note) in read_keys(lora_defaults).items():
            report.add_missing(f"model.lora.{name}", value, note)


_MODE = "generation.vllm.mode"
_BACKEND = "generation.backend"
_ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
SERVER_KEYS = (*_ADDRESS, "vllm_server_timeout", "vllm_group_port")
SHARED_GPU = "only a server has it, and vLLM shares the training's GPUs"
VLLM: Table = {
    **read_table("vllm"),
    "vllm_device": lambda report, key, _: report.keep(key, _MODE, "server", "vLLM had its own GPU"),
}
"""Where TRL samples; further fields of vLLM's are those of `GRPOConfig`."""


def take_sampling(report: KeyReport, *, server_first: bool = False) -> None:
    """Take the switches between `generate()` and vLLM; with `server_first` the default is a server."""
    has_address = any(report.get(each) is not None for each in {*_ADDRESS} & {*report.rest()})
    is_open = _BACKEND in report.to_do or "generation" in report.unread
    if not report.is_on("use_vllm") and not is_open:
        reason = "only vLLM reads it, and `use_vllm` is not set"
        report.drop_all(("vllm_mode", "vllm_device", *SERVER_KEYS), reason)
    report.take(VLLM)
    if not report.is_on("use_vllm"):
        report.add_missing(_BACKEND, "transformers", "`use_vllm` is not set")
        return
    if has_address or server_first:
        report.add_missing(_MODE, "server", "a server is named" if has_address else "the default")
    if find(report.recipe, _MODE) != "server":
        report.drop_all(SERVER_KEYS, SHARED_GPU)
    elif not has_address:
        report.comment(_MODE, "`grpo train` starts it, on the last visible GPUs; see `managed`")


_STRATEGIES = read_keys("strategies")
_STAGE = re.compile(r"zero[-_]?([123])(?![0-9])|\bstage\W+([123])\b")


def _take_accelerate_config(report: KeyReport, key: KeyPath, value: Any) -> None:
    text = str(value)
    strategy = _STRATEGIES.get(text if Path(text).is_file() else Path(text).stem)
    if strategy is None:
        report.keep(key, "launch.accelerate_config", text)
    else:
        report.keep(key, "launch.strategy", strategy, f"by the name of `{text}`")


def _take_deepspeed(report: KeyReport, key: KeyPath, value: Any) -> None:
    """Take the stage of a DeepSpeed config: a mapping, a JSON file, or a file known by its name."""
    text = str(value)
    try:
        text = read_input_text(text)
    except (OSError, ValueError):
        text = text.rpartition("/")[2] if text.endswith(".json") else text
    stage = _STAGE.search(text.lower())
    if stage is None:
        reason = "names no ZeRO stage; set `launch.strategy: zero1|zero2|zero3`"
        report.drop(key, reason if value else EMPTY)
    else:
        note = "its stage alone: nothing is offloaded"
        report.keep(key, "launch.strategy", f"zero{stage[1] or stage[2]}", note)


def _take_fsdp(report: KeyReport, key: KeyPath, value: Any) -> None:
    if not value:
        report.drop(key, EMPTY)
    elif report.get("fsdp") in ([], "", False):
        # As in dumps of older versions, whose `fsdp_config` is never empty.
        report.drop(key, "`fsdp` is empty, so nothing reads it")
    elif find(report.recipe, "launch.strategy") == "fsdp2":
        report.settle(key, "launch.strategy")
    else:
        note = "shares everything and offloads nothing"
        report.keep(key, "launch.strategy", "fsdp2", note)


def _take_warmup_ratio(report: KeyReport, key: KeyPath, ratio: Any) -> None:
    """Take the share of warm-up steps, which transformers 5 reads from `warmup_steps` below 1."""
    if report.get("warmup_steps"):
        report.drop(key, "`warmup_steps` is set too and takes precedence")
    else:
        report.keep(key, "training.warmup_steps", ratio, "below 1 it is a share of all steps")
        report.drop_all(("warmup_steps",), "0, so `warmup_ratio` applies")


TRAINING: Table = {
    **read_table("training"),
    **read_table("launch"),
    "accelerate_config": _take_accelerate_config,
    "config_file": _take_accelerate_config,
    "deepspeed": _take_deepspeed,
    **dict.fromkeys(("fsdp", "fsdp_config", "fsdp_version"), _take_fsdp),
    "warmup_ratio": _take_warmup_ratio,
}
"""Keys of the training and its launcher that are not fields of `GRPOConfig` in a recipe."""
KNOWN_KEYS = {*MODEL, *LORA, *VLLM, *TRAINING, *NAMED, *MIXTURE_KEYS, *SERVER_KEYS}
_NULLABLE = ("vllm_importance_sampling_clip_max",)
"""Fields for which null is a value of its own, and not the default."""


def convert_trl(
    report: KeyReport, folders: tuple[Path, ...], rewards: Rewards | None = None
) -> None:
    """Take every key of a TRL config; modules with rewards may lie in `folders`, the recipe's first."""
    take_model(report)
    take_dataset(report)
    take_rewards(report, {**TRL_REWARDS, **(rewards or {})}, folders)
    take_sampling(report)
    report.take({name: rule for name, rule in read_table("open-r1").items() if name in _SHARED})
    take_training(report)


def take_method(report: KeyReport, key: str, methods: Sequence[str]) -> None:
    """Take the key that names how a config trains; refuse another method than GRPO."""
    method = report.get(key)
    if method is None and "training" in report.unread:
        return
    if method not in methods:
        cause = f"trains by `{key}: {method}`" if method else f"does not say `{key}: grpo`"
        place = (report.node(key) or report.source).location
        fix = f"convert a config with `{key}: grpo`"
        raise recipe_error(f"{cause}, and recipes train by GRPO", fix, key, place)
    report.settle((key,), "training", "what recipes do")


def take_training(report: KeyReport) -> None:
    """Take the keys of `GRPOConfig` and of accelerate's launcher, and drop what is left."""
    steps = report.get("max_steps")
    if isinstance(steps, int | float) and steps > 0:
        reason = f"`max_steps: {steps}` is set too and takes precedence"
        report.drop_all(("num_train_epochs",), reason)
    report.take(TRAINING)
    if report.get("steps_per_generation") is not None:
        note = "`steps_per_generation` is set too, and means the same for any number of GPUs"
        report.drop_all(("generation_batch_size",), note)
    for name in report.rest():
        _take_field(report, name)
    if find(report.recipe, "training.eval_strategy") == "steps":
        # transformers evaluates as often as it logs if `eval_steps` is not set; TRL logs every 10.
        steps = find(report.recipe, "logging.logging_steps") or 10
        note = f"{report.tool} evaluates as often as it logs"
        report.add_missing("training.eval_steps", steps, note)
    if find(report.recipe, "training.load_best_model_at_end") is True:
        # Ours is the reward.
        report.add_missing("training.metric_for_best_model", "loss", f"{report.tool}'s default")


def find_home(name: str) -> str | None:
    """Return a recipe's key for a field of `GRPOConfig`, under its name of today or an earlier one."""
    today = grpo_fields.RENAMED.get(name, name)
    is_field = today in grpo_fields.read_grpo_fields() and grpo_fields.home_of(today) is not None
    return grpo_fields.key_in_home(today) if is_field else None


def find_model_key(name: str) -> str | None:
    """Return a recipe's key for a key of `ModelConfig`, the dataset or the launcher, or None."""
    rule = {**MODEL, **LORA, **NAMED, **read_table("launch")}.get(name)
    return rule if isinstance(rule, str) else None


def is_dropped(name: str, known: Container[str] = ()) -> bool:
    """Return whether a recipe has no place for a key, whatever its value; `known` are those of another tool."""
    is_refused = grpo_fields.refusal_of(name) or name in grpo_fields.MOVED
    is_unknown = name not in {*KNOWN_KEYS, *R1_SIGNS, *_SHARED} and name not in known
    return find_home(name) is None and bool(is_refused or is_unknown)


def _take_field(report: KeyReport, name: str) -> None:
    """Decide what no table took: fields of `GRPOConfig`, what a recipe refuses, and unknown keys."""
    today, home, key = grpo_fields.RENAMED.get(name, name), find_home(name), (name,)
    reason = grpo_fields.refusal_of(name) or grpo_fields.MOVED.get(name, "")
    if home is not None and today != name and report.node(today) is not None:
        report.drop(key, f"`{today}`, its current name, is set too")
    elif home is not None and report.get(name) is None and today not in _NULLABLE:
        report.drop(key, EMPTY)
    elif home is not None:
        report.keep(key, home, report.get(name))
    elif reason:
        report.drop(key, reason.removeprefix("remove it: "))
    else:
        report.drop_unknown(key, {*KNOWN_KEYS, *grpo_fields.read_grpo_fields()})


_DEFAULT_REWARDS = ("accuracy", "format", "tag_count")
_CODE_FORMAT = r"\A<think>\n.*?\n</think>\n<answer>\n.*?```{}.*?```.*?\n</answer>$"
_R1_REWARDS = read_rewards("open-r1-rewards")


def take_system_prompt(report: KeyReport, key: KeyPath, value: Any) -> None:
    """Take a system prompt as it is written, though recipes read it as Jinja."""
    is_jinja = any(mark in str(value) for mark in ("{{", "{%", "{#"))
    text = f"{{% raw %}}{value}{{% endraw %}}" if is_jinja else str(value)
    report.keep(key, "dataset.prompt.system", text)


def _take_mixture(report: KeyReport, key: KeyPath, value: Any) -> None:
    take_entries(report, str(key[0]), "datasets")
    report.take({"test_split_size": "dataset.eval_fraction"}, *key)
    for name in report.rest(*key):
        report.drop_unknown((*key, name), ())


_R1_KEYS: Table = {
    "dataset_mixture": _take_mixture,
    "system_prompt": take_system_prompt,
    "dataset_prompt_column": lambda report, key, column: report.keep(
        key, "dataset.prompt.user", f"{{{{ {column} }}}}"
    ),
    **read_table("open-r1"),
}
_SHARED = ("callbacks", "chat_template", "wandb_entity", "wandb_project", "wandb_run_group")
"""Keys of open-r1 that scripts of others have too."""
R1_SIGNS = tuple(key for key in (*_R1_KEYS, *read_keys("open-r1-parameters")) if key not in _SHARED)
"""Keys that open-r1 alone has."""
R1_REWARD_SIGNS = tuple(_R1_REWARDS)
"""Reward functions of open-r1 that TRL does not have."""


def convert_open_r1(report: KeyReport, folders: tuple[Path, ...]) -> None:
    """Take every key of an open-r1 recipe: TRL's, and rewards, prompts and callbacks of its own."""
    take_model(report)
    if report.get("dataset_mixture") is None:
        take_dataset(report)
    report.drop_all(
        NAMED.keys() & report.rest(), "`dataset_mixture` is set too and takes precedence"
    )
    report.take(_R1_KEYS)
    note = f"{report.tool}'s default column; its first versions took `problem`"
    report.add_missing("dataset.prompt.user", "{{ prompt }}", note)
    named = listed_rewards(report) or _DEFAULT_REWARDS
    rewards = take_parameters(report, _R1_REWARDS, "open-r1-parameters", named, _adapt_parameter)
    take_rewards(report, rewards, folders, _DEFAULT_REWARDS)
    # Its recipes were written for a TRL whose vLLM was a server if no mode was set.
    take_sampling(report, server_first=True)
    take_training(report)


def _adapt_parameter(key: str, value: Any) -> Any:
    if key == "cosine_max_len" and isinstance(value, int):
        # A token of English has about four characters.
        return max(value // 4, 1)
    return _CODE_FORMAT.format(value) if key == "code_language" else value


_UNCUT = "dataset.max_prompt_length"


def note_versions(report: KeyReport) -> None:
    """Record the defaults that changed from version to version of TRL, and that the config may have relied on."""
    keys = {*report.tree.value}
    appeared, removed = read_keys("trl-appeared"), read_keys("trl-removed")
    oldest = max(
        (_parse(version) for version, names in appeared.items() if keys & {*names.split()}),
        default=(0,),
    )
    signs = {
        key: version for version, names in removed.items() for key in names.split() if key in keys
    }
    for name, (version, before, today) in read_keys("trl-changed-defaults").items():
        home = find_home(name) or _UNCUT
        is_set = name in keys or find(report.recipe, home) is not None or home in report.to_do
        is_read = not {home.partition(".")[0], "training"} & report.unread
        needs_vllm = name.startswith("vllm_") and not report.is_on("use_vllm")
        if is_read and not is_set and not needs_vllm and oldest < _parse(version):
            report.notes[home] = f"{today} ({before} before TRL {version})"
    length = report.get("max_prompt_length")
    if length is not None:
        report.notes[_UNCUT] = (
            f"{length} (TRL cut longer prompts from the left; a recipe drops them)"
        )
    if report.notes and signs:
        sign, version = min(signs.items(), key=lambda item: _parse(item[1]))
        report.notes[sign] = f"exists only before TRL {version}"


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in str(version).split("."))
