"""What the installed TRL's `GRPOConfig` accepts, read from its sources without importing torch.

Owns the fields with their types, defaults and help, and which recipe section each one lives in.
Does not build a `GRPOConfig`: that is `train/trl_args.py`.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from grpo_cli.errors import SetupError
from grpo_cli.recipe.base import Integer, Number

_CLASSES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
)
"""`GRPOConfig` and its parents, the oldest first, as laid out in trl 1.16.0 and transformers 5.17."""
_ASYNC_CLASS = ("trl", "experimental/async_grpo/async_grpo_config.py", "AsyncGRPOConfig")
"""The configuration of `training.mode: async`; its parents are those of `GRPOConfig`, less the last."""

_ENUM_FILES = (("transformers", "trainer_utils.py"), ("transformers", "training_args.py"))

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
    "deepspeed": "set `launch.strategy`",
    "fsdp": "set `launch.strategy`",
    "fsdp_config": "set `launch.strategy`",
    "parallelism_config": "remove it: GRPOTrainer refuses sequence parallelism",
    "local_rank": "remove it: the launcher sets it",
    "accelerator_config": "remove it: the launcher owns the devices",
    "do_train": "remove it: `grpo train` trains",
    "do_eval": "remove it: `eval_strategy` says when to evaluate",
    "do_predict": "remove it: GRPO does not predict",
    "resume_from_checkpoint": "remove it: every run starts afresh",
    "remove_unused_columns": "remove it: rewards need the columns",
    "label_names": "remove it: GRPO has no labels",
    "auto_find_batch_size": "lower `per_device_train_batch_size`: GRPO refuses this option",
    "enable_jit_checkpoint": "remove it: a stopped run saves a checkpoint anyway",
    "disable_tqdm": "remove it: the live view shows progress",
    "log_multimodal": "remove it: recipes train on text",
    "max_tool_calling_iterations": "remove it: recipes train without tools",
    "num_completions_to_print": "remove it: completions go to the run folder",
    "log_unique_prompts": "remove it: completions go to the run folder",
    "log_completions_hub_repo": "remove it: nothing is pushed while training",
    "push_to_hub": "remove it: nothing is pushed while training",
    "hub_token": "remove it: tokens do not belong in a recipe",
    **dict.fromkeys(
        (
            "hub_private_repo",
            "hub_model_id",
            "hub_strategy",
            "hub_always_push",
            "hub_revision",
        ),
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
}
"""Names of earlier versions, and today's."""

Home = Literal["generation", "generation.vllm", "training", "logging"]


@dataclass(frozen=True)
class GrpoField:
    """One field of `GRPOConfig`."""

    name: str
    annotation: str
    """The type as written in the sources."""
    default: str
    """The default as written in the sources."""
    help: str


@cache
def read_grpo_fields() -> dict[str, GrpoField]:
    """Reads the fields of the installed `GRPOConfig` and its parents.

    Raises:
        SetupError: trl or transformers is missing, or laid out in a way this version does not know.
    """
    fields: dict[str, GrpoField] = {}
    for package, relative, class_name in _CLASSES:
        definition = _find_class(_source_path(package, relative), class_name)
        fields.update({entry.name: entry for entry in _read_class(definition)})
    return fields


@cache
def read_async_fields() -> frozenset[str]:
    """The names that the installed `AsyncGRPOConfig` and its parents accept.

    Raises:
        SetupError: trl or transformers is missing, or laid out in a way this version does not know.
    """
    classes = (*_CLASSES[:2], _ASYNC_CLASS)
    found = [_read_class(_find_class(_source_path(*place), name)) for *place, name in classes]
    return frozenset(entry.name for entries in found for entry in entries)


def home_of(name: str) -> Home | None:
    """The section that takes a `GRPOConfig` field, or None where the recipe refuses it."""
    if name in _REFUSED:
        return None
    if name.startswith("vllm_"):
        return "generation.vllm"
    if name in _GENERATION:
        return "generation"
    return "logging" if name in _LOGGING else "training"


def refusal_of(name: str) -> str | None:
    """What to do instead of a `GRPOConfig` field that no section takes."""
    return _REFUSED.get(name)


def key_in_home(name: str) -> str:
    """The dotted recipe key of a `GRPOConfig` field that has a home."""
    return f"{home_of(name)}.{name.removeprefix('vllm_')}"


def names_in(home: Home) -> tuple[str, ...]:
    """The keys that a section takes for `GRPOConfig` fields."""
    return tuple(name.removeprefix("vllm_") for name in read_grpo_fields() if home_of(name) == home)


def python_type(field: GrpoField) -> Any:
    """The type of a field for pydantic; `Any` stands for what only upstream can check."""
    if field.name in _CHOICES:
        return Literal[_CHOICES[field.name]]
    if field.name == "scale_rewards":
        return bool | Literal["group", "batch", "none"]
    kind = _as_type(ast.parse(field.annotation, mode="eval").body)
    if field.name not in _BOUNDS:
        return kind
    lowest, highest = _BOUNDS[field.name]
    return Annotated[kind, Field(ge=lowest, le=highest)]


def _as_type(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp):
        left, right = _as_type(node.left), _as_type(node.right)
        # `SchedulerType | str` means: one of the names of the enumeration.
        return left if right is str and _is_choice(node.left) else left | right
    if isinstance(node, ast.Constant):
        return None if node.value is None else Any
    if isinstance(node, ast.Subscript):
        base, inner = ast.unparse(node.value), node.slice
        if base == "list":
            return list[_as_type(inner)]  # type: ignore[misc]
        return {"dict": dict[str, Any]}.get(base, Any)
    simple = {"int": Integer, "float": Number, "bool": bool, "str": str, "dict": dict[str, Any]}
    name = ast.unparse(node)
    if name in simple:
        return simple[name]
    choices = _read_enums().get(name)
    return Literal[choices] if choices else Any


def _is_choice(node: ast.expr) -> bool:
    return ast.unparse(node) in _read_enums()


@cache
def _read_enums() -> dict[str, tuple[str, ...]]:
    enums: dict[str, tuple[str, ...]] = {}
    for package, relative in _ENUM_FILES:
        path = _source_path(package, relative)
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^class (\w+)\(ExplicitEnum\)", text, re.MULTILINE):
            enums[name] = tuple(_read_members(_find_class(path, name)))
    return enums


def _read_members(definition: ast.ClassDef) -> Iterator[str]:
    for statement in definition.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            yield str(statement.value.value)


def _read_class(definition: ast.ClassDef) -> Iterator[GrpoField]:
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default, help_text = _read_default(statement.value)
            annotation = ast.unparse(statement.annotation)
            yield GrpoField(statement.target.id, annotation, default, help_text)


def _read_default(value: ast.expr | None) -> tuple[str, str]:
    if not isinstance(value, ast.Call):
        return (ast.unparse(value) if value else ""), ""
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    default = keywords.get("default") or keywords.get("default_factory")
    metadata = keywords.get("metadata")
    help_text = ""
    if isinstance(metadata, ast.Dict):
        for key, text in zip(metadata.keys, metadata.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "help":
                help_text = str(text.value) if isinstance(text, ast.Constant) else ""
    return (ast.unparse(default) if default else ""), help_text


def _find_class(path: Path, name: str) -> ast.ClassDef:
    """Parses a class from its head to its first method: all that holds fields, a third of the file."""
    text = path.read_text(encoding="utf-8")
    head = re.search(rf"^class {name}\b", text, re.MULTILINE)
    if head is None:
        raise SetupError(
            f"{path} has no class `{name}`: this version of grpo was made for trl 1.16. "
            'Fix: pip install "trl>=1.16,<1.17"'
        )
    method = re.compile(r"^    (?:def |@|async )|^\S", re.MULTILINE).search(text, head.end())
    definition = ast.parse(text[head.start() : method.start() if method else None]).body[0]
    return cast(ast.ClassDef, definition)


def _source_path(package: str, relative: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    path = Path(next(iter(folders))) / relative if folders else None
    if path is None or not path.is_file():
        raise SetupError(
            f"{package} is not installed, or lacks {relative}. "
            'Fix: pip install "trl>=1.16,<1.17" transformers'
        )
    return path
