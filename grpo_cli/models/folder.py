"""What the files of a model folder show without torch: whether they are whole, and which kind of weights it is."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_cli.errors import RecipeError, UsageError, pip
from grpo_cli.input_files import open_input, read_input_text
from grpo_cli.issues import Issue
from grpo_cli.models.vllm_engine import fitting_rank, unsupported_feature
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.runs.files import read_object, read_tensors_header

Fault = tuple[str, str]
FSDP_SHARDS = "pytorch_model_fsdp_0"
"""Folder in which accelerate 1.15 writes FSDP's shards."""
_DEEPSPEED_TAG = "latest"
"""File in which DeepSpeed names the newest of its `global_stepN` folders."""
_VERL_SHARD = re.compile(r"model_world_size_\d+_rank_\d+\.pt")
_WHOLE = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.safetensors")
_ADAPTER_CONFIG = "adapter_config.json"
_CONFIGS = ("config.json", "tokenizer_config.json", "generation_config.json")
_TOKENIZER_FILE = re.compile(r"tokenizer|vocab|\.model$|tiktoken|tekken")
"""Matches the name of one file of every tokenizer."""
_OTHER_HEADS = (
    "ForMaskedLM",
    "ForQuestionAnswering",
    "ForSequenceClassification",
    "ForTokenClassification",
)
_QUANTIZERS = {
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "gptq": ("optimum", "gptqmodel"),
}
"""Formats that Trainer trains with adapters only, and the packages that load them (transformers 5.17)."""


def check_folder(folder: Path, model: ModelConfig) -> list[Issue]:
    """Return the problems of a folder's settings; its weights and vocabulary may not be there yet."""
    faults = _check_settings(folder, visible_names(folder), model)
    problems = [Issue(message, fix, "model.path") for message, fix in faults]
    return [*problems, *_find_missing_quantizers(folder / "config.json")]


def check_data(folder: Path) -> list[Issue]:
    """Return the problems of a folder's weights and vocabulary that their first bytes and sizes show."""
    texts = ("tokenizer.json", "chat_template.jinja")
    files = [*(folder / name for name in texts), *sorted(folder.glob("*.safetensors"))]
    faults = (find_fault(file) for file in files if file.exists())
    missing = _find_missing_shards(folder)
    return [Issue(*fault, "model.path") for fault in (*missing, *faults) if fault]


def _find_missing_shards(folder: Path) -> Iterator[Fault]:
    for index in sorted(folder.glob("*.index.json")):
        listed = (read_settings(index) or {}).get("weight_map")
        names = sorted({*map(str, listed.values())}) if isinstance(listed, dict) else []
        if missing := [name for name in names if not (folder / name).exists()]:
            message = f"{folder} lacks {enumerate_names(missing)}, which {index.name} lists"
            yield message, "download what is missing again: only a part of the model is there"


def _check_settings(folder: Path, names: list[str], model: ModelConfig) -> Iterator[Fault]:
    for name in _CONFIGS:
        if name in names and read_settings(folder / name) is None:
            yield f"{folder / name} holds no JSON object", "correct it, or download it again"
    if not any(_TOKENIZER_FILE.search(name) for name in names):
        fix = "put tokenizer.json and tokenizer_config.json beside config.json"
        yield f"{folder} holds no tokenizer but {enumerate_names(names)}", fix
    if (config := read_settings(folder / "config.json")) is not None:
        yield from _check_config(folder / "config.json", config, model)


def _find_missing_quantizers(file: Path) -> Iterator[Issue]:
    method = ((read_settings(file) or {}).get("quantization_config") or {}).get("quant_method")
    for package in _QUANTIZERS.get(str(method), ()):
        if importlib.util.find_spec(package) is None:
            seen = (
                f"the weights are quantized with {method} ({file}), and {package} is not installed"
            )
            fix = f"name the unquantized model, or {pip(f'install {package}')} (and use a GPU)"
            yield Issue(seen, fix, "model.path", package=package)


def _check_config(file: Path, config: dict[str, Any], model: ModelConfig) -> Iterator[Fault]:
    if not config.keys() & {"model_type", "auto_map"}:
        fix = 'add it, such as "model_type": "qwen2", or download the file again'
        yield f"{file} has no `model_type`", fix
    kind = str((config.get("architectures") or ["model"])[0])
    if config.get("is_encoder_decoder") or kind.endswith(_OTHER_HEADS):
        kind = f"an encoder-decoder ({kind})" if config.get("is_encoder_decoder") else kind
        message = f"the model is {kind}, which cannot be trained with GRPO ({file})"
        yield message, "name a causal language model (`…ForCausalLM`)"
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method in _QUANTIZERS and model.lora is None:
        fix = "name the unquantized model, or add `lora: {r: 16}` to `model`"
        yield f"weights quantized with {method} cannot be trained without `lora` ({file})", fix


def find_fault(file: Path) -> Fault | None:
    """Return what is wrong with a file of weights or a vocabulary, judged by its first bytes and its size."""
    try:
        with open_input(file) as opened:
            head = opened.read(512)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}", "download it again"
    if head.startswith(b"version https://git-lfs"):
        fix = f"cd {file.parent} && git lfs pull"
        return f"{file} is a Git LFS pointer, not the file itself", fix
    if file.suffix != ".safetensors":
        return None if head else (f"{file} is empty", "download it again")
    size = file.stat().st_size
    try:
        expected, shapes = read_tensors_header(file)
    except ValueError:
        return f"{file} has no safetensors header", "the file is damaged: download it again"
    if size < expected:
        return f"{file} is cut short: {size:,} of {expected:,} bytes", "download it again"
    if empty := [name for name, shape in shapes.items() if 0 in shape and name.endswith(".weight")]:
        seen = f"{len(empty)} of {len(shapes)} weights of {file} are empty, such as {empty[0]}"
        fix = "DeepSpeed's ZeRO-3 did not gather them: run `zero_to_fp32.py` in that training's checkpoint"
        return seen, f"{fix}, or save with `stage3_gather_16bit_weights_on_model_save: true`"
    return None


def read_settings(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object; None if it does not hold one."""
    try:
        settings = json.loads(read_input_text(path))
    except (OSError, ValueError, RecursionError):
        return None
    return settings if isinstance(settings, dict) else None


def visible_names(folder: Path) -> list[str]:
    """Return the sorted names in a folder that are not hidden."""
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith((".", "__")))


def enumerate_names(names: list[str], most: int = 8) -> str:
    """Return the first names as a text, and the number of the others."""
    if not names:
        return "nothing"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def explain_no_config(folder: Path, text: str) -> Fault:
    """Return what a folder without config.json holds instead; `text` is how the recipe names it."""
    names = visible_names(folder)
    if files := [name for name in names if name.endswith(".gguf")]:
        message = f"{text} holds no config.json but {enumerate_names(names)}"
        return message, f"name the file: {text.rstrip('/')}/{files[0]}"
    if _ADAPTER_CONFIG in names:
        base = (read_settings(folder / _ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
        message = f"{text} is a LoRA adapter of {base or 'an unnamed model'}"
        return message, "name it as `model.adapter`, and its base as `model.path`"
    message = f"{text} holds no config.json but {enumerate_names(names)}"
    if any(map(_VERL_SHARD.fullmatch, names)):
        merge = (
            f"python -m verl.model_merger merge --backend fsdp --local_dir {text} --target_dir DIR"
        )
        return message, f"these are shards of FSDP by verl: merge them (`{merge}`), and name DIR"
    return message, "name the folder that holds config.json, the weights and the tokenizer"


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter rather than whole weights."""
    return (folder / _ADAPTER_CONFIG).is_file()


def read_dtype(model: Path) -> Any:
    """Return the precision that a model folder names; None if there is none."""
    config = read_object(model / "config.json")
    return config.get("dtype") or config.get("torch_dtype")


def read_adapter_base(adapter: Path) -> str | None:
    """Return the folder or hub id that an adapter was trained on; None if it does not say.

    Raises `RecipeError` if its settings cannot be read.
    """
    base = _read_adapter_config(adapter).get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def read_present_base(adapter: Path) -> str | None:
    """Return what `read_adapter_base` does; raises `UsageError` for a folder that is not on this machine."""
    base = read_adapter_base(adapter)
    if base is not None and base.startswith("/") and not Path(base).is_dir():
        raise UsageError(
            f"the adapter {adapter} was trained on {base}, which is not here",
            f"put that model there, or correct `base_model_name_or_path` in its {_ADAPTER_CONFIG}",
        )
    return base


def read_vllm_rank(adapter: Path) -> int:
    """Return the `max_lora_rank` that vLLM needs, or raise `RecipeError` or `UsageError`."""
    config = _read_adapter_config(adapter)
    feature = unsupported_feature(config)
    if feature is None and (file := adapter / "adapter_model.safetensors").is_file():
        # vLLM (0.31) passes over adapters on the vision part.
        names = read_tensors_header(file)[1]
        if any(word in name for name in names for word in ("vision", "visual")):
            feature = "an adapter on the vision part"
    if feature is not None:
        raise UsageError(
            f"vLLM cannot load the adapter {adapter} ({feature})",
            "export the run as safetensors (`grpo "
            "export`) and name that, or use transformers (`grpo eval --backend transformers`, `grpo chat`)",
        )
    rank = int(config.get("r") or 8)
    return fitting_rank(rank) or rank


def _read_adapter_config(adapter: Path) -> dict[str, Any]:
    settings = read_settings(adapter / _ADAPTER_CONFIG)
    if settings is None:
        message = f"{adapter / _ADAPTER_CONFIG} is damaged"
        raise RecipeError([Issue(message, "download the adapter again", "model.path")])
    return settings


def is_sharded(folder: Path) -> bool:
    """Return whether a checkpoint holds its weights only in shards, one a process."""
    if any(any(folder.glob(pattern)) for pattern in _WHOLE):
        return False
    return (folder / FSDP_SHARDS).is_dir() or (folder / _DEEPSPEED_TAG).is_file()


def refuse_sharded(folder: Path) -> None:
    """Refuse a checkpoint that must be merged before it can be loaded, with a `UsageError`."""
    if is_sharded(folder):
        step = folder.name.rpartition("-")[2]
        raise UsageError(
            f"{folder} holds its weights in shards, one a process",
            "make it whole first with "
            f"`grpo export {folder.parent.parent} --checkpoint {step} --to DIR`, and name DIR",
        )
