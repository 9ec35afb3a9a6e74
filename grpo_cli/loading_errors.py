"""What transformers says (5.17) of a model that cannot be had, as a sentence that tells how to mend it.

Owns the words both models and reward models can meet. The fixes only one of them can meet are
given by the room that loads it; nothing is loaded here.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from grpo_cli.errors import SetupError

Fixes = Sequence[tuple[str, str]]
"""(words of the message, in any case; how to mend it); `{path}` stands for what was to be loaded."""

_UNREACHABLE = ("couldn't connect", "connection error", "offline mode")
_TOKENIZER_FIX = "put tokenizer.json and tokenizer_config.json beside config.json"
_FIXES: Fixes = (
    ("gated repo", "ask for access at https://huggingface.co/{path}, then `hf auth login`"),
    ("not a valid model identifier", "check the name; for a private model, `hf auth login`"),
    ("not a valid git identifier", "check `{section}revision`"),
    ("no file named", "put the weights (*.safetensors) beside config.json"),
    ("backend tokenizer", _TOKENIZER_FIX),
    ("custom code", "read the code that ships with it, then set `trust_remote_code: true`"),
    ("mismatched sizes", "give config.json the sizes of the weights, or fetch both anew"),
    ("does not recognize this architecture", "pip install --upgrade transformers"),
)


@contextmanager
def explain_loading(
    path: str, *, section: str, offline_fix: str, more_fixes: Fixes
) -> Iterator[None]:
    """Turns what transformers raises for a model that cannot be had into a `SetupError`.

    An error it does not know is passed on as it is, so that no bug hides behind a sentence.

    Args:
        path: What is loaded, as the recipe names it.
        section: What stands before `path` and `revision` in a message: `model.`, or nothing.
        offline_fix: How to mend it where the hub cannot be reached; may hold `{path}`.
        more_fixes: Looked through after those that all models share; the first match holds.

    Raises:
        SetupError: In the place of the error that it explains.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        fix = "the weights are torn: fetch them anew"
        raise SetupError(f"{path} cannot be loaded: {error}. Fix: {fix}") from error
    except json.JSONDecodeError as error:
        fix = "one of its files is damaged: fetch them anew"
        raise SetupError(f"{path} cannot be loaded: {error}. Fix: {fix}") from error
    except UnicodeDecodeError as error:
        fix = "one of its files is not UTF-8: save it as UTF-8, or fetch it anew"
        raise SetupError(f"{path} cannot be loaded: {error}. Fix: {fix}") from error
    except (OSError, ValueError, ImportError, TypeError, RuntimeError) as error:
        text = " ".join(str(error).split())
        offline = [(words, offline_fix) for words in _UNREACHABLE]
        last_resort = "check `{section}path`" if isinstance(error, OSError) else None
        found = _find_fix(text, [*offline, *_FIXES, *more_fixes]) or last_resort
        if found is None:
            raise
        sentence, fix = text.split(". ")[0].rstrip("."), found.format(path=path, section=section)
        raise SetupError(f"{path} cannot be loaded: {sentence}. Fix: {fix}") from error


def _find_fix(text: str, fixes: Fixes) -> str | None:
    return next((fix for words, fix in fixes if words.lower() in text.lower()), None)


def check_tokenizer(tokenizer: Any, path: str) -> None:
    """Refuse the empty tokenizer that transformers makes up (5.17) if a folder has none.

    Raises:
        SetupError: It turns a text into no tokens, or into unknown ones.
    """
    ids = tokenizer("What is 1 + 1?", add_special_tokens=False)["input_ids"]
    if not set(ids) - {tokenizer.unk_token_id}:
        raise SetupError(f"{path} has no vocabulary for its tokenizer. Fix: {_TOKENIZER_FIX}")
