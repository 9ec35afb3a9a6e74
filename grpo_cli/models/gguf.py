"""GGUF files as plain folders, which `from_pretrained` and vLLM load.

transformers refuses to save a model that it has read from GGUF, so the file is dequantized once into the cache.
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_cli.errors import SetupError, install_extra
from grpo_cli.machine import cache_folder
from grpo_cli.upstream.transformers import quiet_loading

_FORMAT_VERSION = 2
"""Part of the cache key; raise it when the folders written here change."""
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")
_STRAY_TOKENIZER_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
"""Ids that the GGUF reader leaves among a tokenizer's settings, where they would go stale."""


class _SpecialTokens(NamedTuple):
    """Token ids as the metadata of a GGUF file declares them."""

    bos: int | None
    eos: tuple[int, ...]
    """The end-of-sequence token first, then the end-of-turn token if it is another."""
    pad: int | None
    unknown: int | None
    kind: str | None
    """llama.cpp's name of the vocabulary: `gpt2` is BPE over bytes, `llama` is sentencepiece."""
    pre_tokenizer: str | None
    """llama.cpp's name of the rule that splits text before the merges."""


def materialize_gguf(
    path: Path, cache: Path | None = None, convert: Callable[[Path, Path], None] | None = None
) -> Path:
    """Convert a GGUF file into a folder of float32 safetensors in the cache, once for each content.

    Safe with several processes at once: each builds in its own folder and renames it.

    Raises `SetupError` if the `gguf` package is missing, the file cannot be read, or the cache not written.
    """
    root = cache or cache_folder() / "models"
    name = re.sub(r"[^\w.-]+", "-", path.stem)
    content = _hash_once(path, path.stat().st_size, path.stat().st_mtime_ns)
    digest = hashlib.sha256(f"{_FORMAT_VERSION}:{content}".encode()).hexdigest()
    folder = root / f"{name}-{digest[:16]}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
    except OSError as error:
        fix = "set GRPO_CACHE to a folder that can be written"
        raise SetupError(f"cannot write to {root}: {error}", fix) from error
    try:
        (convert or convert_gguf)(path, building)
        for file in building.iterdir():
            file.chmod(0o644)
        building.chmod(0o755)
        building.rename(folder)
    except OSError:
        # Another process may have been first.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


@functools.cache
def _hash_once(path: Path, size: int, modified_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert_gguf(path: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and generation settings of a GGUF file into `folder`."""
    try:
        with quiet_loading(), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            special = _read_special_tokens(path)
            where: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
            config = AutoConfig.from_pretrained(path.parent, **where)
            where["config"] = config
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
            loaded = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
            length = config.get_text_config().max_position_embeddings
            _correct_tokenizer(tokenizer, special, length)
            _rebuild(loaded, tokenizer, special).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except ImportError as error:
        message = "reading a GGUF file needs the `gguf` package"
        raise SetupError(message, install_extra("gguf")) from error
    except (ValueError, KeyError, IndexError) as error:
        why = str(error).rstrip(".")
        fix = "download the file again (it may be cut short), or use the model's safetensors"
        if "not supported" in why:
            fix = "name a folder with the model's safetensors; transformers cannot read this GGUF"
        raise SetupError(f"{path} cannot be converted: {why}", fix, "model.path") from error


def _rebuild(loaded: Any, tokenizer: Any, special: _SpecialTokens) -> Any:
    """Return the same model without the marks of quantization that keep it from being saved."""
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(loaded.config).from_dict(settings)
    ids = {"bos_token_id": special.bos, "pad_token_id": tokenizer.pad_token_id}
    config.update({**ids, "eos_token_id": tokenizer.eos_token_id})
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    # The file's own end tokens, and those that transformers knows.
    known = loaded.config.eos_token_id
    ends = [*special.eos, *(known if isinstance(known, list) else [known])]
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    plain.generation_config = GenerationConfig(**ids, eos_token_id=eos if eos[1:] else eos[0])
    return plain


def _read_special_tokens(path: Path) -> _SpecialTokens:
    """Read the special tokens' ids.

    Source: ggml's `docs/gguf.md`, section "Special tokens".
    """
    from gguf import GGUFReader

    fields = GGUFReader(path).fields

    def read(key: str) -> Any:
        field = fields.get(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    eos = dict.fromkeys((read("eos_token_id"), read("eot_token_id")))
    return _SpecialTokens(
        bos=read("bos_token_id"),
        eos=tuple(token for token in eos if token is not None),
        pad=read("padding_token_id"),
        unknown=read("unknown_token_id"),
        kind=read("model"),
        pre_tokenizer=read("pre"),
    )


def _correct_tokenizer(tokenizer: Any, special: _SpecialTokens, context_length: int) -> None:
    """Give the tokenizer the file's own special tokens.

    `GGUFLlamaConverter` (transformers 5.17) passes the bos token as `eos_token`: completions would never end.
    """
    if not special.eos:
        raise ValueError("its metadata names no end-of-sequence token")
    for key in _STRAY_TOKENIZER_KEYS:
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(special.eos[0])
    vocabulary = tokenizer.get_vocab()
    # One that does not end an answer, if the vocabulary has an obvious one.
    pads = [special.pad, *map(vocabulary.get, _PAD_NAMES), special.unknown]
    usable = (token for token in pads if token is not None and token not in special.eos)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(next(usable, special.eos[0]))
    if special.bos is not None:
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(special.bos)
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = context_length
    backend = tokenizer.backend_tokenizer
    if special.kind == "gpt2":
        # transformers 5.17 gives every llama sentencepiece's decoder, which decodes `▁` as a space.
        backend.model.byte_fallback = False
        backend.model.fuse_unk = False
        backend.decoder = decoders.ByteLevel()
    if special.pre_tokenizer == "smollm":
        # The reader leaves this out. Source: llama.cpp's `LLAMA_VOCAB_PRE_TYPE_SMOLLM`.
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
