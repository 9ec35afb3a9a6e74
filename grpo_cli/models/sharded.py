"""Checkpoints whose weights lie in shards, one a process, made whole.

Owns where FSDP (as accelerate 1.15 writes it) and DeepSpeed (0.19) put them. Reading them unpickles
files of the checkpoint, as both libraries do: they are for checkpoints of one's own runs.
"""

import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from grpo_cli.errors import RunError, SetupError, UsageError, install_extra
from grpo_cli.recipe.model import ModelConfig

_FSDP = "pytorch_model_fsdp_0"
_DEEPSPEED_TAG = "latest"
"""The file in which DeepSpeed says which of its `global_stepN` folders is meant."""
_WHOLE = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.safetensors")


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint holds its weights in shards alone."""
    if any(any(folder.glob(pattern)) for pattern in _WHOLE):
        return False
    return (folder / _FSDP).is_dir() or (folder / _DEEPSPEED_TAG).is_file()


def refuse_sharded(folder: Path) -> None:
    """Refuses a checkpoint that must be made whole before it can be loaded.

    Raises:
        UsageError: It holds shards alone.
    """
    if is_sharded(folder):
        step = folder.name.rpartition("-")[2]
        raise UsageError(
            f"{folder} holds its weights in shards, one a process. Fix: make it whole first with "
            f"`grpo export {folder.parent.parent} --checkpoint {step} --to DIR`, and name DIR"
        )


def make_whole(folder: Path, model: ModelConfig, target: Path) -> None:
    """Writes a checkpoint in shards as a folder that `from_pretrained` loads, in full precision.

    Args:
        folder: The checkpoint.
        model: The model that was trained, with its adapters.
        target: An empty folder.

    Raises:
        RunError: The shards are torn, or another model's.
        SetupError: DeepSpeed is needed to read them, and missing.
    """
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        state = _read_shards(folder, Path(scratch), only_trained=model.lora is not None)
    _write_whole(state, model, target, folder)


def _read_shards(folder: Path, scratch: Path, *, only_trained: bool) -> dict[str, Any]:
    """Every tensor by its name in the model, on the CPU."""
    if (folder / _FSDP).is_dir():
        return _read_fsdp(folder / _FSDP, scratch)
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError:
        raise SetupError(
            f"{folder} is DeepSpeed's, and deepspeed is not installed. "
            f"Fix: {install_extra('deepspeed')}"
        ) from None
    try:
        with redirect_stdout(sys.stderr):
            return dict(
                get_fp32_state_dict_from_zero_checkpoint(
                    str(folder), exclude_frozen_parameters=only_trained
                )
            )
    except (ValueError, OSError, RuntimeError, KeyError, EOFError) as error:
        raise _torn(folder, error) from error


def _read_fsdp(shards: Path, scratch: Path) -> dict[str, Any]:
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file
    from torch.distributed.checkpoint import CheckpointException

    if not (shards / ".metadata").is_file():
        raise _torn(shards, "the file `.metadata`, which is written last, is missing")
    try:
        merge_fsdp_weights(str(shards), str(scratch))
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise _torn(shards, cause) from error
    merged = scratch / "model.safetensors"
    state = load_file(merged)
    merged.unlink()
    return state


def _write_whole(state: dict[str, Any], model: ModelConfig, target: Path, source: Path) -> None:
    """Writes tensors as the model they are of, at the precision they have."""
    from grpo_cli.models.loading import add_adapters, load_model

    base = load_model(model.model_copy(update={"lora": None}), device_is_cuda=False)
    try:
        if model.lora is None:
            whole, odd = base, _fill(base, state)
        else:
            whole = add_adapters(base, model.lora)
            odd = _fill_adapters(whole, state)
    except (RuntimeError, KeyError) as error:
        raise _unfit(source, model, _shorten(error)) from error
    if odd:
        told = f"{len(odd)} tensors are lacking or strange, such as {min(odd)}"
        raise _unfit(source, model, told)
    whole.save_pretrained(target)


def _fill(model: Any, state: dict[str, Any]) -> set[str]:
    """Puts all weights in place; the names that one side has and the other lacks.

    A tensor that the model ties to another may be in the state or not.
    """
    result = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    weights = dict(model.named_parameters(remove_duplicate=False))
    filled = {weights[name].data_ptr() for name in state if name in weights}
    lacking = {
        name
        for name in result.missing_keys
        if name not in weights or weights[name].data_ptr() not in filled
    }
    return lacking | set(result.unexpected_keys)


def _fill_adapters(model: Any, state: dict[str, Any]) -> set[str]:
    """Puts the trained weights in place, whether their names hold the adapter's (`default`) or not."""
    from peft import set_peft_model_state_dict

    if any(".default." in name for name in state):
        result = model.load_state_dict(state, strict=False)
    else:
        result = set_peft_model_state_dict(model, state)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    return (trained & set(result.missing_keys)) | set(result.unexpected_keys)


def _unfit(source: Path, model: ModelConfig, seen: str) -> RunError:
    return RunError(
        f"{source} does not fit {model.path}: {seen}. "
        "Fix: another checkpoint, or the model that the run began with"
    )


def _torn(shards: Path, cause: BaseException | str) -> RunError:
    sentence = _shorten(cause) or type(cause).__name__
    return RunError(
        f"the shards in {shards} cannot be read: {sentence}. "
        "Fix: copy the checkpoint anew with the shards of every process, or take an earlier one"
    )


def _shorten(cause: BaseException | str) -> str:
    return " ".join(str(cause).split())[:200]
