"""A recipe as the flat config that `trl grpo --config` takes, and what that cannot express.

Source: `trl/scripts/grpo.py`, `trl/scripts/utils.py` and `trl/trainer/model_config.py` of trl 1.16.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_cli.convert.to_trl_data import take_dataset, take_rewards
from grpo_cli.recipe.base import OpenSection
from grpo_cli.recipe.generation import VllmConfig
from grpo_cli.recipe.launch import LaunchConfig
from grpo_cli.recipe.model import LoraConfig, ModelConfig
from grpo_cli.recipe.recipe import Recipe

_CONFIGS = {"single": "single_gpu", "ddp": "multi_gpu"}
"""Strategies that TRL's own accelerate configs have under another name."""


@dataclass
class FlatConfig:
    """TRL's config in groups, and what it leaves out."""

    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Heading → key → value."""
    lost: list[tuple[str, str]] = field(default_factory=list)
    """Dotted key of the recipe, and what becomes of it with TRL."""

    @property
    def flat(self) -> dict[str, Any]:
        """Every key with its value."""
        return {key: value for group in self.groups.values() for key, value in group.items()}

    @property
    def lacks(self) -> list[str]:
        """What TRL's script cannot do without, and this config does not have."""
        flat = self.flat
        lacking = []
        if not flat.get("datasets") and not flat.get("dataset_name"):
            lacking.append("a dataset (`dataset_name`, or `datasets`)")
        if not flat.get("reward_funcs") and not flat.get("reward_model_name_or_path"):
            lacking.append("a reward (`reward_funcs`)")
        return lacking


def flatten_recipe(recipe: Recipe, folder: Path) -> FlatConfig:
    """The config of TRL's command line.

    Args:
        recipe: With paths made absolute, as `load_recipe` gives it.
        folder: Where `trl grpo` will be started, from which it imports reward modules.
    """
    config = FlatConfig()
    config.groups["model"] = _model(recipe.model, config.lost)
    config.groups["data"] = take_dataset(recipe, config.lost)
    config.groups["rewards"] = take_rewards(recipe, folder, config.lost)
    config.groups["sampling"] = {
        **_switches(recipe),
        **_explicit(recipe.generation),
        **_vllm(recipe, config.lost),
    }
    config.groups["training"] = {
        "output_dir": recipe.name,
        "seed": recipe.seed,
        **_best_metric(recipe),
        **_explicit(recipe.training),
        **_on_cpu(recipe),
    }
    logging = {"logging_steps": recipe.logging.logging_steps, **_explicit(recipe.logging)}
    if "report_to" in logging:
        logging["report_to"] = list(recipe.logging.report_to) or "none"
    config.groups["logging"] = logging
    config.groups["launch (read by accelerate)"] = _launch(recipe.launch, config.lost)
    _list_unread(recipe, config.lost)
    return config


def _explicit(section: OpenSection) -> dict[str, Any]:
    """What the recipe sets itself; where it is silent, TRL's defaults are the recipe's."""
    dumped = section.model_dump(mode="json")
    own = {
        name: dumped[name]
        for name in type(section).model_fields
        if name in section.model_fields_set - section.OURS and dumped[name] is not None
    }
    return {name: _whole(name, value) for name, value in {**own, **section.extras}.items()}


def _whole(name: str, value: Any) -> Any:
    """Counts of steps as whole numbers: fields that take a share too were read as `5.0`."""
    counts = name.endswith("_steps") and isinstance(value, float) and value.is_integer()
    return int(value) if counts else value


def _switches(recipe: Recipe) -> dict[str, Any]:
    backend = recipe.generation.backend
    if backend == "transformers_continuous_batching":
        return {"use_transformers_continuous_batching": True}
    return {"use_vllm": True} if backend == "vllm" else {}


def _vllm(recipe: Recipe, lost: list[tuple[str, str]]) -> dict[str, Any]:
    vllm: VllmConfig = recipe.generation.vllm
    fields = {f"vllm_{name}": value for name, value in vllm.extras.items()}
    if recipe.generation.backend != "vllm":
        return fields
    fields["vllm_mode"] = vllm.mode
    has_host = {"server_host", "server_port"} & vllm.extras.keys()
    if vllm.base_url is not None or (vllm.managed is False and not has_host):
        fields["vllm_server_base_url"] = vllm.address
    if vllm.is_managed:
        lost.append(
            (
                "generation.vllm.managed",
                f"TRL starts no server: start one with `trl vllm-serve --model {recipe.model.path}`",
            )
        )
    if vllm.server_args:
        lost.append(("generation.vllm.server_args", "give these flags to the server yourself"))
    return fields


def _best_metric(recipe: Recipe) -> dict[str, Any]:
    """How `grpo train` tells the best checkpoint where the recipe is silent; transformers takes the loss."""
    training = recipe.training
    wanted = training.extras.get("load_best_model_at_end") and training.eval_strategy != "no"
    named = training.extras.get("metric_for_best_model") is not None
    if not wanted or (named and training.early_stopping is None):
        return {}
    metric = training.early_stopping.metric if training.early_stopping else "eval_reward"
    return {"metric_for_best_model": metric, "greater_is_better": not metric.endswith("loss")}


def _on_cpu(recipe: Recipe) -> dict[str, Any]:
    """What `grpo train` sets on a CPU, where the recipe does not say otherwise."""
    if not recipe.launch.use_cpu:
        return {}
    given = recipe.training.extras
    unset = {"bf16": False, "dataloader_pin_memory": False}
    return {"use_cpu": True, **{key: value for key, value in unset.items() if key not in given}}


def _model(model: ModelConfig, lost: list[tuple[str, str]]) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_name_or_path": model.path, "dtype": model.dtype}
    if model.path.endswith(".gguf") or model.path.startswith("package://"):
        lost.append(("model.path", "TRL reads hub ids and folders, not GGUF files"))
    if model.revision is not None:
        fields["model_revision"] = model.revision
    if model.attn_implementation is not None:
        fields["attn_implementation"] = model.attn_implementation
    if model.trust_remote_code:
        fields["trust_remote_code"] = True
    if model.init_kwargs:
        fields["model_init_kwargs"] = model.init_kwargs
    if model.chat_template is not None:
        lost.append(("model.chat_template", "the tokenizer's own is used; save it with the model"))
    if model.quantization == "8bit":
        fields["load_in_8bit"] = True
    if model.quantization == "4bit":
        fields |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    return {**fields, **(_lora(model.lora) if model.lora is not None else {})}


def _lora(lora: LoraConfig) -> dict[str, Any]:
    targets = lora.target_modules
    if not isinstance(targets, str):
        # TRL makes a text of a list of one, which peft then reads as a pattern of the whole name.
        targets = rf"(.*\.)?{re.escape(targets[0])}" if len(targets) == 1 else list(targets)  # type: ignore[assignment]
    alpha = lora.lora_alpha
    fields: dict[str, Any] = {
        "use_peft": True,
        "lora_r": lora.r,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora.lora_dropout,
        "lora_target_modules": targets,
    }
    if lora.modules_to_save:
        fields["lora_modules_to_save"] = list(lora.modules_to_save)
    for name in ("use_rslora", "use_dora"):
        if getattr(lora, name):
            fields[name] = True
    return fields


def _launch(launch: LaunchConfig, lost: list[tuple[str, str]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if launch.accelerate_config is not None:
        fields["accelerate_config"] = launch.accelerate_config
    elif launch.strategy != "auto":
        fields["accelerate_config"] = _CONFIGS.get(launch.strategy, launch.strategy)
    if launch.num_processes != "auto":
        fields["num_processes"] = launch.num_processes
    elif "accelerate_config" in fields:
        lost.append(
            ("launch.num_processes", "TRL's configs say 8; set `num_processes` to your GPUs")
        )
    for name in ("num_machines", "machine_rank", "main_process_ip", "main_process_port"):
        if name in launch.model_fields_set and getattr(launch, name) is not None:
            fields[name] = getattr(launch, name)
    if launch.slurm is not None:
        lost.append(("launch.slurm", "write a job script of your own"))
    return fields


def _list_unread(recipe: Recipe, lost: list[tuple[str, str]]) -> None:
    if recipe.generation.dynamic_sampling is not None:
        lost.append(("generation.dynamic_sampling", "TRL learns from groups without signal too"))
    if recipe.generation.sampling_parts > 1:
        lost.append(("generation.sampling_parts", "TRL scores when all is sampled"))
    if recipe.training.mode == "async":
        lost.append(("training.mode", "`trl grpo` samples and learns in turn"))
    if recipe.training.fast.max_tokens_per_micro_batch:
        lost.append(
            (
                "training.fast.max_tokens_per_micro_batch",
                "a micro-batch has a number of completions",
            )
        )
    if recipe.training.early_stopping is not None:
        lost.append(("training.early_stopping", "TRL's command line takes no callbacks"))
    if recipe.training.stop_when:
        lost.append(("training.stop_when", "TRL does not look at what goes wrong"))
    if "stall_timeout_s" in recipe.launch.model_fields_set:
        lost.append(("launch.stall_timeout_s", "a run that hangs is not ended"))
    if recipe.evaluation.limit != 0:
        lost.append(("evaluation", "TRL does not measure before and after; `grpo eval` does"))
    if recipe.expect is not None:
        lost.append(("expect", "TRL does not compare runs; `grpo expect` does"))
    if recipe.description is not None:
        lost.append(("description", "TRL has no place for it"))
