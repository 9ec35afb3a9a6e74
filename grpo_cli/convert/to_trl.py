"""A recipe as the flat config that `trl grpo --config` takes, and what that cannot express.

Source: `trl/scripts/grpo.py`, `trl/scripts/utils.py` and `trl/trainer/model_config.py` of trl 1.16.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_cli.convert.datasets import NAMED
from grpo_cli.convert.key_report import by_key, dump_lines, find, join_parts, list_lines, read_keys
from grpo_cli.convert.trl import LORA_NAMES, LORA_ONLY, MODEL, TRAINING
from grpo_cli.recipe.base import OpenSection
from grpo_cli.recipe.dataset import FilesDataset, HubDataset
from grpo_cli.recipe.generation import VllmConfig
from grpo_cli.recipe.launch import LaunchConfig
from grpo_cli.recipe.model import LoraConfig, ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig

_CONFIGS = {"single": "single_gpu", "ddp": "multi_gpu"}
"""Strategies that TRL's own accelerate configs have under another name."""
_NAMES = {
    target: name
    for name, target in {**MODEL, **NAMED, **TRAINING}.items()
    if isinstance(target, str)
}
"""Keys of a recipe that TRL has under another name."""
_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_OVERLONG = (1280, 256)
"""Lengths of TRL's `get_soft_overlong_punishment`."""
Lost = list[tuple[str, str]]


@dataclass
class FlatConfig:
    """TRL's config in groups, and what it leaves out."""

    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Heading → key → value."""
    lost: Lost = field(default_factory=list)
    """Dotted key of the recipe, and what becomes of it with TRL."""

    @property
    def flat(self) -> dict[str, Any]:
        """Every key with its value."""
        return {key: value for group in self.groups.values() for key, value in group.items()}

    def write(self, source: str) -> str:
        """Return the config as YAML.

        Args:
            source: The recipe's file name.
        """
        head = (
            f"# From the recipe {source}, by `grpo convert --to trl`. Run it with: "
            "trl grpo --config FILE"
        )
        parts = [[head]]
        for heading, values in self.groups.items():
            lines = [line for key, value in values.items() for line in dump_lines(key, value)]
            parts += [[f"# {heading}", *lines]] if lines else []
        title = "What TRL's command line cannot express:"
        return join_parts([*parts, list_lines(title, self.lost)])


def flatten_recipe(recipe: Recipe, folder: Path) -> FlatConfig:
    """Return the config of TRL's command line.

    Args:
        recipe: With paths made absolute, as `load_recipe` gives it.
        folder: Where `trl grpo` will be started, from which it imports reward modules.
    """
    config = FlatConfig()
    changed = recipe.model_dump(mode="json", exclude_defaults=True)
    logging = {"logging_steps": recipe.logging.logging_steps, **_explicit(recipe.logging)}
    if "report_to" in logging:
        logging["report_to"] = list(recipe.logging.report_to) or "none"
    config.groups = {
        "model": _model(recipe.model, changed),
        "data": _dataset(recipe, changed, config.lost),
        "rewards": _rewards(recipe, folder, config.lost),
        "sampling": _sampling(recipe),
        "training": _training(recipe),
        "logging": logging,
        "launch (read by accelerate)": _launch(recipe.launch, changed, config.lost),
    }
    config.lost += _list_recipe_only(recipe, changed)
    return config


def _list_recipe_only(recipe: Recipe, changed: dict[str, Any]) -> Iterator[tuple[str, str]]:
    reasons = by_key(read_keys("trl-cannot"))
    none = "TRL's command line has no such key"
    reasons |= {f"model.lora.{name}": none for name in LORA_ONLY} | {"evaluation.during": none}
    yield from ((key, why) for key, why in reasons.items() if find(changed, key) is not None)
    if recipe.evaluation.limit != 0:
        yield "evaluation", "TRL does not measure before and after; `grpo eval` does"
    if recipe.generation.has_managed_server:
        command = f"trl vllm-serve --model {recipe.model.path}"
        yield "generation.vllm.managed", f"TRL starts no server: start one with `{command}`"
    if recipe.model.path.endswith(".gguf") or recipe.model.path.startswith("package://"):
        yield "model.path", "TRL reads hub ids and folders, not GGUF files"


def _explicit(section: OpenSection) -> dict[str, Any]:
    """Return what the recipe sets itself; if it is silent, TRL's defaults are the recipe's."""
    dumped = section.model_dump(mode="json")
    own = {
        name: dumped[name]
        for name in type(section).model_fields
        if name in section.model_fields_set - section.OURS and dumped[name] is not None
    }
    return {**own, **section.extras}


def _sampling(recipe: Recipe) -> dict[str, Any]:
    backend, vllm = recipe.generation.backend, recipe.generation.vllm
    fields: dict[str, Any] = {}
    if backend == "transformers_continuous_batching":
        fields["use_transformers_continuous_batching"] = True
    uses_vllm = backend == "vllm" or recipe.generation.asks_server
    if uses_vllm:
        fields["use_vllm"] = True
    fields |= _explicit(recipe.generation)
    fields |= {f"vllm_{name}": value for name, value in vllm.extras.items()}
    return fields | (_vllm(vllm) if uses_vllm else {})


def _vllm(vllm: VllmConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"vllm_mode": vllm.mode}
    has_host = {"server_host", "server_port"} & vllm.extras.keys()
    if vllm.base_url is not None or (vllm.managed is False and not has_host):
        fields["vllm_server_base_url"] = vllm.address
    return fields


def _training(recipe: Recipe) -> dict[str, Any]:
    """Return the training's fields, and what `grpo train` sets unless the recipe does."""
    fields = {"output_dir": recipe.name, "seed": recipe.seed}
    if recipe.launch.use_cpu:
        fields |= {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
    if recipe.training.extras.get("load_best_model_at_end"):
        fields |= {"metric_for_best_model": "eval_reward"}
        if "metric_for_best_model" not in recipe.training.extras:
            fields |= {"greater_is_better": True}
    return {**fields, **_explicit(recipe.training)}


def _copied(changed: dict[str, Any], section: str) -> dict[str, Any]:
    """Return the keys of a section that TRL has under another name."""
    names = {target: name for target, name in _NAMES.items() if target.startswith(f"{section}.")}
    values = {name: find(changed, target) for target, name in names.items()}
    return {name: value for name, value in values.items() if value is not None}


def _model(model: ModelConfig, changed: dict[str, Any]) -> dict[str, Any]:
    # Without LoRA `auto` is float32 in a recipe, and the checkpoint's precision for TRL.
    dtype = "float32" if model.dtype == "auto" and model.lora is None else model.dtype
    fields = {"model_name_or_path": model.path, "dtype": dtype, **_copied(changed, "model")}
    if model.init_kwargs:
        fields["model_init_kwargs"] = model.init_kwargs
    if model.quantization == "8bit":
        fields["load_in_8bit"] = True
    if model.quantization == "4bit":
        fields |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    return {**fields, **(_lora(model.lora) if model.lora is not None else {})}


def _lora(lora: LoraConfig) -> dict[str, Any]:
    dumped = lora.model_dump(mode="json", exclude_none=True)
    values = {name: dumped[own] for own, name in LORA_NAMES.items() if own in dumped}
    if isinstance(lora.target_modules, tuple) and len(lora.target_modules) == 1:
        # TRL makes a text of a list of one, which peft then reads as a pattern of the whole name.
        values["lora_target_modules"] = rf"(.*\.)?{re.escape(lora.target_modules[0])}"
    return {"use_peft": True, **values}


def _launch(launch: LaunchConfig, changed: dict[str, Any], lost: Lost) -> dict[str, Any]:
    fields = _copied(changed, "launch")
    config = launch.accelerate_config or _CONFIGS.get(launch.strategy, launch.strategy)
    if config != "auto":
        fields["accelerate_config"] = config
        if launch.num_processes == "auto":
            reason = "TRL's configs say 8; set `num_processes` to your GPUs"
            lost.append(("launch.num_processes", reason))
    return fields


def _dataset(recipe: Recipe, changed: dict[str, Any], lost: Lost) -> dict[str, Any]:
    dataset = recipe.dataset
    if isinstance(dataset, FilesDataset):
        return _files(dataset)
    if not isinstance(dataset, HubDataset):
        reason = "TRL reads datasets of the hub and files; write the rows to a file first"
        lost.append((f"dataset.kind: {dataset.kind}", reason))
        return {}
    if dataset.eval_fraction is None or dataset.eval_split is not None:
        streaming = {"dataset_streaming": True} if dataset.streams else {}
        return _copied(changed, "dataset") | streaming
    named = {"name": dataset.name} if dataset.name is not None else {}
    source = {"path": dataset.path, "split": dataset.split, **named}
    return {"datasets": [source], "test_split_size": dataset.eval_fraction}


def _files(dataset: FilesDataset) -> dict[str, Any]:
    builder = _BUILDERS.get(Path(dataset.train[0]).suffix, "json")
    fields: dict[str, Any] = {"datasets": [{"path": builder, "data_files": list(dataset.train)}]}
    if dataset.eval_fraction is not None:
        fields["test_split_size"] = dataset.eval_fraction
    if dataset.streams:
        fields["streaming"] = True
    return fields


def _rewards(recipe: Recipe, folder: Path, lost: Lost) -> dict[str, Any]:
    """Return the keys that name the rewards TRL knows or can import, and their weights."""
    models: list[tuple[str, float]] = []
    functions: list[tuple[str, float]] = []
    for index, reward in enumerate(recipe.rewards):
        where = f"rewards.{index} ({reward.kind})"
        name = _name_reward(reward, recipe, folder, where, lost)
        if name is None:
            continue
        changed = reward.model_dump(exclude_defaults=True)
        lost += [
            (f"{where}: {key}", "TRL's rewards have no such option")
            for key in ("when", "timeout_s", "clip", "on_error")
            if key in changed
        ]
        if reward.kind != "model":
            functions.append((name, reward.weight))
        elif models:
            lost.append((where, "TRL's command line takes one reward model"))
        else:
            models.append((name, reward.weight))
    fields: dict[str, Any] = {}
    if models:
        fields["reward_model_name_or_path"] = models[0][0]
    if functions:
        fields["reward_funcs"] = [name for name, _ in functions]
    weights = [weight for _, weight in (*models, *functions)]
    if any(weight != 1 for weight in weights):
        fields["reward_weights"] = weights
    return fields


def _name_reward(
    reward: RewardConfig, recipe: Recipe, folder: Path, where: str, lost: Lost
) -> str | None:
    """Return TRL's name of a reward; None, and a reason in `lost`, if it has none."""
    params = reward.params
    if reward.kind == "python":
        return _name_function(params, folder, where, lost)
    if reward.kind == "model" and params.keys() <= {"path"}:
        return str(params["path"])
    if reward.kind == "think_format" and not params.get("prefilled"):
        return "think_format_reward"
    if reward.kind == "math" and params.get("answer", "answer") == "solution":
        if params.get("extract") not in (["boxed"], "boxed"):
            lost.append((f"{where}: extract", "TRL counts boxed answers alone"))
        return "accuracy_reward"
    if (
        reward.kind == "soft_overlong"
        and (params.get("max_length"), params.get("cache")) == _OVERLONG
    ):
        return "get_soft_overlong_punishment"
    fix = "write a function and name it as `module.function` in `reward_funcs`"
    if reward.kind == "math":
        fix = f"accuracy_reward reads the gold from the column `solution`; rename it, or {fix}"
    lost.append((where, f"TRL's command line has no such reward; {fix}"))
    return None


def _name_function(params: dict[str, Any], folder: Path, where: str, lost: Lost) -> str:
    source, _, function = str(params["path"]).rpartition(":")
    if params.get("kwargs"):
        lost.append((f"{where}: kwargs", "TRL passes columns alone; bind them in the function"))
    if not source.endswith(".py"):
        return f"{source}.{function}"
    file = Path(source)
    try:
        parts = file.relative_to(folder.resolve()).with_suffix("").parts
    except ValueError:
        parts = (file.stem,)
        lost.append((where, f"start `trl grpo` in {file.parent}, where it finds {file.name}"))
    return ".".join((*parts, function))
