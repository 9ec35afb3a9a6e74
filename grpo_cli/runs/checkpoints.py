"""The checkpoints in a run folder: which are whole, and whether a training can go on from one.

Owns the names inside a checkpoint, which are transformers' (5.17). Loads nothing.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from grpo_cli.errors import UsageError
from grpo_cli.runs.folder import RunFolder

STAGING = ".saving"
"""Where a checkpoint is written before it gets its name."""
STATE = "trainer_state.json"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0", "latest")
"""Of one process, of FSDP whole and in shards, of DeepSpeed."""


def whole_checkpoints(run: RunFolder) -> dict[int, Path]:
    """The checkpoints that were written to their end, by step, the oldest first.

    They get their name when they are whole. Those of a plain trainer are known by `trainer_state.json`,
    which it writes last.
    """
    found = {
        int(path.name.rpartition("-")[2]): path
        for path in run.checkpoints.glob("checkpoint-*")
        if path.name.rpartition("-")[2].isdecimal() and (path / STATE).is_file()
    }
    return dict(sorted(found.items()))


def check_resumable(checkpoint: Path, ranks: Sequence[int] | None) -> None:
    """Refuses a checkpoint from which the trainer would go on differently, without a word.

    Args:
        checkpoint: A whole one.
        ranks: The processes of this machine, where several work together; None for a single one.

    Raises:
        UsageError: It lacks the optimizer, or a process's random state.
    """
    if not any((checkpoint / name).exists() for name in _OPTIMIZERS):
        raise UsageError(
            f"{checkpoint} holds no optimizer, so the training would start with a fresh one. "
            "Fix: take another checkpoint; they hold it unless `training.save_only_model` is set"
        )
    names = ["rng_state.pth"] if ranks is None else [f"rng_state_{rank}.pth" for rank in ranks]
    lacking = [name for name in names if not (checkpoint / name).is_file()]
    if lacking:
        raise UsageError(
            f"{checkpoint} lacks {', '.join(lacking)}, the random state of a process. Fix: copy it there "
            "from the machine that wrote it, or take another checkpoint; --force goes on without"
        )


def clear_unfinished(run: RunFolder) -> None:
    """Removes what a killed process was writing."""
    shutil.rmtree(run.checkpoints / STAGING, ignore_errors=True)
