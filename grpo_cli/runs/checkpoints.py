"""The checkpoints of a run: which are complete, which one is meant, and going back to one.

The names inside a checkpoint are those of transformers 5.17. Nothing is loaded.
"""

import os
import shutil
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from grpo_cli.errors import UsageError
from grpo_cli.runs.files import parse_json, read_file, read_tensors_header, write_json
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import DURING
from grpo_cli.runs.records import TrainerState

STAGING = ".saving"
"""Where a checkpoint is written before it gets its name."""
STATE = "trainer_state.json"
REFERENCE = "reference_model.pt"
"""Weights of the reference model, if training changes it."""
_KEPT = "kept.json"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0", "latest")
"""Of one process, of FSDP whole and in shards, of DeepSpeed."""


def whole_checkpoints(run: RunFolder) -> dict[int, Path]:
    """Return the complete checkpoints by step, the oldest first; damaged ones are left out."""
    numbered = [
        (path.name.rpartition("-")[2], path) for path in run.checkpoints.glob("checkpoint-*")
    ]
    complete = {int(n): path for n, path in numbered if n.isdecimal() and _is_whole(path)}
    return dict(sorted(complete.items()))


def _is_whole(checkpoint: Path) -> bool:
    """Return whether no file was cut off, judged by both ends of each."""
    try:
        if read_file(checkpoint / STATE, TrainerState) is None:
            return False
        saved = [file for file in checkpoint.iterdir() if file.suffix in (".pt", ".pth")]
        # torch's files are zip archives, whose directory stands at the end.
        archives = all(zipfile.is_zipfile(file) for file in saved)
        weights = checkpoint.glob("*.safetensors")
        return archives and all(
            read_tensors_header(each)[0] == each.stat().st_size for each in weights
        )
    except (OSError, ValueError, UsageError):
        return False


def check_resumable(
    checkpoint: Path, ranks: Sequence[int] | None, *, needs_reference: bool
) -> None:
    """Refuse a checkpoint from which the trainer would silently continue differently.

    `ranks` are the processes of this machine; None for a single process.
    """
    if not any((checkpoint / name).exists() for name in _OPTIMIZERS):
        raise UsageError(
            f"{checkpoint} holds no optimizer, so the training would start with a fresh one",
            "take another checkpoint; they hold it unless `training.save_only_model` is set",
        )
    names = ["rng_state.pth"] if ranks is None else [f"rng_state_{rank}.pth" for rank in ranks]
    missing = [name for name in names if not (checkpoint / name).is_file()]
    if missing:
        raise UsageError(
            f"{checkpoint} lacks {', '.join(missing)}, the random state of a process",
            "copy it there "
            "from the machine that wrote it, or take another checkpoint; --force resumes without it",
        )
    if needs_reference and not (checkpoint / REFERENCE).is_file():
        raise UsageError(
            f"{checkpoint} lacks {REFERENCE}, the reference model that `training.sync_ref_model` has changed; "
            "fsdp2 and zero3 do not save it, nor did earlier versions",
            "start a new run; --force resumes with the initial reference model",
        )


def find_trained(run: RunFolder, checkpoint: str | None) -> list[tuple[str, Path]]:
    """Return the names and folders of models that a run left behind; raises `UsageError` if there are none.

    `checkpoint` is a step, `last`, `best` or `all`; None is the final model.
    """
    if checkpoint is None:
        if not run.model.is_dir():
            raise UsageError(
                f"{run.path} has no final model{_list_checkpoints(run)}",
                "name a checkpoint with --checkpoint N, or finish the run",
            )
        return [("final", run.model)]
    known = whole_checkpoints(run)
    if checkpoint == "best":
        return [find_best(run, known)]
    chosen = [step for step in known if checkpoint in ("all", str(step))]
    if checkpoint == "last":
        chosen = [*known][-1:]
    if not known:
        raise UsageError(
            f"{run.path} has no complete checkpoint",
            "leave --checkpoint out for the final model, or train with `training.save_steps`",
        )
    if not chosen:
        raise UsageError(
            f"{run.path} has no checkpoint `{checkpoint}`{_list_checkpoints(run)}",
            "--checkpoint N, all or best",
        )
    return [(f"checkpoint-{step}", known[step]) for step in chosen]


def find_model(run: RunFolder, checkpoint: str | None) -> tuple[str, Path]:
    """Return one model of a run as `find_trained` does; raises `UsageError` for `all` too."""
    if checkpoint == "all":
        listed = _list_checkpoints(run)
        raise UsageError(f"one model is taken at a time{listed}", "--checkpoint N or best")
    (model,) = find_trained(run, checkpoint)
    return model


def find_best(run: RunFolder, known: Mapping[int, Path]) -> tuple[str, Path]:
    """Return the best of the complete checkpoints; raises `UsageError` if that is not known."""
    state = read_file(known[max(known)] / STATE, TrainerState) if known else {}
    name = Path(str(state.get("best_model_checkpoint"))).name
    for path in known.values():
        if path.name == name:
            return name, path
    raise UsageError(
        f"{run.path} does not say which checkpoint is best{_list_checkpoints(run)}",
        "--checkpoint N; a run that evaluates while it trains (`evaluation.during`, or "
        "`training.eval_strategy`) knows it",
    )


def _list_checkpoints(run: RunFolder) -> str:
    known = whole_checkpoints(run)
    return f" (checkpoints: {', '.join(map(str, known))})" if known else " (and no checkpoints)"


def rewind(run: RunFolder, step: int) -> None:
    """Take a run back to a checkpoint, or with step 0 to its beginning, so that what follows continues from there.

    Nothing is deleted: what the last attempt did after the step moves to `undone/` in its logs, beside a copy of
    what the next attempt replaces, so that `restore` can bring it back.
    """
    undone = run.attempt(run.attempts) / "undone"
    # The report of the last attempt would pass for that of the next, if that is killed.
    later = [run.model, run.report]
    if not run.shares_checkpoints:
        # What a killed process was writing.
        shutil.rmtree(run.checkpoints / STAGING, ignore_errors=True)
        later += [path for number, path in whole_checkpoints(run).items() if number > step]
    for path in (run.status, run.resolved, run.manifest, run.plan, run.resumption):
        if path.is_file():
            copy = undone / path.relative_to(run.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    logs = _logs(run)
    if step or run.warmup.is_dir():
        for log in logs:
            _cut(log, step, undone / log.relative_to(run.path))
        later += sorted(run.evaluations.glob("after.*"))
        during = (run.evaluations / DURING).glob("*/*.json*")
        later += [each for each in during if each.stem.isdecimal() and int(each.stem) > step]
    else:
        later += [*logs, run.evaluations]
    if not step:
        run.resumption.unlink(missing_ok=True)
    _move(later, run.path, undone)
    write_json(
        undone / _KEPT, {str(log.relative_to(run.path)): log.stat().st_size for log in _logs(run)}
    )
    for path in (run.stop_request, *run.worker_pids().values()):
        path.unlink(missing_ok=True)


def restore(run: RunFolder) -> None:
    """Undo the `rewind` to a checkpoint with which the newest attempt began; its own logs stay."""
    undone = run.attempt(run.attempts - 1) / "undone"
    kept = read_file(undone / _KEPT, dict[str, int], missing={})
    (undone / _KEPT).unlink()
    for log in _logs(run):
        os.truncate(log, kept.get(str(log.relative_to(run.path)), 0))
    run.resumption.unlink(missing_ok=True)
    for path in [path for path in undone.rglob("*") if path.is_file()]:
        target = run.path / path.relative_to(undone)
        if target in _logs(run):
            with target.open("ab") as end:
                end.write(path.read_bytes())
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)
    shutil.rmtree(undone)


def _logs(run: RunFolder) -> list[Path]:
    return [log for log in (run.metrics, *sorted(run.completions.glob("*.jsonl"))) if log.is_file()]


def _cut(log: Path, step: int, undone: Path) -> None:
    """Move the records after a step, which are the end of the log, to another file."""
    with log.open("rb") as lines:
        kept = 0
        for line in lines:
            if _is_after(line, step):
                break
            kept += len(line)
        else:
            return
        undone.parent.mkdir(parents=True, exist_ok=True)
        lines.seek(kept)
        with undone.open("wb") as rest:
            shutil.copyfileobj(lines, rest)
            rest.flush()
            os.fsync(rest.fileno())
    os.truncate(log, kept)


def _is_after(line: bytes, step: int) -> bool:
    """Return whether a record, or the torn end of one, is of a later step.

    Evaluations at step 0 count: no checkpoint holds their metrics, so they are logged once more.
    """
    try:
        record = parse_json(line)
        repeated = not step and record.get("event") == "eval"
        return bool(repeated or (record.get("step") or 0) > step or record.get("when") == "after")
    except (ValueError, AttributeError, TypeError):
        return True


def _move(paths: Iterable[Path], root: Path, target: Path) -> None:
    for path in paths:
        if path.exists():
            moved = target / path.relative_to(root)
            moved.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, moved)
