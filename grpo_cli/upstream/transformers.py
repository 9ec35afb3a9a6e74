"""Internal names of transformers, and its errors as messages with a fix. Does not import it."""

import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from grpo_cli.errors import SetupError, pip
from grpo_cli.upstream import replaced

VERSION = "5.24.0"

EAGER = "eager_attention_forward"
"""Name of the attention function of `eager` in the files of models."""
_IMAGE_TEXT = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
"""Name of the table of `AutoModelForImageTextToText`."""
_NEWEST = 256
"""Tokens of a request that may be part of a stop string."""
_TRAINER = "transformers.trainer.Trainer"
_CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the cache in `forward` and `generate()`: of newer versions (5.24) and of older ones (5.17)."""
_TEMPLATES = "transformers.utils.chat_template_utils"
_SANDBOX = "ImmutableSandboxedEnvironment"
"""Jinja's environment, by the name under which the file of chat templates imports it."""
_BATCHING = "transformers.generation.continuous_batching"

METHODS = {
    f"{_TRAINER}._determine_best_metric": "metrics, trial",
    f"{_TRAINER}._load_from_checkpoint": "resume_from_checkpoint, model",
    f"{_BATCHING}.requests.RequestState.update_and_check_completion": "token_id, logprob",
}
ATTRIBUTES = {_TRAINER: "_tr_loss _total_loss_scalar _globalstep_last_logged _initial_global_step"}
"""The sums of the record in progress, which checkpoints keep."""
NAMES = {
    "transformers.integrations.integration_utils": "INTEGRATION_TO_CALLBACK",
    "transformers.integrations.deepspeed": "_hf_deepspeed_config_weak_ref",
    "transformers.configuration_utils": "_attn_implementation",
    "transformers.trainer_utils": "rotate_checkpoints",
    "transformers.models.auto.modeling_auto": _IMAGE_TEXT,
    _TEMPLATES: _SANDBOX,
    "transformers.models.llama.modeling_llama": EAGER,
    f"{_BATCHING}.continuous_api": "RequestState",
    f"{_BATCHING}.requests": "RequestState RequestStatus",
}
LITERALS: dict[str, tuple[str, ...]] = {
    "transformers.trainer": ("loss", "grad_norm", "learning_rate"),
}


@cache
def read_image_text_types() -> frozenset[str]:
    """Return the `model_type`s that `AutoModelForImageTextToText` loads, read from its source."""
    spec = importlib.util.find_spec("transformers")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        return frozenset()
    text = Path(folders[0], "models", "auto", "modeling_auto.py").read_text(encoding="utf-8")
    table = text.partition(f"\n{_IMAGE_TEXT} = ")[2].partition("\n)")[0]
    return frozenset(re.findall(r'^ +\("([\w-]+)", "', table, re.MULTILINE))


def replace_sandbox(environment: type) -> None:
    """Compile chat templates in a subclass of Jinja's sandbox from now on; without the name, change nothing."""
    templates = importlib.import_module(_TEMPLATES)
    if hasattr(templates, _SANDBOX):
        setattr(templates, _SANDBOX, environment)


@contextmanager
def requests_ending(is_end: Callable[[list[int]], bool]) -> Iterator[None]:
    """End requests of continuous batching, which knows end tokens alone, as soon as `is_end` of their tokens."""
    from transformers.generation.continuous_batching import continuous_api, requests

    class EndingRequest(requests.RequestState):
        def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
            ends = bool(super().update_and_check_completion(token_id, logprob))
            request: Any = self
            if ends or request.status != requests.RequestStatus.DECODING:
                return ends
            newest = [*self.initial_tokens[-_NEWEST:], *self.generated_tokens[-_NEWEST:]]
            if ends := is_end(newest):
                request.status = requests.RequestStatus.FINISHED
            return ends

    # Requests that are restarted if memory runs out are made in their own file.
    with (
        replaced(continuous_api, RequestState=EndingRequest),
        replaced(requests, RequestState=EndingRequest),
    ):
        yield


def attention_name(model: Any) -> str:
    """Return the name of the attention implementation that a model uses."""
    return str(model.config._attn_implementation)


def cache_argument(model: Any) -> str | None:
    """Return the name under which a model takes its cache; None if it takes none by a known name."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), None)


def eager_namespaces(model: Any) -> list[dict[str, Any]]:
    """Return the namespaces of the files of a model that define, or import, the attention function of `eager`.

    Raises:
        NotImplementedError: There is none.
    """
    # Wrappers such as FSDP's are classes of other files, on top of the model's.
    classes = {base for module in model.modules() for base in type(module).__mro__}
    files = {each.__module__ for each in classes} & sys.modules.keys()
    namespaces = [names for file in files if EAGER in (names := vars(sys.modules[file]))]
    if not namespaces:
        raise NotImplementedError("its attention cannot be replaced")
    return namespaces


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
    ("does not recognize this architecture", "{upgrade}", "path"),
)


@contextmanager
def explain_loading(
    path: str, *, section: str, offline_fix: str, more_fixes: Fixes
) -> Iterator[None]:
    """Turn what transformers raises for a model that cannot be loaded into a `SetupError`.

    An error it does not know is passed on as it is, so that no bug hides behind a sentence. `section` is what
    stands before `path` and `revision` in a message; `more_fixes` come after those that all models share.
    """
    from huggingface_hub.errors import StrictDataclassError
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
        upgrade, sentence = pip("install --upgrade transformers"), text.split(". ")[0].rstrip(".")
        fix = found[0].format(path=path, section=section, upgrade=upgrade)
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
