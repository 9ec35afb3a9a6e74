"""The checkpoints in a run folder: which are whole, and whether a training can go on from one.

Owns the names inside a checkpoint, which are transformers' (5.17). Loads nothing.
"""

import shutil
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

from grpo_cli.errors import UsageError
from grpo_cli.runs.files import parse_json
from grpo_cli.runs.folder import RunFolder

STAGING = ".saving"
"""Where a checkpoint is written before it gets its name."""
STATE = "trainer_state.json"
REFERENCE = "reference_model.pt"
"""Weights of the reference model, if training changes it."""
_LONGEST_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0", "latest")
"""Of one process, of FSDP whole and in shards, of DeepSpeed."""


def whole_checkpoints(run: RunFolder) -> dict[int, Path]:
    """The checkpoints that were written to their end, by step, the oldest first.

    They get their name when they are whole. Those of a plain trainer are known by `trainer_state.json`,
    which it writes last. What was damaged afterwards (cut off, say) is left out.
    """
    found = {
        int(path.name.rpartition("-")[2]): path
        for path in run.checkpoints.glob("checkpoint-*")
        if path.name.rpartition("-")[2].isdecimal() and _is_whole(path)
    }
    return dict(sorted(found.items()))


def _is_whole(checkpoint: Path) -> bool:
    """Whether no file of it was cut off, as far as a look at its ends tells."""
    try:
        parse_json((checkpoint / STATE).read_bytes())
        saved = [file for file in checkpoint.iterdir() if file.suffix in (".pt", ".pth")]
        # torch's files are zip archives, whose directory stands at the end.
        archives = all(zipfile.is_zipfile(file) for file in saved)
        return archives and all(map(_is_complete, checkpoint.glob("*.safetensors")))
    except (OSError, ValueError):
        return False


def _is_complete(weights: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
    with weights.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        header = parse_json(file.read(min(length, _LONGEST_HEADER)))
    try:
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    except (AttributeError, LookupError, TypeError):
        return False
    return weights.stat().st_size == 8 + length + max(ends, default=0)


def check_resumable(
    checkpoint: Path, ranks: Sequence[int] | None, *, needs_reference: bool
) -> None:
    """Refuses a checkpoint from which the trainer would go on differently, without a word.

    Args:
        checkpoint: A whole one.
        ranks: The processes of this machine, where several work together; None for a single one.
        needs_reference: Whether training had changed the reference model by then.

    Raises:
        UsageError: It lacks the optimizer, a process's random state, or the reference model.
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
    if needs_reference and not (checkpoint / REFERENCE).is_file():
        raise UsageError(
            f"{checkpoint} lacks {REFERENCE}, the reference model that `training.sync_ref_model` has changed; "
            "fsdp2 and zero3 do not save it, nor did earlier versions. Fix: start a run of its own; --force goes "
            "on with the reference model of the beginning"
        )


def clear_unfinished(run: RunFolder) -> None:
    """Removes what a killed process was writing."""
    shutil.rmtree(run.checkpoints / STAGING, ignore_errors=True)
