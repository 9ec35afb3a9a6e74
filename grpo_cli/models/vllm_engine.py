"""How vLLM's engine is set up for a recipe, in a process or as a server. Pure; imports no vLLM."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from grpo_cli.errors import UsageError
from grpo_cli.models.source import read_adapter_config
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.files import read_tensors_header
from grpo_cli.upstream.vllm import LORA_RANKS

Device = Literal["cpu", "cuda"]
AUTOMATIC = -1
"""For `max_model_len`: vLLM takes the longest that its memory has room for, up to the model's own."""
CPU_MEMORY = 0.2
"""Share of the machine's memory for keys and values; vLLM itself would take nearly all."""
_VOCABULARY = ("lm_head", "embed_out", "model.embed_tokens", "transformer.wte", "gpt_neox.embed_in")
"""Embeddings and heads by their names in models."""
_ALONE = 0.9
"""Share of a GPU's memory for an engine beside which nothing trains."""


def processor_settings(model: ModelConfig, *, has_images: bool) -> dict[str, Any] | None:
    """Return vLLM's `mm_processor_kwargs`, with which it makes the same of images as training does."""
    return dict(model.processor) or None if has_images else None


def pick_dtype(recipe: Recipe, device: Device) -> str | None:
    """Return the precision to sample in: that which training computes in; None leaves it to the weights.

    On a GPU that is the autocast's, bf16 unless set otherwise, whatever the weights are in.
    """
    mixed = recipe.mixed_precision(cpu=False) if device == "cuda" else "no"
    if mixed != "no":
        return "float16" if mixed == "fp16" else "bfloat16"
    return None if recipe.model.dtype == "auto" else recipe.model.dtype


def model_length(recipe: Recipe) -> int:
    """Return the tokens of the longest sequence that the engine must hold, prompt and completion.

    That is `generation.vllm.max_model_length`, or what the lengths of prompts and completions come to.
    `AUTOMATIC` if prompts have no limit: a model's own 32k or 128k may not fit beside the training. So too with
    episodes, whose prompts grow by the schemas of tools and by what an environment says first.
    """
    length = recipe.setting("vllm_max_model_length")
    if length is not None:
        return int(length)
    prompt = recipe.dataset.longest_prompt
    if prompt is None or recipe.has_episodes:
        return AUTOMATIC
    return prompt + recipe.generation.max_completion_length


def adapter_rank(recipe: Recipe, device: Device) -> int | None:
    """Return the `max_lora_rank` of an engine that takes the training's adapter; None if it gets all weights."""
    lora = recipe.model.lora
    return None if lora is None or _why_merged(recipe, device) else fitting_rank(lora.max_rank)


def describe_weights(recipe: Recipe, device: Device) -> str:
    """Return how the weights reach vLLM after a step: `adapters sent as adapters`."""
    if recipe.model.lora is None:
        return "all weights sent"
    why = _why_merged(recipe, device)
    return f"merged weights sent ({why})" if why else "adapters sent as adapters"


def _why_merged(recipe: Recipe, device: Device) -> str | None:
    """Return what has the engine get merged weights; None if it takes the adapter.

    Source: vLLM 0.31, `PEFTHelper.validate_legal` and its LoRA kernels; trl 1.16, `validate_lora_for_vllm_sync`.
    """
    lora, vllm = recipe.model.lora, recipe.generation.vllm
    if lora is None:
        return None
    # A sleeping engine forgets the weights, and gets all of them again. The kernels compute in 16 bits.
    float32 = device == "cuda" and vllm.mode == "server" and pick_dtype(recipe, device) == "float32"
    reasons = {
        "enable_lora: false": not vllm.enable_lora,
        "mode: async": recipe.training.mode == "async",
        # vLLM passes over adapters of the vision part, which modules of these names may have.
        "target_modules": recipe.has_images and lora.target_modules != "all-linear",
        **_list_features(lora.model_dump()),
        "enable_sleep_mode": vllm.extras.get("enable_sleep_mode"),
        "float32": float32,
        f"rank {lora.max_rank}": fitting_rank(lora.max_rank) is None,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def unsupported_feature(config: Mapping[str, Any]) -> str | None:
    """Return why vLLM cannot load an adapter as peft saved it; None if it can.

    Source: vLLM 0.31, `PEFTHelper`: it reads one rank and one scale for all modules.
    """
    patterns = {key: config.get(key) for key in ("rank_pattern", "alpha_pattern")}
    features = {**_list_features(config), **patterns}
    return next((name for name, applies in features.items() if applies), None)


def _list_features(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what vLLM's adapters lack → whether one with these settings of peft's has it."""
    names = ("use_dora", "modules_to_save", "target_parameters")
    return {
        **{name: config.get(name) for name in names},
        "bias": config.get("bias", "none") != "none",
        "an adapter on the vocabulary": _adapts_vocabulary(config.get("target_modules") or ()),
    }


def fitting_rank(rank: int) -> int | None:
    """Return the least `max_lora_rank` of vLLM for adapters of a rank; None if it is too high."""
    return next((each for each in LORA_RANKS if each >= rank), None)


def _adapts_vocabulary(target_modules: str | Sequence[str]) -> bool:
    """Return whether the embeddings or the head get an adapter; peft matches a text as a regular expression."""
    if isinstance(target_modules, str):
        return target_modules != "all-linear" and any(
            re.fullmatch(target_modules, name) for name in _VOCABULARY
        )
    return any(f".{name}".endswith(f".{each}") for name in _VOCABULARY for each in target_modules)


def engine_settings(recipe: Recipe, device: Device) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for an engine that measures or probes: nothing trains beside it."""
    vllm = recipe.generation.vllm
    share = vllm.extras.get("gpu_memory_utilization")
    if device == "cuda" and (share is None or vllm.mode == "colocate"):
        # The share of a colocated engine leaves room for the training.
        share = _ALONE
    return {
        "dtype": pick_dtype(recipe, device) or "auto",
        "gpu_memory_utilization": CPU_MEMORY if share is None else share,
        "max_model_len": model_length(recipe),
        "trust_remote_code": recipe.model.trust_remote_code,
        "revision": recipe.model.revision,
        "model_impl": vllm.extras.get("model_impl") or "auto",
        "mm_processor_kwargs": processor_settings(recipe.model, has_images=recipe.has_images),
    }


def read_vllm_rank(adapter: Path) -> int:
    """Return the `max_lora_rank` that vLLM needs, or raise `RecipeError` or `UsageError`."""
    config = read_adapter_config(adapter)
    feature = unsupported_feature(config)
    if feature is None and (file := adapter / "adapter_model.safetensors").is_file():
        # vLLM (0.31) passes over adapters on the vision part.
        names = read_tensors_header(file)[1]
        if any(word in name for name in names for word in ("vision", "visual")):
            feature = "an adapter on the vision part"
    if feature is not None:
        raise UsageError(
            f"vLLM cannot load the adapter {adapter} ({feature})",
            "export the run as safetensors (`grpo export`) and name that, or use transformers (`grpo eval "
            "--backend transformers`, `grpo chat`)",
        )
    rank = int(config.get("r") or 8)
    return fitting_rank(rank) or rank
