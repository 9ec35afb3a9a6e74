"""Checks the files of a model folder without torch: they exist, are whole, and hold a causal language model.

Does not compare the weights with config.json: that is `check_weights` in `models/loading.py`.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from grpo_cli.errors import Problem
from grpo_cli.recipe.model import ModelConfig

Fault = tuple[str, str]
"""What is wrong, and the fix."""
_TOKENIZER_FILE = re.compile(r"tokenizer|vocab|\.model$|tiktoken|tekken")
"""What the name of one file of every tokenizer holds."""
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_FOUND_OTHERWISE = {"subfolder", "use_safetensors", "variant"}
"""Options of `from_pretrained` by which it reads other files."""
_OTHER_HEADS = (
    "ForMaskedLM",
    "ForQuestionAnswering",
    "ForSequenceClassification",
    "ForTokenClassification",
)
_FROZEN = {"awq", "bitsandbytes", "gptq"}
"""Quantized formats that Trainer refuses to train without adapters."""


def check_folder(folder: Path, model: ModelConfig) -> list[Problem]:
    """Return the problems of a folder's settings and code; its weights and vocabulary may be elsewhere yet."""
    faults = [*_check_texts(folder, visible_names(folder))]
    config = read_settings(folder / "config.json")
    if config is not None:
        faults += _check_config(folder, config, model)
    return _as_problems(faults)


def check_data(folder: Path, model: ModelConfig) -> list[Problem]:
    """Return the problems of a folder's tokenizer and weights that their names and first bytes show."""
    read = (folder / name for name in ("tokenizer.json", "tokenizer.model"))
    faults = [find_fault(file) for file in read if file.is_file()][:1]
    config = read_settings(folder / "config.json") or {}
    if not model.init_kwargs.keys() & _FOUND_OTHERWISE and "transformers_weights" not in config:
        faults += _check_weights(folder)
    return _as_problems(filter(None, faults))


def _as_problems(faults: Iterable[Fault]) -> list[Problem]:
    return [Problem(message, fix, "model.path") for message, fix in faults]


def _check_texts(folder: Path, names: list[str]) -> Iterator[Fault]:
    for name in ("config.json", "tokenizer_config.json"):
        if name in names and read_settings(folder / name) is None:
            yield _unreadable(folder / name)
    if not any(_TOKENIZER_FILE.search(name) for name in names):
        fix = "put tokenizer.json and tokenizer_config.json beside config.json"
        yield f"{folder} holds no tokenizer but {enumerate_names(names)}", fix
    try:
        if "chat_template.jinja" in names:
            (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except UnicodeDecodeError:
        file = folder / "chat_template.jinja"
        yield f"{file} is not UTF-8 text", "save it as UTF-8, or fetch it anew"


def _check_config(folder: Path, config: dict[str, Any], model: ModelConfig) -> Iterator[Fault]:
    file = folder / "config.json"
    if not config.keys() & {"model_type", "auto_map"}:
        fix = 'add it, such as "model_type": "qwen2", or fetch the file anew'
        yield f"{file} has no `model_type`", fix
    listed = config.get("architectures")
    kind = str(listed[0]) if isinstance(listed, list) and listed else "model"
    if config.get("is_encoder_decoder") or kind.endswith(_OTHER_HEADS):
        kind = f"an encoder-decoder ({kind})" if config.get("is_encoder_decoder") else kind
        message = f"the model is {kind}, which cannot be trained with GRPO ({file})"
        yield message, "name a causal language model (`…ForCausalLM`)"
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method in _FROZEN and model.lora is None:
        fix = "name the unquantized model, or add `lora: {r: 16}` to `model`"
        yield f"weights quantized with {method} cannot be trained without `lora` ({file})", fix
    auto_map = config.get("auto_map")
    if model.trust_remote_code and isinstance(auto_map, dict):
        yield from _check_code(
            folder, {name for name in auto_map.values() if isinstance(name, str)}
        )


def _check_code(folder: Path, classes: set[str]) -> Iterator[Fault]:
    """Check the Python files of a model that ships its own code; `repository--module.Class` is elsewhere."""
    for name in sorted({each.split(".")[0] for each in classes if "--" not in each}):
        file = folder / f"{name}.py"
        try:
            ast.parse(file.read_bytes(), str(file))
        except FileNotFoundError:
            message = f"{file} is missing, which `auto_map` in config.json names"
            yield message, "copy it beside config.json, or fetch the model anew"
        except SyntaxError as error:
            message = f"{file}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
            yield message, "correct it, or fetch it anew"


def _check_weights(folder: Path) -> Iterator[Fault]:
    """Check the files that `from_pretrained` would read."""
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            shards = [name]
        elif index.is_file():
            weight_map = (read_settings(index) or {}).get("weight_map")
            if not isinstance(weight_map, dict):
                yield _unreadable(index)
                return
            shards = sorted({str(shard) for shard in weight_map.values()})
        else:
            continue
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            message = f"{len(missing)} of {len(shards)} files that {index} names are missing"
            yield f"{message}: {enumerate_names(missing, 3)}", "fetch them"
        yield from filter(
            None, (find_fault(folder / each) for each in shards if each not in missing)
        )
        return
    message = f"{folder} holds no weights but {enumerate_names(visible_names(folder))}"
    yield message, "put the weights (*.safetensors) beside config.json"


def find_fault(file: Path) -> Fault | None:
    """Return what a file holds in place of its data, as far as its first bytes show."""
    with file.open("rb") as opened:
        head = opened.read(512)
    if not head:
        return f"{file} is empty", "fetch it anew"
    if head.startswith(b"version https://git-lfs"):
        return (
            f"{file} is a Git LFS pointer, not the file itself",
            f"cd {file.parent} && git lfs pull",
        )
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        fix = "fetch it anew; a gated or private model needs `hf auth login`"
        return f"{file} is an HTML page, not the file itself", fix
    return _find_torn(file) if file.suffix == ".safetensors" else None


def _find_torn(file: Path) -> Fault | None:
    """Compare a safetensors file's size with its header.

    Source: safetensors' README: 8 bytes with the length of the header, the header as JSON, the data.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        text = opened.read(length) if length < size else b""
    try:
        tensors = [value for name, value in json.loads(text).items() if name != "__metadata__"]
        expected = 8 + length + max((each["data_offsets"][1] for each in tensors), default=0)
    except (AttributeError, LookupError, TypeError, ValueError):
        return f"{file} has no safetensors header", "the file is damaged: fetch it anew"
    if size < expected:
        return f"{file} is cut short: {size:,} of {expected:,} bytes", "fetch it anew"
    return None


def _unreadable(file: Path) -> Fault:
    return (
        f"{file} cannot be read as a JSON object",
        f"fetch {file.name} anew; it should hold {{…}}",
    )


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
