"""What the files of a model folder show without torch: whether they are whole, and what kind of weights they are.

Comparing the weights with config.json needs torch: that is `check_weights` in `models/loading.py`.
"""

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from grpo_cli.errors import RecipeError, UsageError
from grpo_cli.issues import Issue
from grpo_cli.models.vllm_engine import fitting_rank, unsupported_feature
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.runs.files import read_object, read_tensors_header

Fault = tuple[str, str]
"""What is wrong, and the fix."""
FSDP_SHARDS = "pytorch_model_fsdp_0"
"""Folder in which accelerate 1.15 writes FSDP's shards."""
_DEEPSPEED_TAG = "latest"
"""File in which DeepSpeed names the newest of its `global_stepN` folders."""
_WHOLE = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.safetensors")
_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CONFIGS = ("config.json", "tokenizer_config.json", "generation_config.json")
_TOKENIZER_FILE = re.compile(r"tokenizer|vocab|\.model$|tiktoken|tekken")
"""Matches the name of one file of every tokenizer."""
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_OTHER_FILES = {"subfolder", "use_safetensors", "variant"}
"""Options of `from_pretrained` that make it read other files."""
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
    """Return the problems of a folder's settings and code; its weights and vocabulary may not be there yet."""
    faults = [*_check_links(folder)] or [*_check_texts(folder, visible_names(folder))]
    config = read_settings(folder / "config.json")
    if config is not None:
        faults += _check_config(folder / "config.json", config, model)
    return _as_issues(faults)


def check_data(folder: Path, model: ModelConfig) -> list[Issue]:
    """Return the problems of a folder's tokenizer and weights that their names and first bytes show."""
    files = [folder / name for name in ("tokenizer.json", "tokenizer.model")]
    read = [file for file in files if file.is_file()][:1]
    faults = [*filter(None, map(find_fault, read))]
    config = read_settings(folder / "config.json") or {}
    if not model.init_kwargs.keys() & _OTHER_FILES and "transformers_weights" not in config:
        faults += _check_weights(folder)
    return _as_issues(faults)


def _as_issues(faults: Iterable[Fault]) -> list[Issue]:
    return [Issue(message, fix, "model.path") for message, fix in faults]


def _check_links(folder: Path) -> Iterator[Fault]:
    broken = [path for path in sorted(folder.iterdir()) if path.is_symlink() and not path.exists()]
    if broken:
        message = f"{broken[0]} is a link to {broken[0].readlink()}, which does not exist"
        more = f" ({len(broken)} such links)" if len(broken) > 1 else ""
        yield f"{message}{more}", "copy the files that links lead to: `cp -L`, or `rsync -L`"


def _check_texts(folder: Path, names: list[str]) -> Iterator[Fault]:
    for name in _CONFIGS:
        if name in names and read_settings(folder / name) is None:
            yield _explain_unreadable(folder / name)
    if not any(_TOKENIZER_FILE.search(name) for name in names):
        fix = "put tokenizer.json and tokenizer_config.json beside config.json"
        yield f"{folder} holds no tokenizer but {enumerate_names(names)}", fix


def _check_config(file: Path, config: dict[str, Any], model: ModelConfig) -> Iterator[Fault]:
    if not config.keys() & {"model_type", "auto_map"}:
        fix = 'add it, such as "model_type": "qwen2", or fetch the file anew'
        yield f"{file} has no `model_type`", fix
    listed = config.get("architectures")
    kind = str(listed[0]) if isinstance(listed, list) and listed else "model"
    if config.get("is_encoder_decoder") or kind.endswith(_OTHER_HEADS):
        kind = f"an encoder-decoder ({kind})" if config.get("is_encoder_decoder") else kind
        message = f"the model is {kind}, which cannot be trained with GRPO ({file})"
        yield message, "name a causal language model (`…ForCausalLM`)"
    yield from _check_token_ids(file, config, ("pad_token_id",), config.get("vocab_size"))
    generation = file.with_name("generation_config.json")
    ids = read_settings(generation) or {}
    keys = ("pad_token_id", "eos_token_id")
    yield from _check_token_ids(generation, ids, keys, config.get("vocab_size"))
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        yield from _check_quantized(file, quantization.get("quant_method"), model)
    auto_map = config.get("auto_map")
    if model.trust_remote_code and isinstance(auto_map, dict):
        classes = {name for name in auto_map.values() if isinstance(name, str)}
        yield from _check_code(file.parent, classes)


def _check_token_ids(
    file: Path, settings: dict[str, Any], keys: Iterable[str], words: Any
) -> Iterator[Fault]:
    """Find special tokens that a vocabulary of `words` tokens does not have."""
    for key in keys:
        value = settings.get(key)
        ids = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
        if ids and isinstance(words, int) and all(isinstance(n, int) and n >= words for n in ids):
            message = f"{file}: {key} is {value}, outside the vocabulary of {words} tokens"
            name = key.removesuffix("_id")
            yield message, f"set it to the id of the tokenizer's `{name}`, or to null"


def _check_quantized(file: Path, method: Any, model: ModelConfig) -> Iterator[Fault]:
    """Check whether a checkpoint that is quantized itself can be loaded and trained here."""
    if method in _QUANTIZERS and model.lora is None:
        fix = "name the unquantized model, or add `lora: {r: 16}` to `model`"
        yield f"weights quantized with {method} cannot be trained without `lora` ({file})", fix
    for package in _QUANTIZERS.get(method, ()):
        if importlib.util.find_spec(package) is None:
            message = (
                f"the weights are quantized with {method} ({file}), and {package} is not installed"
            )
            yield message, f"name the unquantized model, or pip install {package} (and use a GPU)"


def _check_code(folder: Path, classes: Iterable[str]) -> Iterator[Fault]:
    """Check that the code a model ships with is there; `repository--module.Class` is elsewhere."""
    for name in sorted({each.split(".")[0] for each in classes if "--" not in each}):
        if not (folder / f"{name}.py").is_file():
            message = f"{folder / name}.py is missing, which `auto_map` in config.json names"
            yield message, "copy it beside config.json, or fetch the model anew"


def _check_weights(folder: Path) -> Iterator[Fault]:
    """Check the files that `from_pretrained` would read."""
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            shards = [name]
        elif index.is_file():
            weight_map = (read_settings(index) or {}).get("weight_map")
            if not isinstance(weight_map, dict):
                yield _explain_unreadable(index)
                return
            shards = sorted({str(shard) for shard in weight_map.values()})
        else:
            continue
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            message = f"{len(missing)} of {len(shards)} files that {index} names are missing"
            yield f"{message}: {enumerate_names(missing, 3)}", "fetch them"
        present = (folder / each for each in shards if each not in missing)
        yield from filter(None, map(find_fault, present))
        return
    yield _explain_no_weights(folder)


def _explain_no_weights(folder: Path) -> Fault:
    message = f"{folder} holds no weights but {enumerate_names(visible_names(folder))}"
    if (folder / FSDP_SHARDS).is_dir():
        fix = f"merge the shards of FSDP: accelerate merge-weights {folder / FSDP_SHARDS} {folder}"
    elif (folder / _DEEPSPEED_TAG).is_file():
        fix = "merge the shards of DeepSpeed: python zero_to_fp32.py --safe_serialization . ."
        fix += f" in {folder}"
    else:
        fix = "put the weights (*.safetensors) beside config.json"
    return message, fix


def find_fault(file: Path) -> Fault | None:
    """Return what is wrong with a file, judged by its first bytes, its size and its JSON."""
    with file.open("rb") as opened:
        head = opened.read(512)
    if not head:
        return f"{file} is empty", "fetch it anew"
    if head.startswith(b"version https://git-lfs"):
        fix = f"cd {file.parent} && git lfs pull"
        return f"{file} is a Git LFS pointer, not the file itself", fix
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        fix = "fetch it anew; a gated or private model needs `hf auth login`"
        return f"{file} is an HTML page, not the file itself", fix
    if file.suffix == ".json" and read_settings(file) is None:
        return _explain_unreadable(file)
    return _find_torn(file) if file.suffix == ".safetensors" else None


def _find_torn(file: Path) -> Fault | None:
    """Compare a safetensors file's size with its header."""
    size = file.stat().st_size
    try:
        expected = read_tensors_header(file)[0]
    except ValueError:
        return f"{file} has no safetensors header", "the file is damaged: fetch it anew"
    if size < expected:
        return f"{file} is cut short: {size:,} of {expected:,} bytes", "fetch it anew"
    return None


def _explain_unreadable(file: Path) -> Fault:
    """Return why a file holds no JSON object."""
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        return (
            f"{file} is not UTF-8 text (byte {error.start})",
            "save it as UTF-8, or fetch it anew",
        )
    except json.JSONDecodeError as error:
        message = f"{file}:{error.lineno}:{error.colno}: not JSON: {error.msg}"
        return message, "correct that line (JSON has no comments), or fetch the file anew"
    return f"{file} cannot be read as a JSON object", "it should hold {…}"


def read_settings(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object; None if it does not hold one."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
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
        local = isinstance(base, str) and base.startswith(("/", ".", "~"))
        gone = f", which is not on this machine (see {folder / _ADAPTER_CONFIG})"
        where = gone if local and not Path(str(base)).exists() else ""
        message = f"{text} is a LoRA adapter of {base or 'an unnamed model'}{where}"
        return message, "name it as `model.adapter`, and its base as `model.path`"
    if _ADAPTER_WEIGHTS in names:
        message = f"{text} holds an adapter's weights without {_ADAPTER_CONFIG}"
        fix = f"copy {_ADAPTER_CONFIG} from where it was trained, then merge it into its base"
        return message, fix
    message = f"{text} holds no config.json but {enumerate_names(names)}"
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

    Raises:
        RecipeError: Its settings cannot be read.
    """
    base = _read_adapter_config(adapter).get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def read_present_base(adapter: Path) -> str | None:
    """Return what `read_adapter_base` does; refuse a folder that is not on this machine.

    Raises:
        UsageError: There is no such folder.
        RecipeError: Its settings cannot be read.
    """
    base = read_adapter_base(adapter)
    if base is not None and base.startswith("/") and not Path(base).is_dir():
        raise UsageError(
            f"the adapter {adapter} was trained on {base}, which is not here. Fix: put that model there, or "
            f"correct `base_model_name_or_path` in its {_ADAPTER_CONFIG}"
        )
    return base


def read_vllm_rank(adapter: Path) -> int:
    """Return the `max_lora_rank` that vLLM needs.

    Raises:
        RecipeError: The adapter's settings cannot be read.
        UsageError: vLLM does not take an adapter of this kind.
    """
    config = _read_adapter_config(adapter)
    if (feature := unsupported_feature(config)) is not None:
        raise UsageError(
            f"vLLM cannot load the adapter {adapter} ({feature}). Fix: export the run as safetensors (`grpo "
            "export`) and name that, or use transformers (`grpo eval --backend transformers`, `grpo chat`)"
        )
    rank = int(config.get("r") or 8)
    return fitting_rank(rank) or rank


def _read_adapter_config(adapter: Path) -> dict[str, Any]:
    settings = read_settings(adapter / _ADAPTER_CONFIG)
    if settings is None:
        message = f"{adapter / _ADAPTER_CONFIG} is damaged"
        raise RecipeError([Issue(message, "fetch the adapter anew", "model.path")])
    return settings


def is_sharded(folder: Path) -> bool:
    """Return whether a checkpoint holds its weights only in shards, one a process."""
    if any(any(folder.glob(pattern)) for pattern in _WHOLE):
        return False
    return (folder / FSDP_SHARDS).is_dir() or (folder / _DEEPSPEED_TAG).is_file()


def refuse_sharded(folder: Path) -> None:
    """Refuse a checkpoint that must be merged before it can be loaded.

    Raises:
        UsageError: It holds its weights only in shards.
    """
    if is_sharded(folder):
        step = folder.name.rpartition("-")[2]
        raise UsageError(
            f"{folder} holds its weights in shards, one a process. Fix: make it whole first with "
            f"`grpo export {folder.parent.parent} --checkpoint {step} --to DIR`, and name DIR"
        )
