"""Loads what a recipe's `model` section names: tokenizer, weights and adapters."""

import importlib.util
import re
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten
from typing import Any, NoReturn

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
)

from grpo_cli.errors import GrpoError, RecipeError, SetupError, UsageError, install_extra, nearest
from grpo_cli.issues import Issue
from grpo_cli.machine import has_bfloat16
from grpo_cli.models.source import (
    is_vision_language,
    model_folder_or_id,
    read_chat_template,
    resolve_source,
)
from grpo_cli.models.weights import (
    check_adapter_values,
    check_names,
    check_sizes,
    check_values,
    sample_values,
    unpickling_reason,
)
from grpo_cli.recipe.model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraConfig, ModelConfig
from grpo_cli.templating import bounded_environment
from grpo_cli.upstream.transformers import (
    check_tokenizer,
    explain_loading,
    quiet_loading,
    replace_sandbox,
)

_OFFLINE_FIX = (
    "download it beforehand with `hf download {path}` and set HF_HUB_OFFLINE=1, "
    "or name a local folder in `model.path`"
)
_ATTENTION = "attn_implementation"
_FIXES = (
    (
        "Unrecognized configuration class",
        "name a model that writes text from left to right",
        "path",
    ),
    ("attn_implementation", "remove `model.attn_implementation`, or set it to sdpa", _ATTENTION),
    ("FlashAttention", "remove `model.attn_implementation`, or install that kernel", _ATTENTION),
    ("unexpected keyword argument", "correct `model.init_kwargs`", "init_kwargs"),
    ("quantized model requires", "name the unquantized model, or install that package", "path"),
)
"""Messages of transformers (5.17) about language models only."""
_NAMES = {
    *("target_modules", "exclude_modules", "modules_to_save", "target_parameters"),
    *("rank_pattern", "alpha_pattern"),
}
"""Fields of `LoraConfig` that name parts of a model."""
_TEXTS_AS_PARTS = (
    "{%- set ns = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- if message.content is string -%}"
    "{%- set message = dict(message, content=[{'type': 'text', 'text': message.content}]) -%}"
    "{%- endif -%}{%- set ns.messages = ns.messages + [message] -%}"
    "{%- endfor -%}{%- set messages = ns.messages -%}"
)
"""Begins a chat template that shows the parts of messages alone, as those of some models with images do."""
_LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"
"""Key under which a tokenizer (transformers 5.17) notes that it has given this warning; probe reports lengths."""


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the tokenizer as TRL wants it: padding on the left, eos and pad tokens, the recipe's template."""
    location = model_folder_or_id(model)
    with explaining(model):
        tokenizer = AutoTokenizer.from_pretrained(
            location, padding_side="left", truncation_side="left", **hub_options(model)
        )
    settle_tokenizer(tokenizer, model)
    if _leaves_out_texts(tokenizer):
        tokenizer.chat_template = _TEXTS_AS_PARTS + tokenizer.chat_template
    return tokenizer


def settle_tokenizer(tokenizer: Any, model: ModelConfig) -> Any:
    """Return a tokenizer with a padding token and the recipe's template; raises as `load_tokenizer` does."""
    replace_sandbox(bounded_environment())
    template = read_chat_template(model)
    check_tokenizer(tokenizer, model.path, section="model.")
    if tokenizer.eos_token is None:
        fix = "add `eos_token` to its tokenizer_config.json"
        _refuse(f"the tokenizer of {model.path} has no end-of-sequence token", fix)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.deprecation_warnings[_LENGTH_WARNING] = True
    return tokenizer


def _leaves_out_texts(tokenizer: Any) -> bool:
    """Return whether a chat template shows texts only in parts of messages."""
    if not isinstance(tokenizer.chat_template, str):
        return False
    text, shown = "What is 1 + 1?", []
    for content in (text, [{"type": "text", "text": text}]):
        message = [{"role": "user", "content": content}]
        try:
            shown.append(text in tokenizer.apply_chat_template(message, tokenize=False))
        except Exception:  # a template may raise anything for contents that it does not know
            shown.append(False)
    return shown == [False, True]


def load_config(model: ModelConfig) -> Any:
    """Load the configuration, a `PreTrainedConfig`."""
    location = model_folder_or_id(model)
    try:
        with explaining(model):
            return AutoConfig.from_pretrained(location, **hub_options(model))
    except GrpoError:
        raise
    except Exception as error:  # the checks of its values raise anything
        raise refused_config(model, error) from error


def load_generation_config(model: ModelConfig) -> Any:
    """Load the model's own generation settings, made from its configuration if it ships none."""
    location = model_folder_or_id(model)
    try:
        return GenerationConfig.from_pretrained(location, revision=resolve_source(model).revision)
    except OSError:
        return GenerationConfig.from_model_config(load_config(model))


def load_model(
    model: ModelConfig,
    tokenizer: Any = None,
    *,
    device_is_cuda: bool | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Load a `PreTrainedModel` with a language-modelling head, without adapters.

    It must have an embedding for each token of a `tokenizer`. With a `device`, weights are read to it past the
    host's memory; `meta` takes names and sizes but no values. None is the CPU, and for quantized weights the
    current CUDA device.
    """
    cuda = torch.cuda.is_available() if device_is_cuda is None else device_is_cuda
    options = {**hub_options(model), **_precision_options(model, cuda), **model.init_kwargs}
    if device is not None and (device == "meta" or "device_map" not in options):
        options["device_map"] = {"": device}
    if model.attn_implementation is not None:
        options["attn_implementation"] = model.attn_implementation
    # Weights of other sizes are refused below, where the message can name them.
    options["ignore_mismatched_sizes"] = True
    location = model_folder_or_id(model)
    with explaining(model):
        loaded, report = pick_class(load_config(model)).from_pretrained(
            location, output_loading_info=True, **options
        )
    check_names(model.path, loaded, report["missing_keys"], report["unexpected_keys"])
    check_sizes(model.path, report["mismatched_keys"])
    if tokenizer is not None:
        check_vocabulary(loaded, tokenizer)
    if device != "meta":
        check_values(model.path, loaded)
    return loaded


def pick_class(config: Any) -> Any:
    """Return the class of transformers that loads a model with its head, by its `PreTrainedConfig`."""
    if is_vision_language({"model_type": config.model_type, **vars(config)}):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def check_weights(model: ModelConfig, tokenizer: Any) -> None:
    """Check that weights, config.json, generation_config.json and tokenizer fit each other.

    Of each weight, only the first row is read. Skips the weights of models of the hub, which would have to be
    downloaded, and of quantized checkpoints.
    """
    _check_generation_config(model)
    if model.adapter is not None:
        check_adapter_values(Path(model.adapter.path))
    quantized = getattr(load_config(model), "quantization_config", None)
    if quantized or not Path(model_folder_or_id(model)).is_dir():
        return
    plain = model.model_copy(update={"quantization": None})
    try:
        with quiet_loading():
            load_model(plain, tokenizer, device_is_cuda=False, device="meta")
    except GrpoError:
        raise
    except Exception as error:
        # The code of some models needs values; loading them will tell.
        if not model.trust_remote_code:
            raise refused_config(model, error) from error
    sample_values(model.path, Path(model_folder_or_id(model)))


def refused_config(model: ModelConfig, error: Exception) -> RecipeError:
    """Return the error for a config.json from which transformers cannot build a model."""
    if isinstance(error, UnpicklingError):
        reason = unpickling_reason(error)
        message = f"the weights of {model.path} are a pickle that holds more than tensors, and not read: {reason}"
        fix = "take weights in safetensors; if you trust the file, convert it to safetensors elsewhere"
        return RecipeError([Issue(message, fix, "model.path")])
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")
    message = f"transformers cannot build a model from config.json of {model.path}: {reason[:300]}"
    fix = "correct config.json, or download it again"
    return RecipeError([Issue(message, fix, "model.path")])


def _check_generation_config(model: ModelConfig) -> None:
    """Refuse generation settings that transformers reads but refuses to save with a checkpoint."""
    try:
        load_generation_config(model).validate(strict=True)
    except ValueError as error:
        reasons = dict(re.findall(r"^- `(\w+)`: (.*?)(?:\. |$)", str(error), re.MULTILINE))
        names, reason = ", ".join(reasons), next(iter(reasons.values()), str(error))
        message = f"generation_config.json of {model.path} is invalid ({names}): {reason}"
        fix = f"remove {names or 'these values'} from it, or set `do_sample` to true"
        why = "transformers would refuse to save the first checkpoint"
        raise RecipeError([Issue(message, fix, "model.path", why=why)]) from error


def pick_dtype(model: ModelConfig, *, cuda: bool) -> Any:
    """Return the precision to load weights in: a `torch.dtype`, or `auto` for the checkpoint's own.

    A processor that emulates bfloat16 takes float32: a layer of SmolLM2's kind learns 2.3 times as fast in it
    with AVX-512, and 13 times with AVX2.
    """
    if model.dtype != "auto":
        return getattr(torch, model.dtype)
    emulated = not cuda and has_bfloat16() is False
    return torch.float32 if emulated and load_config(model).dtype == torch.bfloat16 else "auto"


def build_peft_config(lora: LoraConfig | None, model: Any = None) -> peft.LoraConfig | None:
    """Return the recipe's adapters as peft's configuration; None if all weights are trained.

    With `all-linear`, the vision part of a `model` that reads images gets none.
    """
    if lora is None:
        return None
    dumped = lora.model_dump().items()
    options = {name: list(each) if isinstance(each, tuple) else each for name, each in dumped}
    reads_images = model is not None and pick_class(model.config) is AutoModelForImageTextToText
    if lora.target_modules == "all-linear" and reads_images:
        decoder = model.get_decoder()
        inside = next(name for name, module in model.named_modules() if module is decoder)
        excluded = options.get("exclude_modules") or []
        if not isinstance(excluded, str):
            excluded = rf"(.*\.)?({'|'.join(map(re.escape, excluded))})" if excluded else ""
        outside = rf"(?!{re.escape(inside)}\.).*"
        options["exclude_modules"] = "|".join(filter(None, (outside, excluded)))
    return peft.LoraConfig(task_type="CAUSAL_LM", **options)


def add_adapters(model: Any, lora: LoraConfig) -> Any:
    """Return the model with fresh adapters, a `peft.PeftModel`.

    Raises `RecipeError` if `target_modules` or `modules_to_save` names a module that the model does not have,
    or whose adapter would be left out of what is trained or exported.
    """
    _check_module_names(model, lora)
    try:
        adapted = peft.get_peft_model(model, build_peft_config(lora, model))
        _check_vocabulary_adapters(adapted.get_base_model())
        return adapted
    except (ValueError, TypeError) as error:
        sentence = " ".join(str(error).split()).split(". ")[0]
        message = f"the adapters do not fit the model: {sentence}"
        path, fix = "model.lora", "correct that setting"
        if "target modules" in sentence.lower():
            path = "model.lora.target_modules"
            fix = "set `target_modules: all-linear`, or name modules the model has"
        raise RecipeError([Issue(message, fix, path)]) from error


def _check_vocabulary_adapters(model: Any) -> None:
    """Refuse an adapter on the head, which TRL (1.16) passes over, and one on embeddings that the head shares."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    fix = "remove it, or train it whole: `modules_to_save`"
    if isinstance(head, BaseTunerLayer):
        seen = "TRL takes log-probabilities from the weights of the head, and would never train its adapter"
        raise RecipeError([Issue(seen, fix, "model.lora.target_modules")])
    # Some configurations of text parts (Qwen2-VL's) do not have it; transformers asks the model's own.
    shared = head is not None and getattr(model.config, "tie_word_embeddings", False)
    if shared and (isinstance(embeddings, BaseTunerLayer) or embeddings.weight is not head.weight):
        seen = "the head shares the weights of the embeddings, and would not get those that are trained"
        raise RecipeError([Issue(seen, f"{fix} with `ensure_weight_tying: true`", "model.lora")])


def _check_module_names(model: Any, lora: LoraConfig) -> None:
    """Refuse names without a module or weight, which peft (0.21) passes over."""
    modules = dict(model.named_modules())
    linear = {
        name.rpartition(".")[2]
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }
    weights = [name for name, _ in model.named_parameters()]
    problems = []
    for key, value in lora.model_dump().items():
        among = weights if key == "target_parameters" else [*modules]
        for name in value if key in _NAMES and value and not isinstance(value, str) else ():
            # Patterns are of peft's own kind; other names are ends of a path.
            pattern = name if key.endswith("pattern") else re.escape(name)
            if name != "all-linear" and not any(
                re.match(rf"(.*\.)?({pattern})$", each) for each in among
            ):
                close = nearest(name, {each.rpartition(".")[2] for each in among})
                guess = f"did you mean {close}? " if close else ""
                fix = f"{guess}its layers are named {', '.join(sorted(linear))}"
                what = "weight" if key == "target_parameters" else "module"
                message = f"the model has no {what} named {name}"
                problems.append(Issue(message, fix, f"model.lora.{key}"))
    if problems:
        raise RecipeError(problems)


def load_trainable(model: Any, config: ModelConfig, *, adds_fresh: bool = False) -> Any:
    """Return the model with the adapter that training goes on from; the model itself if there is none.

    Only that adapter is saved: TRL adds a copy, `ref`, which each start makes again. With `adds_fresh`, a model
    without an adapter gets a fresh one, instead of TRL's.

    Raises `UsageError` if the adapter belongs to another model, or is damaged, and `RecipeError` if a fresh
    one does not fit the model.
    """
    if config.adapter is not None:
        model = load_adapter(model, Path(config.adapter.path), config.path, is_trainable=True)
        # As peft does for a fresh one: where the adapter came from may have known the base by another name.
        model.peft_config["default"].base_model_name_or_path = model.get_base_model().name_or_path
    elif adds_fresh and config.lora is not None:
        model = add_adapters(model, config.lora)
    else:
        return model
    model.save_pretrained = partial(model.save_pretrained, selected_adapters=["default"])
    return model


def load_adapter(model: Any, adapter: Path, base: str, *, is_trainable: bool = False) -> Any:
    """Return the model with an adapter from a folder, a `peft.PeftModel`; `base` names the model in errors.

    Raises `UsageError` if the adapter belongs to another model, or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        loaded = peft.PeftModel.from_pretrained(model, adapter, is_trainable=is_trainable)
        with safe_open(adapter / ADAPTER_WEIGHTS, "pt") as tensors:
            held, own = set(tensors.keys()), peft.get_peft_model_state_dict(loaded).keys()
        # peft only warns, uses fresh values for what is missing, and drops what is left over.
        if missing := own - held:
            raise ValueError(f"{len(missing)} of its tensors are missing, such as {min(missing)}")
        if unused := {name for name in held - own if ".lora_" in name}:
            message = (
                f"{len(unused)} of its tensors belong to no module that {ADAPTER_CONFIG} names"
            )
            raise ValueError(f"{message}, such as {min(unused)}")
        check_adapter_values(adapter)
        return loaded
    except (RuntimeError, ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        sentence = shorten(" ".join(str(error).split()), 400, placeholder=" …").rstrip(".")
        raise UsageError(
            f"the adapter {adapter} does not fit {base}: {sentence}",
            "put it on the model that it was trained on, or download it again",
        ) from error


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Refuse a model without an embedding for every token: training would end in `index out of range in self`."""
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) <= rows:
        return
    outside = [token for token, id in tokenizer.get_vocab().items() if id >= rows]
    message = f"the tokenizer knows {len(tokenizer)} tokens, the model {rows}"
    for name, token in tokenizer.special_tokens_map.items():
        if token in outside:
            what = name.removesuffix("_token").replace("pad", "padding")
            what = f"{message}: the {what} token {token} has no embedding"
            _refuse(what, f"set `{name}` in tokenizer_config.json to a token that has one")
    _refuse(message, "use the tokenizer that belongs to these weights")


def hub_options(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of every `from_pretrained`."""
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    revision = resolve_source(model).revision
    return options if revision is None else {**options, "revision": revision}


def _precision_options(model: ModelConfig, cuda: bool) -> dict[str, Any]:
    """Return `dtype`, and the recipe's quantization.

    Source: Dettmers et al. 2023 (QLoRA, arXiv:2305.14314), section 3: NF4, double quantization.
    """
    dtype = pick_dtype(model, cuda=cuda)
    if model.quantization is None:
        return {"dtype": dtype}
    what = f"model.quantization: {model.quantization}"
    if not cuda:
        fix = "run on a machine with a GPU, or remove `quantization`"
        raise SetupError(f"{what} needs a CUDA device, and there is none", fix)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SetupError(f"{what} needs bitsandbytes", install_extra("quantization"))
    if model.quantization == "8bit":
        return {"dtype": dtype, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else dtype,
    )
    return {"dtype": dtype, "quantization_config": config}


def explaining(model: ModelConfig) -> AbstractContextManager[None]:
    """Turn what transformers raises inside into a `SetupError`; see `explain_loading`."""
    return explain_loading(
        model.path, section="model.", offline_fix=_OFFLINE_FIX, more_fixes=_FIXES
    )


def _refuse(message: str, fix: str) -> NoReturn:
    raise RecipeError([Issue(message, fix, "model.path")])


def refer_to_base(model: Any) -> None:
    """Drop TRL's copy of the adapter: without it TRL takes the model without adapters as the reference."""
    if "ref" in model.peft_config:
        model.delete_adapter("ref")
