"""Which of a run's models is meant: the final one, one checkpoint, the best, or all.

Owns the names `--checkpoint` takes. Does not look into the weights.
"""

from pathlib import Path

from grpo_cli.errors import UsageError
from grpo_cli.runs.checkpoints import whole_checkpoints
from grpo_cli.runs.files import read_object
from grpo_cli.runs.folder import RunFolder


def find_trained(run: RunFolder, checkpoint: str | None) -> list[tuple[str, Path]]:
    """The names and folders of the models that a run left behind.

    Args:
        run: The run.
        checkpoint: A step, `best` or `all`; None is the final model.

    Raises:
        UsageError: There is no such model.
    """
    if checkpoint is None:
        if not run.model.is_dir():
            raise UsageError(
                f"{run.path} has no final model{_say_checkpoints(run)}. "
                "Fix: name a checkpoint with --checkpoint N, or finish the run"
            )
        return [("final", run.model)]
    known = whole_checkpoints(run)
    if checkpoint == "best":
        return [_find_best(run, known)]
    if checkpoint == "all":
        chosen = sorted(known)
    else:
        chosen = [int(checkpoint)] if _is_step(checkpoint) and int(checkpoint) in known else []
    if not chosen:
        raise UsageError(
            f"{run.path} has no checkpoint `{checkpoint}`{_say_checkpoints(run)}. "
            "Fix: --checkpoint N, all or best"
        )
    return [(f"checkpoint-{step}", known[step]) for step in chosen]


def find_part(run: RunFolder, checkpoint: str | None = None, *, model: bool = False) -> Path:
    """The folder of a run, of one of its checkpoints, or of its final model.

    Args:
        run: The run.
        checkpoint: A step, `best` or `last`.
        model: Whether the final model is meant.

    Raises:
        UsageError: There is no such part.
    """
    if checkpoint is None and not model:
        return run.path
    if checkpoint == "last":
        known = whole_checkpoints(run)
        if not known:
            raise UsageError(f"{run.path} has no whole checkpoint. Fix: name another run")
        return known[max(known)]
    if checkpoint == "all":
        raise UsageError("--checkpoint all is several. Fix: last, best or a step")
    [(_, found)] = find_trained(run, checkpoint)
    return found


def _find_best(run: RunFolder, known: dict[int, Path]) -> tuple[str, Path]:
    """The checkpoint that the trainer's own state calls the best."""
    if known:
        name = _read_best(known[max(known)] / "trainer_state.json")
        found = {path.name: path for path in known.values()}
        if name in found:
            return name, found[name]
    raise UsageError(
        f"{run.path} does not say which checkpoint is best{_say_checkpoints(run)}. "
        "Fix: --checkpoint N; a run that evaluates while it trains (`training.eval_strategy`) knows it"
    )


def _read_best(state: Path) -> str | None:
    """The name of the best checkpoint's folder; None where the state does not say it."""
    try:
        return Path(read_object(state)["best_model_checkpoint"]).name
    except (KeyError, TypeError):
        return None


def _is_step(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _say_checkpoints(run: RunFolder) -> str:
    known = sorted(whole_checkpoints(run))
    return f" (checkpoints: {', '.join(map(str, known))})" if known else " (and no checkpoints)"
