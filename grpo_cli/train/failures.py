"""What a training that broke off says of itself: the cause, and what mends it.

Owns telling memory that ran out from other errors, and what to change then. Torch's errors are known by
their words (2.13), so that nothing is loaded to write one down.
"""

import errno
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_cli.checks.settings import read_setting
from grpo_cli.errors import GrpoError, RunError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.units import format_bytes

_FIXES = (
    (
        "probability tensor contains either",
        "the weights are no numbers any more; a lower training.learning_rate, from an earlier checkpoint",
    ),
)
"""What torch and transformers say, and what mends it."""
_FULL_BYTES = 2**26
"""With less than this left, or than what was written, a failed write is the disk's fault."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def describe(error: BaseException, recipe: Recipe | None) -> str:
    """An error in a sentence or two; with what to change where memory ran out.

    Args:
        error: What ended the training.
        recipe: The run's; None where it could not be read.
    """
    text = str(error).strip()
    said = text if isinstance(error, GrpoError) else f"{type(error).__name__}: {text}"
    for words, fix in _FIXES:
        if words in text:
            said = f"{said}\nFix: {fix}"
    if recipe is None or not _is_out_of_memory(error, text):
        return said
    ways = "\n".join(f"  {place}. {way}" for place, way in enumerate(list_savings(recipe), 1))
    return f"{said}\nMemory ran out. Fix: change, in this order,\n{ways}"


def trace(error: BaseException) -> str | None:
    """The traceback, where the message is not meant to speak for itself."""
    return None if isinstance(error, GrpoError) else "".join(traceback.format_exception(error))


@contextmanager
def atomic_dir(partial: Path) -> Iterator[None]:
    """Writes a folder to its end, or leaves nothing of it.

    Args:
        partial: The folder that is written to.

    Raises:
        RunError: The disk is full, in the place of what each library says then.
    """
    try:
        yield
    except BaseException as error:
        written = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        left = shutil.disk_usage(partial.parent).free
        # What could not be finished must not fill the disk either.
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, Exception) and (
            _is_no_space(error) or left < min(written, _FULL_BYTES)
        ):
            raise RunError(
                f"the disk of {partial.parent} is full: {format_bytes(written)} were written and "
                f"{format_bytes(left)} are left. What was saved before is whole. Fix: free some space "
                "(training.save_total_limit bounds the checkpoints), then `grpo train … --resume`"
            ) from error
        raise


def _is_no_space(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _NO_SPACE
    # Safetensors reserves the room for a file first, so that much may be left, and is written in Rust.
    return any(f"(os error {number})" in str(error) for number in _NO_SPACE)


def list_savings(recipe: Recipe) -> list[str]:
    """What takes less memory, those first that change nothing of what is learned."""
    training, generation = recipe.training, recipe.generation
    batch, accumulation = (
        training.per_device_train_batch_size,
        training.gradient_accumulation_steps,
    )
    ways = []
    if batch % 2 == 0:
        ways.append(
            f"training.per_device_train_batch_size: {batch // 2} with gradient_accumulation_steps: "
            f"{accumulation * 2} (the same batch in smaller pieces)"
        )
    if not read_setting(recipe, "gradient_checkpointing"):
        ways.append("training.gradient_checkpointing: true (slower, the same result)")
    if generation.backend == "vllm":
        ways.append("a lower generation.vllm.gpu_memory_utilization")
    if recipe.model.dtype == "float32":
        ways.append("model.dtype: bfloat16")
    if recipe.model.lora is None:
        ways.append("model.lora: {} (adapters in the place of all weights)")
    elif recipe.model.quantization is None:
        ways.append("model.quantization: 4bit (the base in 4 bits, on a GPU)")
    ways.append(f"generation.max_completion_length below {generation.max_completion_length}")
    if batch % 2 and batch > 1:
        ways.append(f"a training.per_device_train_batch_size below {batch}")
    ways.append("a smaller model; `grpo probe` estimates what fits")
    return ways


def _is_out_of_memory(error: BaseException, text: str) -> bool:
    return isinstance(error, MemoryError) or any(words in text.lower() for words in _OUT_OF_MEMORY)
