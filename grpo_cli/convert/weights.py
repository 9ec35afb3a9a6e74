"""TRL's `ModelConfig` as a recipe's `model` section: weights, precision, adapters, quantization.

Source: `ModelConfig` and `get_peft_config` of trl 1.16; `torch_dtype` is its name of earlier versions.
"""

import json
from typing import Any

from grpo_cli.convert.key_report import Ledger, put
from grpo_cli.recipe.explanation import Path

PEFT_TARGETS = ("q_proj", "v_proj")
"""What peft 0.21 takes for Llama, Mistral, Qwen and Gemma where no modules are named."""

_PLAIN = {
    "model_name_or_path": "model.path",
    "model_revision": "model.revision",
    "attn_implementation": "model.attn_implementation",
    "trust_remote_code": "model.trust_remote_code",
}
_LORA = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
LORA_NAMES = {target: name for name, target in _LORA.items()}
"""Arguments of peft's `LoraConfig` that a recipe takes → their names in TRL's `ModelConfig`."""
_DTYPES = frozenset({"auto", "float32", "bfloat16", "float16"})
INIT_KWARGS = {
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "revision": "model.revision",
    "attn_implementation": "model.attn_implementation",
    "trust_remote_code": "model.trust_remote_code",
}
"""Keyword arguments of `from_pretrained` that have a place of their own."""
MODEL_KEYS = frozenset(
    {*_PLAIN, *_LORA, "dtype", "torch_dtype", "use_peft", "lora_target_parameters"}
    | {"lora_task_type", "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type"}
    | {"use_bnb_nested_quant", "bnb_4bit_quant_storage", "model_init_kwargs"}
)


def take_model(ledger: Ledger) -> None:
    """Takes every key of `ModelConfig`, and writes the defaults in which TRL's command line differs."""
    for name, target in _PLAIN.items():
        take_plain(ledger, (name,), target)
    _take_dtype(ledger)
    _take_init_kwargs(ledger)
    if "dtype" not in ledger.recipe.get("model", {}) and not _given_dtypes(ledger):
        ledger.add("model.dtype", "float32", f"{ledger.tool}'s default")
    _take_lora(ledger)
    take_quantization(ledger)


def take_plain(ledger: Ledger, key: Path, target: str, note: str = "") -> None:
    """Takes a value as it is, where there is one."""
    if ledger.node(*key) is None:
        return
    value = ledger.get(*key)
    if value is None:
        ledger.drop(key, "empty, so the default holds")
    else:
        ledger.keep(key, target, value, note)


def _take_dtype(ledger: Ledger) -> None:
    given = _given_dtypes(ledger)
    for name in given:
        take_dtype(ledger, (name,))
    for name in {"torch_dtype", "dtype"} - set(given):
        take_plain(ledger, (name,), "model.dtype")


def _given_dtypes(ledger: Ledger) -> list[str]:
    return [name for name in ("torch_dtype", "dtype") if ledger.get(name) is not None]


def take_dtype(ledger: Ledger, key: Path) -> None:
    """Takes a precision, with or without `torch.` before it."""
    name = str(ledger.get(*key)).removeprefix("torch.")
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)
    if name in _DTYPES:
        ledger.keep(key, "model.dtype", name)
    else:
        ledger.drop(key, f"weights load in {', '.join(sorted(_DTYPES))}, not in {name}")


def _take_init_kwargs(ledger: Ledger) -> None:
    key = ("model_init_kwargs",)
    given = ledger.get(*key)
    if given is None:
        take_plain(ledger, key, "model.init_kwargs")
        return
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        given = None
    if not isinstance(given, dict):
        ledger.drop(key, "is neither a mapping nor JSON")
        return
    rest = {name: value for name, value in given.items() if name not in INIT_KWARGS}
    for name, value in given.items():
        if name in INIT_KWARGS and value is not None:
            plain = str(value).removeprefix("torch.") if "dtype" in name else value
            put(ledger.recipe, INIT_KWARGS[name], plain)
            ledger.credit(key, INIT_KWARGS[name], f"its {name}")
    if rest:
        ledger.keep(key, "model.init_kwargs", rest)
    elif not ledger.done(*key):
        ledger.settle(key, "model.init_kwargs", "empty")


def _take_lora(ledger: Ledger) -> None:
    names = (*_LORA, "lora_target_parameters", "lora_task_type")
    if not ledger.is_on("use_peft"):
        if ledger.node("use_peft") is not None:
            ledger.settle(("use_peft",), "model", "all weights are trained")
        for name in names:
            if ledger.node(name) is not None:
                ledger.drop((name,), "`use_peft` is not set, so all weights are trained without it")
        return
    ledger.keep(("use_peft",), "model.lora", {})
    for name, target in _LORA.items():
        take_plain(ledger, (name,), f"model.lora.{target}")
    if ledger.get("lora_task_type") == "CAUSAL_LM":
        ledger.settle(("lora_task_type",), "model.lora", "always CAUSAL_LM")
    elif ledger.node("lora_task_type") is not None:
        ledger.drop(("lora_task_type",), "GRPO trains causal language models")
    if ledger.node("lora_target_parameters") is not None:
        ledger.drop(("lora_target_parameters",), "recipes put adapters on modules alone")
    lora: dict[str, Any] = ledger.recipe["model"]["lora"]
    if "lora_dropout" not in lora:
        ledger.add("model.lora.lora_dropout", 0.05, f"the default of {ledger.tool}'s command line")
    if "target_modules" not in lora:
        note = "peft's default for Llama, Mistral, Qwen and Gemma; all-linear learns more"
        ledger.add("model.lora.target_modules", list(PEFT_TARGETS), note)


def take_quantization(ledger: Ledger) -> None:
    """Takes bitsandbytes' switches; a recipe's 4 bits are NF4 with double quantization."""
    for name, kind in (("load_in_4bit", "4bit"), ("load_in_8bit", "8bit")):
        if ledger.is_on(name):
            ledger.keep((name,), "model.quantization", kind)
        elif ledger.node(name) is not None:
            ledger.settle((name,), "model.quantization", "off")
    fixed = {"bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    for name, ours in fixed.items():
        if ledger.node(name) is None:
            continue
        if ledger.get(name) == ours:
            ledger.settle((name,), "model.quantization", "always so")
        else:
            ledger.drop((name,), "4bit is always NF4 with double quantization here")
    if ledger.node("bnb_4bit_quant_storage") is not None:
        ledger.drop(("bnb_4bit_quant_storage",), "4bit is always NF4 with double quantization here")
