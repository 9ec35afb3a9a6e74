"""What `GRPOConfig` and `LoraConfig` accept.

Owns which recipe section takes each field, and the checks of keys and values that TRL or peft, not this schema,
defines.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from grpo_cli.errors import nearest
from grpo_cli.issues import Issue
from grpo_cli.recipe import explanation
from grpo_cli.recipe.base import Integer, Number, UpstreamField, as_type, read_fields
from grpo_cli.recipe.evaluation import EvaluationConfig
from grpo_cli.recipe.generation import GenerationConfig, VllmConfig
from grpo_cli.recipe.launch import LaunchConfig, SlurmConfig
from grpo_cli.recipe.model import AdapterConfig, LoraConfig, ModelConfig
from grpo_cli.recipe.recipe import LoggingConfig, Recipe
from grpo_cli.recipe.training import TrainingConfig
from grpo_cli.recipe.yaml_tree import Node, as_node

_CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": (
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
    ),
}
"""Fields typed `str` upstream whose values are fixed all the same (trl 1.16.0, `GRPOConfig`)."""

_TYPES: dict[str, Any] = {
    "scale_rewards": bool | Literal["group", "batch", "none"],
    **dict.fromkeys(("generation_kwargs", "chat_template_kwargs"), dict[str, Any] | None),
    "rank_pattern": dict[str, Annotated[Integer, Field(ge=1)]],
    "alpha_pattern": dict[str, Annotated[Number, Field(gt=0)]],
}
"""Fields of which upstream's types say less, or more, than can be used."""

_HELP = {
    "gradient_checkpointing_kwargs": "Keyword arguments of `gradient_checkpointing_enable()`, such as "
    "`use_reentrant`; with transformers 5.24, `every_n_layers: 2` checkpoints every second layer only.",
    "vllm_tensor_parallel_size": "GPUs that share vLLM's model: a managed server's own; with `colocate`, groups "
    "of so many training processes.",
    "vllm_gpu_memory_utilization": "Share of a GPU's memory that vLLM takes for weights and cache. With "
    "`colocate`, training gets the rest (0.3 by default); a server has its GPUs to itself (vLLM's own default).",
    "vllm_max_model_length": "Maximum tokens of prompt and completion in vLLM. By default "
    "`dataset.max_prompt_length` plus `generation.max_completion_length`; without `max_prompt_length`, as many as "
    "vLLM's memory has room for, up to the model's own limit (vLLM's `auto`).",
}
"""Descriptions in place of upstream's, which are about other names, commands or defaults."""

_BOUNDS: dict[str, tuple[int, int | None]] = {
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "beta": (0, None),
    "dataloader_num_workers": (0, 256),
    "delta": (0, None),
    "epsilon": (0, None),
    "epsilon_high": (0, None),
    "ref_model_mixup_alpha": (0, 1),
    "top_entropy_quantile": (0, 1),
    "warmup_steps": (0, None),
    "weight_decay": (0, None),
}
"""Lowest and highest value of numbers that upstream takes as they come, or refuses only once all is loaded."""

_GENERATION = frozenset(
    """num_generations num_generations_eval max_completion_length temperature top_p top_k min_p
    repetition_penalty generation_kwargs chat_template_kwargs cache_implementation
    generation_batch_size steps_per_generation ds3_gather_for_generation
    transformers_continuous_batching_config""".split()
)
_LOGGING = frozenset(
    """report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica log_completions""".split()
)
_REFUSED: dict[str, str] = {
    "output_dir": "remove it: every run gets a folder of its own, `grpo train --runs DIR` says where",
    "seed": "set `seed` at the top of the recipe",
    "model_init_kwargs": "use the `model` section (`model.init_kwargs` for the rest)",
    "trust_remote_code": "set `model.trust_remote_code`",
    "reward_weights": "set `weight` on each entry of `rewards`",
    "use_vllm": "set `generation.backend: vllm`",
    "use_transformers_continuous_batching": (
        "set `generation.backend: transformers_continuous_batching`"
    ),
    "use_transformers_paged": "set `generation.backend: transformers_continuous_batching`",
    "vllm_importance_sampling_cap": "set `generation.vllm.importance_sampling_clip_max`",
    "use_cpu": "set `launch.use_cpu`",
    "deepspeed": "set `launch.strategy: zero2` (or zero1, zero3: the stage in that file)",
    "fsdp": "set `launch.strategy: fsdp2`",
    "fsdp_config": "set `launch.strategy: fsdp2`",
    "parallelism_config": "remove it: GRPOTrainer refuses sequence parallelism",
    "local_rank": "remove it: the launcher sets it",
    "accelerator_config": "remove it: the launcher owns the devices",
    "do_train": "remove it: `grpo train` trains",
    "do_eval": "remove it: `eval_strategy` says when to evaluate",
    "do_predict": "remove it: GRPO does not predict",
    "resume_from_checkpoint": "remove it, and resume with `grpo train --resume` or `--resume-from CHECKPOINT`",
    "remove_unused_columns": "remove it: rewards need the columns",
    "label_names": "remove it: GRPO has no labels",
    "label_smoothing_factor": "remove it: GRPO has no labels",
    **dict.fromkeys(
        ("train_sampling_strategy", "length_column_name"),
        "remove it: GRPOTrainer draws prompts by a sampler of its own (`dataset.difficulty` orders them)",
    ),
    **{
        f"activation_checkpointing{end}": f"write it as `gradient_checkpointing{end}`, TRL's name"
        for end in ("", "_kwargs")
    },
    "average_tokens_across_devices": "remove it: GRPO counts tokens over all processes by itself",
    "data_seed": "remove it: GRPOTrainer draws prompts by the `seed` at the top of the recipe",
    "include_num_input_tokens_seen": "remove it: `num_tokens` counts them",
    **dict.fromkeys(
        """batch_eval_metrics eval_accumulation_steps eval_do_concat_batches eval_use_gather_object
        include_for_metrics prediction_loss_only""".split(),
        "remove it: GRPO's evaluation keeps metrics of rewards, and no predictions",
    ),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        "remove it: evaluations are part of the training, and compute in its precision",
    ),
    "auto_find_batch_size": "lower `per_device_train_batch_size`: GRPO refuses this option",
    "enable_jit_checkpoint": "remove it: a stopped run saves a checkpoint anyway",
    "disable_tqdm": "remove it: the live view shows progress",
    "log_multimodal": "remove it: the report of a run shows prompts",
    "max_tool_calling_iterations": "write `episode.max_turns`, which is one more",
    "num_completions_to_print": "remove it: completions go to the run folder",
    "log_unique_prompts": "remove it: completions go to the run folder",
    "log_completions_hub_repo": "remove it: nothing is pushed while training",
    "push_to_hub": "remove it: nothing is pushed while training",
    "hub_token": "remove it: tokens do not belong in a recipe",
    **dict.fromkeys(
        "hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision".split(),
        "remove it: nothing is pushed while training",
    ),
}
MOVED: dict[str, str] = {
    "max_new_tokens": "set `generation.max_completion_length`",
    "max_prompt_length": "set `dataset.max_prompt_length` (today's TRL no longer has it)",
    "torch_dtype": "set `model.dtype`",
    "dtype": "set `model.dtype`",
    "model_name_or_path": "set `model.path`",
    "dataset_name": "set `dataset.kind: hub` and `dataset.path`",
    "reward_funcs": "use the `rewards` list",
    "use_peft": "add `model.lora`",
    "lora_r": "set `model.lora.r`",
    "lora_alpha": "set `model.lora.lora_alpha`",
    "load_in_4bit": "set `model.quantization: 4bit`",
    "load_in_8bit": "set `model.quantization: 8bit`",
    "warmup_ratio": (
        "set `training.warmup_steps` to the same value: below 1 it is a share of all steps, as in "
        "`warmup_steps: 0.1`"
    ),
    "adafactor": "set `training.optim: adafactor`",
    "no_cuda": "set `launch.use_cpu`",
    "task_type": "remove it: the model is always a causal language model",
    **dict.fromkeys(
        "kl_coef kl_loss_coef init_kl_coef kl_penalty_coef".split(), "write it as `training.beta`"
    ),
    **dict.fromkeys(
        "clip_ratio clip_range cliprange clip_eps".split(), "write it as `training.epsilon`"
    ),
    **dict.fromkeys(
        "group_size n_samples_per_prompt num_samples_per_prompt".split(),
        "write it as `generation.num_generations`",
    ),
    "max_response_length": "write it as `generation.max_completion_length`",
    **dict.fromkeys(("nodes", "num_nodes", "nnodes"), "write it as `launch.num_machines`"),
    **dict.fromkeys(
        ("ntasks_per_node", "nproc_per_node"),
        "remove it, and set `launch.num_processes`, the processes on all machines together",
    ),
    **{
        f"wandb_{key}": f"set `logging.report_to: wandb`, and WANDB_{key.upper()} in the environment"
        for key in ("project", "entity", "run_group")
    },
}
"""Keys of other tools and older versions, and where they went.

Source: `warmup_steps` is `TrainingArguments.get_warmup_steps` of transformers 5.17.
"""
RENAMED: dict[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_colocation_tensor_parallel_size": "vllm_tensor_parallel_size",
    "use_liger_loss": "use_liger_kernel",
    "use_liger": "use_liger_kernel",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "epsilon_low": "epsilon",
    "lr": "learning_rate",
}
"""Names of earlier versions, and today's."""

_BY_ITSELF = "remove it: peft writes it when it saves"
_REWRITES = "remove it: `init_lora_weights` here leaves the base's weights as they are, and needs no settings"
LORA_VARIANTS: dict[str, str] = {
    "alora_invocation_tokens": "an adapter that begins in the middle of a prompt cannot be merged into the model",
    "arrow_config": "it mixes several adapters, and one is trained here",
    "kasa_config": "it rewrites the base's weights, which the saved adapter would no longer fit",
    "layer_replication": "a model with repeated layers cannot be merged and exported",
    "lora_bias": "it cannot be merged into layers without a bias, as most models have",
    "megatron_config": "models are not trained with Megatron here",
    "monteclora_config": "it draws new adapters in each pass, so that the sampler's and the learner's differ",
    "trainable_token_indices": "TRL computes log-probabilities without it (`modules_to_save` trains embeddings)",
    "use_bdlora": "vLLM and export take whole adapters, not blocks of them",
    "use_qalora": "it cannot be merged into the model",
    "velora_config": "it learns from compressed activations, whose error GRPO's small advantages drown in",
}
"""Kinds of LoRA that are refused → why."""
LORA_REFUSED: dict[str, str] = {
    **{name: f"remove it: {reason}" for name, reason in LORA_VARIANTS.items()},
    "task_type": "remove it: the model is always a causal language model",
    "peft_type": "remove it: `model.lora` is always LoRA",
    "base_model_name_or_path": "set `model.path`",
    "revision": "set `model.revision`",
    "inference_mode": "remove it: adapters are trained",
    "auto_mapping": _BY_ITSELF,
    "peft_version": _BY_ITSELF,
    "megatron_core": "remove it: models are not trained with Megatron here",
    "qalora_group_size": "remove it: `use_qalora` is refused",
    "runtime_config": "remove it: it is about moving DoRA between CPU and GPU, and nothing is moved here",
    **dict.fromkeys(("corda_config", "eva_config", "loftq_config", "lora_ga_config"), _REWRITES),
}
"""Fields that a recipe refuses → what to do instead."""

Home = Literal["generation", "generation.vllm", "training", "logging", "model.lora"]
OPEN: dict[Home, type[BaseModel]] = {
    "model.lora": LoraConfig,
    "training": TrainingConfig,
    "generation.vllm": VllmConfig,
    "generation": GenerationConfig,
    "logging": LoggingConfig,
}
"""The sections that take fields of `GRPOConfig`, or of peft's `LoraConfig`."""
_CLOSED: dict[str, type[BaseModel]] = {
    "launch.slurm": SlurmConfig,
    "launch": LaunchConfig,
    "model": ModelConfig,
    "model.adapter": AdapterConfig,
}
"""Other sections, whose keys are distinguished from those of all others."""


@cache
def read_grpo_fields() -> dict[str, UpstreamField]:
    """Return the fields of `GRPOConfig` and its parents, described for a recipe."""
    fields = read_fields("GRPOConfig")
    return {name: replace(each, help=_HELP.get(name, each.help)) for name, each in fields.items()}


def home_of(name: str) -> Home | None:
    """Return the section that takes a `GRPOConfig` field, or None if the recipe refuses it."""
    if name in _REFUSED:
        return None
    if name.startswith("vllm_"):
        return "generation.vllm"
    if name in _GENERATION:
        return "generation"
    return "logging" if name in _LOGGING else "training"


def refusal_of(name: str) -> str | None:
    """Return what to do instead of a `GRPOConfig` field that no section takes."""
    return _REFUSED.get(name)


def key_in_home(name: str) -> str:
    """Return the dotted recipe key of a `GRPOConfig` field that has a home."""
    return f"{home_of(name)}.{name.removeprefix('vllm_')}"


def find_setting(name: str) -> str | None:
    """Return the dotted recipe key of a `GRPOConfig` field, by an earlier name too; None if there is none."""
    name = RENAMED.get(name, name)
    return key_in_home(name) if name in read_grpo_fields() and home_of(name) else None


def default_of(name: str) -> Any:
    """Return the default of a `GRPOConfig` field that has a home: the recipe's own, or else TRL's."""
    home, _, key = key_in_home(name).rpartition(".")
    field = OPEN[cast(Home, home)].model_fields.get(key)
    return read_grpo_fields()[name].default if field is None else field.default


def fields_in(home: Home) -> dict[str, UpstreamField]:
    """Return the keys that a section takes for fields of `GRPOConfig` or `LoraConfig`, and the fields."""
    if home == "model.lora":
        fields = read_fields("LoraConfig")
        return {key: field for key, field in fields.items() if key not in LORA_REFUSED}
    return {
        name.removeprefix("vllm_"): field
        for name, field in read_grpo_fields().items()
        if home_of(name) == home
    }


def check_trl_keys(tree: Node) -> list[Issue]:
    """Return the problems of keys that are TRL's: unknown, in the wrong section, or of the wrong type.

    Values that TRL wants in another type than YAML gave (such as `"1e-6"`) are converted in place.
    """
    top = [*Recipe.model_fields, "extends"]
    problems = [issue for home in OPEN for issue in _indent_strays(tree, home)]
    problems += _lift_sections(tree)
    problems += [
        explanation.unknown_key(tree, (key,), top, _fix_place(key, None))
        for key in tree.value
        if key not in top
    ]
    for home, model in OPEN.items():
        node = tree.find(home.split("."))
        for key in node.value if node is not None and isinstance(node.value, dict) else ():
            if key not in model.model_fields:
                problems += _check_key(tree, home, model, key)
    sections: dict[str, type[BaseModel]] = {"evaluation": EvaluationConfig, **_CLOSED}
    for section, closed in sections.items():
        node = tree.find(section.split("."))
        for key in node.value if node is not None and isinstance(node.value, dict) else ():
            if key not in closed.model_fields and (hint := _list_places().get(key)):
                path = (*section.split("."), key)
                problems.append(explanation.unknown_key(tree, path, (), hint))
    return problems


def _indent_strays(tree: Node, home: Home) -> Iterator[Issue]:
    """Move keys that follow an empty section without indentation into it, and report them once."""
    keys, place = tree.key_locations, tree.key_locations.get(home)
    if place is None or home in tree.value:
        return
    strays = [
        key
        for key in tree.value
        if _fix_place(key, None) == f"move it to `{home}.{key}`"
        and (keys[key].source, keys[key].line > place.line) == (place.source, True)
    ]
    if strays:
        tree.value[home] = Node({key: tree.value.pop(key) for key in strays}, place, keys)
        seen = f"`{home}` is empty: its keys ({', '.join(strays)}) are not indented"
        fix = f"indent them by two spaces, from line {keys[strays[0]].line} on"
        yield Issue(seen, fix, home, place)


def _lift_sections(tree: Node) -> Iterator[Issue]:
    """Move sections that stand inside another one to the top level, and report each once."""
    sections = Recipe.model_fields.keys() - {"name", "description", "seed"}
    for owner, node in list(tree.value.items()):
        # A kind of environment, which another package may add, has keys of its own.
        is_ours = owner != "environment" and isinstance(node.value, dict)
        inside = node.value if is_ours else {}
        for key in sorted(inside.keys() & sections - tree.value.keys()):
            place = node.key_locations.get(key, node.location)
            tree.value[key], tree.key_locations[key] = inside.pop(key), place
            seen = f"`{key}` is a section of its own, and stands in `{owner}`"
            yield Issue(seen, "move it to the top level: unindent it", f"{owner}.{key}", place)


def _check_key(tree: Node, home: Home, model: type[BaseModel], key: str) -> list[Issue]:
    path = (*home.split("."), key)
    fields = fields_in(home)
    if (field := fields.get(key)) is None:
        valid = list(dict.fromkeys((*model.model_fields, *fields)))
        return [explanation.unknown_key(tree, path, valid, _fix_place(key, home))]
    config = ConfigDict(hide_input_in_errors=True, arbitrary_types_allowed=True)
    adapter: TypeAdapter[object] = TypeAdapter(python_type(field), config=config)
    node = tree.find(path) or tree
    if "dict" in field.annotation and isinstance(node.value, str):
        _read_json(node)
    try:
        value = adapter.validate_python(node.plain())
    except ValidationError as error:
        return explanation.explain(error, Recipe, tree, path)
    if not isinstance(node.value, dict | list):
        node.value = value
    return []


def _read_json(node: Node) -> None:
    """Take a mapping that is written as JSON, as TRL's command line does."""
    with suppress(ValueError, RecursionError):
        value = json.loads(node.value)
        node.value = as_node(value, node.location).value if isinstance(value, dict) else node.value


def _fix_place(key: str, home: Home | None) -> str | None:
    """Return what to write instead of a key that is known, only not here; None if it is unknown."""
    if home == "model.lora" and key in LORA_REFUSED:
        return LORA_REFUSED[key]
    fixes = _list_places()
    names = (key, f"vllm_{key}")
    for name in reversed(names) if home == "generation.vllm" else names:
        if name in fixes:
            return fixes[name]
    if home is None and not nearest(key, Recipe.model_fields):
        close = nearest(key, [name for name in read_grpo_fields() if home_of(name)])
        return f"write it as `{key_in_home(close)}`" if close else None
    return None


@cache
def _list_places() -> dict[str, str]:
    """Return every known key and how to write it where it belongs."""
    return {
        **{
            key: f"move it to `{section}.{key}`"
            for section, model in _CLOSED.items()
            for key in model.model_fields
            if key != "path"
        },
        **{key: f"move it to `model.lora.{key}`" for key in fields_in("model.lora")},
        **{name: f"move it to `{key_in_home(name)}`" for name in read_grpo_fields()},
        **{
            key: f"move it to `{home}.{key}`"
            for home, model in OPEN.items()
            for key in model.model_fields
        },
        **{old: f"write it as `{key_in_home(new)}`" for old, new in RENAMED.items()},
        **_REFUSED,
        **{key: f"move `{key}:` to the top level of the recipe" for key in Recipe.model_fields},
        **MOVED,
    }


def python_type(field: UpstreamField) -> Any:
    """Return the type of a field for pydantic; `Any` stands for what only upstream can check."""
    if field.name in _CHOICES:
        return Literal[_CHOICES[field.name]]
    if field.name in _TYPES:
        return _TYPES[field.name]
    kind = as_type(field.annotation)
    if field.name not in _BOUNDS:
        return kind
    lowest, highest = _BOUNDS[field.name]
    return Annotated[kind, Field(ge=lowest, le=highest)]
