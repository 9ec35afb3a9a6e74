"""A GGUF file as a plain model folder, converted once and kept in the cache.

Trainers, vLLM and `save_pretrained` need plain weights: transformers refuses to save a model that
it has read from GGUF. So the file is dequantized into a folder of its own, with the special tokens
that the file itself declares. Does not decide what to load: that is `models/source.py`.
"""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from grpo_cli.errors import SetupError, install_extra

_FORMAT_VERSION = 2
"""Part of the cache key; raise it when the folders written here change."""
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")
_STRAY_TOKENIZER_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
"""Ids that the GGUF reader leaves among a tokenizer's settings, where they would go stale."""


@dataclass(frozen=True)
class _SpecialTokens:
    """Token ids as the metadata of a GGUF file declares them."""

    bos: int | None
    eos: tuple[int, ...]
    """The end-of-sequence token first, then the end-of-turn token where it is another."""
    pad: int | None
    unknown: int | None
    kind: str | None
    """llama.cpp's name of the vocabulary: `gpt2` is BPE over bytes, `llama` is sentencepiece."""
    pre_tokenizer: str | None
    """llama.cpp's name of the rule that splits text before the merges."""


def materialize_gguf(path: Path, cache: Path | None = None) -> Path:
    """Converts a GGUF file into a folder of plain float32 safetensors, once for each content.

    Safe with several processes at once: each builds in a folder of its own and renames it; whoever
    comes second takes what is there. float32 loses nothing of any GGUF type.

    Args:
        path: The GGUF file.
        cache: Folder of the converted models; by default `models/` in `cache_folder()`.

    Returns:
        A folder that `from_pretrained` and vLLM load.

    Raises:
        SetupError: The `gguf` package is missing, the file cannot be read, or the cache not written.
    """
    root = cache or cache_folder() / "models"
    name = re.sub(r"[^\w.-]+", "-", path.stem)
    folder = root / f"{name}-{_hash_content(path)[:16]}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
    except OSError as error:
        fix = "set GRPO_CACHE to a folder that can be written"
        raise SetupError(f"cannot write to {root}: {error}. Fix: {fix}") from error
    try:
        _convert(path, building)
        _publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    """Where things that can be made again are kept: `$GRPO_CACHE`, or `grpo` in the user's cache."""
    if own := os.environ.get("GRPO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo"


def _hash_content(path: Path) -> str:
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(f"{_FORMAT_VERSION}:{content}".encode()).hexdigest()


def _publish(building: Path, folder: Path) -> None:
    """Puts a finished folder in its place, readable by all, unless another process was first."""
    for file in building.iterdir():
        file.chmod(0o644)
    building.chmod(0o755)
    try:
        building.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _convert(path: Path, folder: Path) -> None:
    """Writes config, weights, tokenizer and generation settings of a GGUF file into `folder`."""
    try:
        with _silence():
            _convert_loudly(path, folder)
    except ImportError as error:
        message = "reading a GGUF file needs the `gguf` package"
        raise SetupError(f"{message}. Fix: {install_extra('gguf')}") from error
    except (ValueError, KeyError, IndexError) as error:
        why = str(error).rstrip(".")
        fix = "fetch the file anew (it may be cut short), or use the model's safetensors"
        message = f"{path} cannot be converted: {why}. Fix: {fix}"
        raise SetupError(message, "model.path") from error


def _convert_loudly(path: Path, folder: Path) -> None:
    special = _read_special_tokens(path)
    where: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(path.parent, **where)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, config=config, **where)
    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent, config=config, dtype=torch.float32, **where
    )
    _mend_tokenizer(tokenizer, special, config.get_text_config().max_position_embeddings)
    plain = _rebuild(loaded, tokenizer, special)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _rebuild(loaded: Any, tokenizer: Any, special: _SpecialTokens) -> Any:
    """The same model without the marks of quantization that keep it from being saved."""
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(loaded.config).from_dict(settings)
    ids = {"bos_token_id": special.bos, "pad_token_id": tokenizer.pad_token_id}
    config.update({**ids, "eos_token_id": tokenizer.eos_token_id})
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    eos = _all_eos_ids(special, loaded.config.eos_token_id)
    plain.generation_config = GenerationConfig(**ids, eos_token_id=eos if eos[1:] else eos[0])
    return plain


def _all_eos_ids(special: _SpecialTokens, from_config: int | list[int] | None) -> list[int]:
    """Every token that ends an answer: the file's own, and those transformers knows besides."""
    known = from_config if isinstance(from_config, list) else [from_config]
    return list(dict.fromkeys(token for token in (*special.eos, *known) if token is not None))


def _read_special_tokens(path: Path) -> _SpecialTokens:
    """Reads the special tokens' ids from a GGUF file.

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


def _mend_tokenizer(tokenizer: Any, special: _SpecialTokens, context_length: int) -> None:
    """Gives the tokenizer the file's own special tokens.

    Transformers 5.17 swaps them: `GGUFLlamaConverter` passes the beginning-of-sequence token as
    `eos_token`, so that a trainer would wait for an end that never comes.
    """
    if not special.eos:
        raise ValueError("its metadata names no end-of-sequence token")
    for key in _STRAY_TOKENIZER_KEYS:
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(special.eos[0])
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(_choose_pad(tokenizer, special))
    if special.bos is not None:
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(special.bos)
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = context_length
    if special.kind == "gpt2":
        _decode_bytes(tokenizer)
    if special.pre_tokenizer == "smollm":
        _split_digits(tokenizer)


def _decode_bytes(tokenizer: Any) -> None:
    """Takes away what is sentencepiece's: the reader of transformers 5.17 gives it to every llama.

    With it `▁` would be decoded as a space, and llama.cpp's converter would take the vocabulary for
    sentencepiece's.
    """
    backend = tokenizer.backend_tokenizer
    backend.model.byte_fallback = False
    backend.model.fuse_unk = False
    backend.decoder = decoders.ByteLevel()


def _split_digits(tokenizer: Any) -> None:
    """Splits digits off before anything else, which the reader of transformers leaves out.

    Source: llama.cpp's `LLAMA_VOCAB_PRE_TYPE_SMOLLM`.
    """
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def _choose_pad(tokenizer: Any, special: _SpecialTokens) -> int:
    """The padding token: one that does not end an answer, where the vocabulary has an obvious one."""
    vocabulary = tokenizer.get_vocab()
    named = [vocabulary.get(name) for name in _PAD_NAMES]
    candidates = [special.pad, *named, special.unknown]
    usable = (token for token in candidates if token is not None and token not in special.eos)
    return next(usable, special.eos[0])


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps transformers' progress bars and warnings off the terminal."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            yield
    finally:
        logging.set_verbosity(verbosity)
