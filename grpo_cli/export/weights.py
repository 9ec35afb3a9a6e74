"""The base model, the trained one and the merged one, and writing them down.

Owns merging. Weights are read at the precision they were trained in, and worked on in float32: what
comes out is rounded once, when it is written.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from grpo_cli.export.request import ExportRequest
from grpo_cli.fast.completions import all_eos_token_ids
from grpo_cli.models.adapters import load_adapter
from grpo_cli.models.loading import (
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
)
from grpo_cli.recipe.model import ModelConfig

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def load_base(request: ExportRequest) -> Any:
    """The model that training began with.

    Raises:
        GrpoError: It cannot be had.
    """
    return load_exact(request.base)


def load_exact(model: ModelConfig) -> Any:
    """A model's weights, as its section says, in float32.

    Raises:
        GrpoError: It cannot be had.
    """
    disable_progress_bar()
    return load_model(model, device_is_cuda=False).float()


def load_trained(request: ExportRequest) -> Any:
    """The model as training left it; an adapter stays beside the weights of its base.

    Raises:
        GrpoError: It cannot be had, or the adapter is another model's.
    """
    if not request.is_adapter:
        whole = {"path": str(request.trained), "revision": None, "dtype": "auto"}
        return load_exact(request.base.model_copy(update=whole))
    return load_adapter(load_base(request), request.trained, request.base.path)


def write_safetensors(request: ExportRequest, folder: Path, dtype: str) -> None:
    """Writes the trained model as one: weights, settings, stop tokens, tokenizer and template.

    Args:
        request: What is exported.
        folder: Where it goes.
        dtype: Precision of the weights: `float32`, `float16` or `bfloat16`.

    Raises:
        GrpoError: A model cannot be had.
    """
    model = load_trained(request)
    if request.is_adapter:
        model = model.merge_and_unload()
    tokenizer = load_tokenizer(request.tokenizer)
    settings = load_generation_config(request.recipe.model)
    stops = all_eos_token_ids(settings, tokenizer)
    settings.update(
        eos_token_id=stops if stops[1:] else stops[0], pad_token_id=tokenizer.pad_token_id
    )
    model.generation_config = settings
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=request.max_shard_size)
    tokenizer.save_pretrained(folder)


def write_adapter(request: ExportRequest, folder: Path) -> None:
    """Writes the adapter as it is, with the tokenizer and template it was trained with."""
    for name in _ADAPTER_FILES:
        shutil.copyfile(request.trained / name, folder / name)
    load_tokenizer(request.tokenizer).save_pretrained(folder)


def count_parameters(request: ExportRequest) -> int:
    """Weights of the base model, counted without loading them.

    Raises:
        GrpoError: Its settings cannot be had.
    """
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            load_config(request.base), trust_remote_code=request.base.trust_remote_code
        )
    return sum(weight.numel() for weight in empty.parameters())
