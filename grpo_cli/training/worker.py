"""The worker process: `python -m grpo_cli.training.worker RUN`, or under `accelerate launch` for several.

Reads nothing but the run folder, and writes down why it failed.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import traceback
from pathlib import Path

from grpo_cli.errors import ExitCode, GrpoError, RunError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trackers import set_defaults
from grpo_cli.training.session import (
    Stopped,
    StopRequest,
    write_failure,
    write_status,
)

_NO_NUMBERS = "probability tensor contains either"
"""In torch's error (2.13) if probabilities are NaN."""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def main(argv: list[str]) -> int:
    """Train the run in the folder `argv[0]`; return the exit code."""
    folder = RunFolder(Path(argv[0]).resolve())
    # Meant for the workers alone: a program that a reward starts finds the modules beside it.
    os.environ.pop("PYTHONSAFEPATH", None)
    rank = int(os.environ.get("RANK", "0"))
    stop = StopRequest(folder)
    stop.listen()
    # If the run stalls, the supervisor asks every worker for its stack.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder.worker_pid(rank).write_text(str(os.getpid()))
    write_status(folder, rank, state="running", phase="loading libraries")
    try:
        # Before anything imports a tracker.
        set_defaults(folder, folder.read_recipe().name, os.environ)
        # Torch takes seconds to import; a stop or a failure is already noticed by now.
        from grpo_cli.training.run import train

        try:
            stop.wait_for_probe()
            train(folder, stop)
        except Stopped:
            _leave_group()
            raise
        _leave_group()
    except Stopped as stopped:
        # One process of every machine: their supervisors read folders of their own.
        first = int(os.environ.get("LOCAL_RANK", rank))
        why = {"reason": str(stopped), "fix": stopped.fix, "stopped_by": stopped.rule}
        write_status(folder, first, state="stopped", **why)
        return ExitCode.INTERRUPTED
    except BaseException as error:
        # A reward may raise anything, even SystemExit; signals do not arrive this way.
        _record_failure(folder, rank, error)
        return ExitCode.FAILED
    return ExitCode.OK


def _leave_group() -> None:
    """End communication with the other processes before Python ends.

    A gloo thread that releases a tensor during interpreter shutdown aborts the process (pytorch issue 179291), and
    torchrun then kills the others. Not done after an error: the others may be in the middle of a collective.
    """
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()


def _record_failure(folder: RunFolder, rank: int, error: BaseException) -> None:
    recipe = None
    with contextlib.suppress(GrpoError):
        recipe = folder.read_recipe()
    known = _explain(error, recipe)
    # The message of an error of ours is enough.
    stack = None if known else "".join(traceback.format_exception(error))
    traceback.print_exc()
    unknown = RunError(f"{type(error).__name__}: {str(error).strip()}")
    write_failure(folder, rank, known or unknown, stack)


def _explain(error: BaseException, recipe: Recipe | None) -> GrpoError | None:
    """Return an error that says what to do: one of ours, or of a kind that is known; None of another."""
    text = str(error).strip()
    seen = f"{type(error).__name__}: {text}"
    if _NO_NUMBERS in text:
        fix = "resume from an earlier checkpoint with a lower training.learning_rate"
        return RunError(f"{seen}\nThe weights are no longer numbers", fix)
    out_of_memory = isinstance(error, MemoryError) or any(
        phrase in text.lower() for phrase in _OUT_OF_MEMORY
    )
    if recipe is None or not out_of_memory:
        return error if isinstance(error, GrpoError) else None
    savings = [f"\n  {number}. {each}" for number, each in enumerate(_list_savings(recipe), 1)]
    seen = text if isinstance(error, GrpoError) else seen
    return RunError(f"{seen}\nMemory ran out", f"change, in this order,{''.join(savings)}")


def _list_savings(recipe: Recipe) -> list[str]:
    """Return what saves memory; first those that leave what is learned unchanged."""
    training, generation, model = recipe.training, recipe.generation, recipe.model
    batch = training.per_device_train_batch_size
    smaller = (
        f"training.per_device_train_batch_size: {batch // 2} with gradient_accumulation_steps: "
        f"{training.gradient_accumulation_steps * 2} (the same batch in smaller pieces)"
    )
    options = [
        (batch % 2 == 0, smaller),
        (
            not recipe.setting("gradient_checkpointing"),
            "training.gradient_checkpointing: true (slower, the same result)",
        ),
        (generation.backend == "vllm", "a lower generation.vllm.gpu_memory_utilization"),
        (model.dtype == "float32", "model.dtype: bfloat16"),
        (model.lora is None, "model.lora: {} (adapters instead of all weights)"),
        (
            model.lora is not None and model.quantization is None,
            "model.quantization: 4bit (the base in 4 bits, on a GPU)",
        ),
        (True, f"generation.max_completion_length below {generation.max_completion_length}"),
        (batch % 2 and batch > 1, f"a training.per_device_train_batch_size below {batch}"),
        (True, "a smaller model; `grpo probe` estimates what fits"),
    ]
    return [text for applies, text in options if applies]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
