"""Loads what a recipe's `model` section names: tokenizer, weights and adapters.

Owns the passage from `ModelConfig` to the objects of transformers and peft. Does not place a
model on a device, except a quantized one; why a model cannot be had is `loading_errors.py`'s to say.
"""

import importlib.util
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import peft
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
)

from grpo_cli.errors import GrpoError, Problem, RecipeError, SetupError, install_extra
from grpo_cli.loading_errors import check_tokenizer, explain_loading, quiet_loading
from grpo_cli.machine import has_bfloat16
from grpo_cli.models.source import model_folder_or_id, read_chat_template, resolve_source
from grpo_cli.recipe.model import LoraConfig, ModelConfig

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
"""The messages of transformers (5.17) about these models alone."""


def load_tokenizer(model: ModelConfig) -> Any:
    """Loads the tokenizer as TRL wants it: padding on the left, a pad token, the recipe's template.

    Returns:
        A `PreTrainedTokenizerBase` with `eos_token` and `pad_token` set.

    Raises:
        RecipeError: `model.path` or `model.chat_template` names nothing, or there is no eos token.
        SetupError: The tokenizer cannot be had; the text says how to mend that.
    """
    template = read_chat_template(model)
    location = model_folder_or_id(model)
    with _explained(model):
        tokenizer = AutoTokenizer.from_pretrained(
            location, padding_side="left", truncation_side="left", **_hub_options(model)
        )
    check_tokenizer(tokenizer, model.path, section="model.")
    if tokenizer.eos_token is None:
        fix = "add `eos_token` to its tokenizer_config.json"
        _refuse(f"the tokenizer of {model.path} has no end-of-sequence token", fix)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def load_config(model: ModelConfig) -> Any:
    """Loads the configuration: a `PreTrainedConfig`, without any weights.

    Raises:
        RecipeError: `model.path` names nothing.
        SetupError: The configuration cannot be had.
    """
    location = model_folder_or_id(model)
    with _explained(model):
        return AutoConfig.from_pretrained(location, **_hub_options(model))


def load_generation_config(model: ModelConfig) -> Any:
    """The model's own generation settings, made from its configuration where it ships none.

    Raises:
        RecipeError: `model.path` names nothing.
        SetupError: The configuration cannot be had.
    """
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
    on_meta: bool = False,
) -> Any:
    """Load the weights, on the CPU; quantized ones on the current CUDA device.

    Args:
        model: The recipe's section.
        tokenizer: If given, the model must have an embedding for each of its tokens.
        device_is_cuda: Whether the model will run on CUDA; looked up if None.
        on_meta: Read names and sizes but no values, into a model on the `meta` device.

    Returns:
        A `PreTrainedModel` with a language-modelling head, without adapters.

    Raises:
        RecipeError: `model.path` names nothing, or the tokenizer does not fit.
        SetupError: The weights cannot be loaded, or quantization is not possible here.
    """
    cuda = torch.cuda.is_available() if device_is_cuda is None else device_is_cuda
    options = {**_hub_options(model), **_precision_options(model, cuda), **model.init_kwargs}
    if model.attn_implementation is not None:
        options["attn_implementation"] = model.attn_implementation
    if on_meta:
        options["device_map"] = {"": "meta"}
    # Weights of other sizes are refused below, where the message can name them.
    options["ignore_mismatched_sizes"] = True
    location = model_folder_or_id(model)
    with _explained(model):
        loaded, report = AutoModelForCausalLM.from_pretrained(
            location, output_loading_info=True, **options
        )
    _check_names(model.path, report["missing_keys"], report["unexpected_keys"])
    _check_sizes(model.path, report["mismatched_keys"])
    if tokenizer is not None:
        check_vocabulary(loaded, tokenizer)
    if not on_meta:
        _check_values(model.path, loaded)
    return loaded


def check_weights(model: ModelConfig, tokenizer: Any) -> None:
    """Check that a folder's weights are complete and fit its config.json and tokenizer; read no values.

    Skips models of the hub, which would have to be downloaded, and checkpoints that are quantized.

    Raises:
        RecipeError: The tokenizer does not fit.
        SetupError: The weights cannot be loaded.
    """
    quantized = getattr(load_config(model), "quantization_config", None)
    if quantized or not Path(model_folder_or_id(model)).is_dir():
        return
    plain = model.model_copy(update={"quantization": None})
    try:
        with quiet_loading():
            load_model(plain, tokenizer, device_is_cuda=False, on_meta=True)
    except GrpoError:
        raise
    except Exception:
        # The code of some models needs values; loading them will tell.
        return


def _check_names(path: str, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Refuse missing weights, for which transformers would use random values."""
    absent, others = sorted(missing), sorted(unexpected)
    if not absent:
        return
    message = f"{path} lacks {len(absent)} of its weights, such as {absent[0]}"
    if others:
        message += f"; it holds {len(others)} that the model does not have, such as {others[0]}"
    other = others[0] if others else ""
    prefix = next((other.removesuffix(each) for each in absent if other.endswith(each)), "")
    if prefix.endswith("."):
        fix = f"remove the prefix `{prefix}` from the names of its tensors"
    elif all("layers" in each or ".h." in each for each in absent):
        fix = "correct the number of layers in config.json, or fetch the weights anew"
    else:
        fix = (
            "fetch it anew, or name a model that was saved with its language-modelling head; if it shares "
            "that with the embeddings, set `tie_word_embeddings: true` in config.json"
        )
    raise SetupError(f"{message}. Fix: {fix}", "model.path")


def _check_sizes(path: str, mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]]) -> None:
    others = sorted(mismatched)
    if not others:
        return
    name, *both = others[0]
    stored, expected = (" × ".join(map(str, size)) for size in both)
    message = (
        f"{len(others)} weights of {path} have other sizes than config.json gives them: "
        f"{name} is {stored}, and should be {expected}"
    )
    fix = "correct config.json (hidden_size, vocab_size, …), or fetch both anew"
    raise SetupError(f"{message}. Fix: {fix}", "model.path")


def _check_values(path: str, model: Any) -> None:
    """Refuse weights that are not finite; the sum of a tensor, which takes no memory, shows them."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.element_size() == 1:
            continue
        # A sum in half precision can also overflow.
        if not weight.sum().isfinite() and not weight.isfinite().all():
            fix = "fetch the weights anew, or name an earlier checkpoint of their training"
            message = f"{path} has NaN or infinite values in {name}. Fix: {fix}"
            raise SetupError(message, "model.path")


def pick_dtype(model: ModelConfig, *, cuda: bool) -> Any:
    """The precision to load weights in: a `torch.dtype`, or `auto` for the checkpoint's own.

    bfloat16 on a processor that emulates it takes longer than float32: a layer of SmolLM2's kind 2.3 times
    as long to learn with AVX-512 alone, and 13 times with AVX2.

    Raises:
        RecipeError: `model.path` names nothing.
        SetupError: The configuration cannot be had.
    """
    if model.dtype != "auto":
        return getattr(torch, model.dtype)
    emulated = not cuda and has_bfloat16() is False
    return torch.float32 if emulated and load_config(model).dtype == torch.bfloat16 else "auto"


def build_peft_config(lora: LoraConfig | None) -> peft.LoraConfig | None:
    """The recipe's adapters as peft's configuration; None where all weights are trained."""
    if lora is None:
        return None
    options = lora.model_dump()
    for name in ("target_modules", "modules_to_save"):
        if isinstance(options[name], tuple):
            options[name] = list(options[name])
    return peft.LoraConfig(task_type="CAUSAL_LM", **options)


def add_adapters(model: Any, lora: LoraConfig) -> Any:
    """The model with fresh adapters beside its weights: a `peft.PeftModel`.

    Raises:
        RecipeError: `target_modules` names nothing that it has.
    """
    try:
        return peft.get_peft_model(model, build_peft_config(lora))
    except ValueError as error:
        sentence = " ".join(str(error).split()).split(". ")[0]
        problem = Problem(
            f"the adapters do not fit the model: {sentence}",
            "set `target_modules: all-linear`, or name modules the model has",
            "model.lora.target_modules",
        )
        raise RecipeError([problem]) from error


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Checks that the model has an embedding for every token of the tokenizer.

    Raises:
        RecipeError: It does not; training would end in `index out of range in self`.
    """
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) <= rows:
        return
    outside = [token for token, id in tokenizer.get_vocab().items() if id >= rows]
    message = f"the tokenizer knows {len(tokenizer)} tokens, the model {rows}"
    if tokenizer.pad_token in outside:
        what = f"{message}: the padding token {tokenizer.pad_token} has no embedding"
        _refuse(what, "set `pad_token` in tokenizer_config.json to a token that has one")
    _refuse(message, "use the tokenizer that belongs to these weights")


def _hub_options(model: ModelConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    revision = resolve_source(model).revision
    return options if revision is None else {**options, "revision": revision}


def _precision_options(model: ModelConfig, cuda: bool) -> dict[str, Any]:
    """`dtype`, and the quantization where one is asked for.

    Source: Dettmers et al. 2023 (QLoRA, arXiv:2305.14314), section 3: NF4, double quantization.
    """
    dtype = pick_dtype(model, cuda=cuda)
    if model.quantization is None:
        return {"dtype": dtype}
    _check_quantization_here(model, cuda)
    if model.quantization == "8bit":
        return {"dtype": dtype, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else dtype,
    )
    return {"dtype": dtype, "quantization_config": config}


def _check_quantization_here(model: ModelConfig, cuda: bool) -> None:
    what = f"model.quantization: {model.quantization}"
    if not cuda:
        fix = "run on a machine with a GPU, or remove `quantization`"
        raise SetupError(f"{what} needs a CUDA device, and there is none. Fix: {fix}")
    if importlib.util.find_spec("bitsandbytes") is None:
        fix = install_extra("quantization")
        raise SetupError(f"{what} needs bitsandbytes. Fix: {fix}")


def _explained(model: ModelConfig) -> AbstractContextManager[None]:
    return explain_loading(
        model.path, section="model.", offline_fix=_OFFLINE_FIX, more_fixes=_FIXES
    )


def _refuse(message: str, fix: str) -> NoReturn:
    raise RecipeError([Problem(message, fix, "model.path")])
