"""Turns the errors by which transformers (5.17) refuses a model into messages with a fix."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from grpo_cli.errors import SetupError, pip

Fixes = Sequence[tuple[str, str, str]]
"""(words of the message, in any case; the fix; the key of the recipe's section); `{path}` stands for
what was to be loaded."""

_UNREACHABLE = ("couldn't connect", "connection error", "offline mode")
_TRUST = "trust_remote_code"
_TOKENIZER_FIX = "put tokenizer.json and tokenizer_config.json beside config.json"
_FIXES: Fixes = (
    ("gated repo", "ask for access at https://huggingface.co/{path}, then `hf auth login`", "path"),
    (
        "not a valid model identifier",
        "check the name; for a private model, `hf auth login`",
        "path",
    ),
    ("not a valid git identifier", "check `{section}revision`", "revision"),
    ("no file named", "put the weights (*.safetensors) beside config.json", "path"),
    ("backend tokenizer", _TOKENIZER_FIX, "path"),
    ("to read a `tiktoken` file", _TOKENIZER_FIX, "path"),
    ("custom code", "read the code that ships with it, then set `trust_remote_code: true`", _TRUST),
    ("does not recognize this architecture", pip("install --upgrade transformers"), "path"),
)


@contextmanager
def explain_loading(
    path: str, *, section: str, offline_fix: str, more_fixes: Fixes
) -> Iterator[None]:
    """Turn what transformers raises for a model that cannot be loaded into a `SetupError`.

    An error it does not know is passed on as it is, so that no bug hides behind a sentence. `section` is what
    stands before `path` and `revision` in a message; `more_fixes` come after those that all models share.
    """
    from safetensors import SafetensorError

    refusals = (OSError, ValueError, ImportError, TypeError, RuntimeError)
    fixes = (
        (SafetensorError, "the weights are torn: download them again"),
        (json.JSONDecodeError, "one of its files is damaged: download them again"),
        (
            UnicodeDecodeError,
            "one of its files is not UTF-8: save it as UTF-8, or download it again",
        ),
        (StrictDataclassError, "correct that value in its config.json, or download the file again"),
    )
    try:
        yield
    except (*refusals, SafetensorError, StrictDataclassError) as error:
        text = " ".join(str(error).split())
        offline = [(words, offline_fix, "path") for words in _UNREACHABLE]
        by_words = (
            (fix, key)
            for words, fix, key in (*offline, *_FIXES, *more_fixes)
            if words.lower() in text.lower()
        )
        by_type = ((fix, "path") for kind, fix in fixes if isinstance(error, kind))
        found = next(by_type, None) or next(by_words, None)
        if found is None and isinstance(error, OSError):
            found = "check `{section}path`", "path"
        if found is None:
            raise
        if isinstance(error, StrictDataclassError):
            text = str(error.__cause__ or error)
        sentence, fix = text.split(". ")[0].rstrip("."), found[0].format(path=path, section=section)
        raise SetupError(f"{path} cannot be loaded: {sentence}", fix, section + found[1]) from error


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Suppress the progress bars and warnings of transformers."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def check_tokenizer(tokenizer: Any, path: str, *, section: str) -> None:
    """Raise `SetupError` for the empty tokenizer that transformers makes up (5.17) if a folder has none."""
    ids = tokenizer("What is 1 + 1?", add_special_tokens=False)["input_ids"]
    if not set(ids) - {tokenizer.unk_token_id}:
        message = f"{path} has no vocabulary for its tokenizer"
        raise SetupError(message, _TOKENIZER_FIX, f"{section}path")
