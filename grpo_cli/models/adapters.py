"""Adapters: what a folder says of one, putting it on a model, and the model underneath.

Owns `adapter_config.json`'s two facts that others need. Loads peft only where an adapter is loaded.
"""

import json
from pathlib import Path
from typing import Any

from grpo_cli.errors import Problem, RecipeError, UsageError

_CONFIG = "adapter_config.json"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter rather than whole weights."""
    return (folder / _CONFIG).is_file()


def read_adapter_base(adapter: Path) -> str | None:
    """The model that an adapter says it was trained on: a folder, or a hub id; None where it is silent.

    Raises:
        RecipeError: Its settings cannot be read.
    """
    base = _read_settings(adapter).get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def read_vllm_rank(adapter: Path) -> int:
    """The rank vLLM (0.31) must make room for: it knows powers of 2, from 8 on.

    Raises:
        RecipeError: The adapter's settings cannot be read.
    """
    rank = _read_settings(adapter).get("r")
    return max(8, 1 << (int(rank or 8) - 1).bit_length())


def without_wrapper(model: Any) -> Any:
    """The model into which peft has put its layers; the model itself where peft has no part in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_prompt_ties(model: Any) -> str | None:
    """How an adapter of a model hangs on the prompt, so that peft has to see it whole; None where none does.

    Source: peft 0.21, `PeftModelForCausalLM.forward`, and `alora_invocation_tokens` of its `LoraConfig`.
    """
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        if adapter.is_prompt_learning:
            return "the adapter puts tokens of its own before the prompt"
        if getattr(adapter, "alora_invocation_tokens", None):
            return "the adapter begins at tokens that it looks for in the prompt"
    return None


def load_adapter(model: Any, adapter: Path, base: str) -> Any:
    """The model with an adapter beside its weights: a `peft.PeftModel`.

    Args:
        model: What it is put on.
        adapter: Its folder.
        base: How messages call the model.

    Raises:
        UsageError: The adapter is another model's, or torn.
    """
    import peft
    from safetensors import SafetensorError

    try:
        loaded = peft.PeftModel.from_pretrained(model, adapter)
        lacking = peft.get_peft_model_state_dict(loaded).keys() - _list_tensors(adapter)
        if lacking:
            # peft only warns, and goes on with fresh values.
            raise ValueError(f"{len(lacking)} of its tensors are lacking, such as {min(lacking)}")
        return loaded
    except (RuntimeError, ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        sentence = " ".join(str(error).split())[:200]
        raise UsageError(
            f"the adapter {adapter} does not fit {base}: {sentence}. "
            "Fix: put it on the model that it was trained on, or fetch it anew"
        ) from error


def _list_tensors(adapter: Path) -> set[str]:
    """The names in an adapter's file of weights."""
    from safetensors import safe_open

    weights = adapter / "adapter_model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(f"there is no {weights.name} in it")
    with safe_open(weights, "pt") as tensors:
        return set(tensors.keys())


def _read_settings(adapter: Path) -> dict[str, Any]:
    path = adapter / _CONFIG
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError) as error:
        problem = Problem(f"{path} is damaged: {error}", "fetch the adapter anew", "model.path")
        raise RecipeError([problem]) from None
