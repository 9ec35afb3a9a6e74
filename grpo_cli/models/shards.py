"""Sharded checkpoints as whole folders: those of FSDP (as accelerate 1.15 writes them) and DeepSpeed (0.19)."""

import contextlib
import sys
import tempfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from grpo_cli.errors import RunError, SetupError, install_extra
from grpo_cli.models.loading import add_adapters, load_model
from grpo_cli.models.source import FSDP_SHARDS
from grpo_cli.models.weights import weights_only
from grpo_cli.recipe.model import ModelConfig


def merge_shards(folder: Path, model: ModelConfig, target: Path, *, trusted: bool = False) -> None:
    """Write a sharded checkpoint of `model` as a folder that `from_pretrained` loads, in full precision.

    With `trusted`, whatever the shards hold is unpickled.

    Raises `RunError` if the shards are damaged, belong to another model, or hold more than tensors and plain
    values, and `SetupError` if DeepSpeed is needed to read them, and missing.
    """
    with tempfile.TemporaryDirectory(dir=target) as scratch, weights_only(folder, trusted=trusted):
        if (folder / FSDP_SHARDS).is_dir():
            state = _read_fsdp(folder / FSDP_SHARDS, Path(scratch))
        else:
            state = _read_deepspeed(folder, only_trained=model.lora is not None)
    merged = load_model(model.model_copy(update={"lora": None}), device_is_cuda=False)
    try:
        if model.lora is None:
            wrong = _fill(merged, state)
        else:
            merged = add_adapters(merged, model.lora)
            wrong = _fill_adapters(merged, state)
    except (RuntimeError, KeyError) as error:
        raise _unfit(folder, model, _shorten(error)) from error
    if wrong:
        raise _unfit(
            folder, model, f"{len(wrong)} tensors are missing or unknown, such as {min(wrong)}"
        )
    merged.save_pretrained(target)


def _read_deepspeed(folder: Path, *, only_trained: bool) -> dict[str, Any]:
    """Return the tensors of DeepSpeed's shards by their names in the model, on the CPU."""
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError:
        fix = install_extra("deepspeed")
        raise SetupError(f"{folder} is DeepSpeed's, and deepspeed is not installed", fix) from None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return dict(
                get_fp32_state_dict_from_zero_checkpoint(
                    str(folder), exclude_frozen_parameters=only_trained
                )
            )
    except (ValueError, OSError, RuntimeError, KeyError, EOFError) as error:
        raise _torn(folder, error) from error


def _read_fsdp(shards: Path, scratch: Path) -> dict[str, Any]:
    """Return the tensors of FSDP's shards by their names in the model, on the CPU."""
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file
    from torch.distributed.checkpoint import CheckpointException

    if not (shards / ".metadata").is_file():
        raise _torn(shards, "the file `.metadata`, which is written last, is missing")
    try:
        merge_fsdp_weights(str(shards), str(scratch))
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, UnpicklingError):
            raise cause from error
        raise _torn(shards, cause) from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise _torn(shards, error) from error
    merged = scratch / "model.safetensors"
    state = load_file(merged)
    merged.unlink()
    return state


def _fill(model: Any, state: dict[str, Any]) -> set[str]:
    """Load all weights; return the names that only one side has. A tied tensor may be in the state or not."""
    result = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    weights = dict(model.named_parameters(remove_duplicate=False))
    filled = {weights[name].data_ptr() for name in state if name in weights}
    missing = {
        name
        for name in result.missing_keys
        if name not in weights or weights[name].data_ptr() not in filled
    }
    return missing | set(result.unexpected_keys)


def _fill_adapters(model: Any, state: dict[str, Any]) -> set[str]:
    """Load the trained weights, whether or not their names hold the adapter's name, `default`."""
    from peft import set_peft_model_state_dict

    if any(".default." in name for name in state):
        result = model.load_state_dict(state, strict=False)
    else:
        result = set_peft_model_state_dict(model, state)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    return (trained & set(result.missing_keys)) | set(result.unexpected_keys)


def _unfit(source: Path, model: ModelConfig, seen: str) -> RunError:
    return RunError(
        f"{source} does not fit {model.path}: {seen}",
        "another checkpoint, or the model that the run began with",
    )


def _torn(shards: Path, cause: BaseException | str) -> RunError:
    sentence = _shorten(cause) or type(cause).__name__
    return RunError(
        f"the shards in {shards} cannot be read: {sentence}",
        "copy the checkpoint again with the shards of every process, or take an earlier one",
    )


def _shorten(cause: BaseException | str) -> str:
    return " ".join(str(cause).split())[:200]
