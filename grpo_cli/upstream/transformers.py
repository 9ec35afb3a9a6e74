"""Internal names of transformers. Does not import it."""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

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
