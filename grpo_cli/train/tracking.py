"""What our side does with the trackers that transformers drives: their runs written down, the recipe
added, and a tracker that fails in the middle of a training left behind.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from grpo_cli.errors import RunError
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trackers.contents import flatten
from grpo_cli.runs.trackers.ledger import Ledger, note_failure, read_ledger
from grpo_cli.runs.trackers.uploads import summarize
from grpo_cli.train.session import Session

_EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
_OPENING = "on_train_begin"


def track(trainer: Trainer, session: Session) -> None:
    """Guards the trainer's trackers and notes down their runs; call once, before training."""
    folder = session.folder
    found: list[str] = []
    for callback in trainer.callback_handler.callbacks:
        for name, kind in INTEGRATION_TO_CALLBACK.items():
            # Some are subclasses of others.
            if type(callback) is kind:
                _guard(callback, name, folder)
                found.append(name)
    if found:
        trainer.add_callback(LedgerCallback(session, found))
    # TRL would time every micro-step to them besides, one request each, unguarded and in between the
    # steps. Source: `ProfilingContext._log_metrics` of trl 1.16. Our records have these times.
    trainer.args.report_to = []


def _guard(callback: TrainerCallback, name: str, folder: RunFolder) -> None:
    """Has a tracker that raises once say nothing more; at the start, when nothing is lost, it ends the run."""
    failed: list[Exception] = []

    def reaped(event: str, act: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(act)
        def run(*arguments: Any, **named: Any) -> Any:
            if failed:
                return None
            try:
                return act(*arguments, **named)
            except Exception as error:
                if event == _OPENING:
                    raise RunError(
                        f"{name} could not start a run ({summarize(error)}). Fix: what it says, or train "
                        f"without it: take `{name}` out of logging.report_to"
                    ) from error
                failed.append(error)
                _say(
                    folder,
                    name,
                    f"failed in {event} and was left out from there ({summarize(error)})",
                )
                return None

        return run

    for event in _EVENTS:
        setattr(callback, event, reaped(event, getattr(callback, event)))


def _say(folder: RunFolder, name: str, why: str) -> None:
    print(f"warning: {name} {why}", file=sys.stderr, flush=True)
    note_failure(folder, name, why)


class LedgerCallback(TrainerCallback):
    """Writes down the trackers' runs as they begin, and gives them the recipe (main process)."""

    def __init__(self, session: Session, trackers: list[str]) -> None:
        self._session = session
        self._trackers = trackers

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Comes after the trackers' own, since it was added after them."""
        if not state.is_world_process_zero:
            return
        folder = self._session.folder
        runs = dict(read_ledger(folder).runs) if folder.read_resumption() else {}
        Ledger(runs).write(folder)
        recipe = self._session.recipe.model_dump(mode="json")
        for name in self._trackers:
            if name not in _OPENED:
                continue
            try:
                known = _OPENED[name](args, recipe)
            except Exception as error:
                _say(folder, name, f"did not take the recipe ({summarize(error)})")
                continue
            if known is not None:
                ledger = read_ledger(folder)
                ledger.runs[name] = known
                ledger.write(folder)


def _opened_tensorboard(args: TrainingArguments, recipe: dict[str, Any]) -> dict[str, Any]:
    return {"folder": os.environ["TENSORBOARD_LOGGING_DIR"]}


def _opened_wandb(args: TrainingArguments, recipe: dict[str, Any]) -> dict[str, Any] | None:
    import wandb

    run = wandb.run
    if run is None or run.disabled:
        return None
    run.config.update({"recipe": recipe}, allow_val_change=True)
    return {"id": run.id, "project": run.project, "entity": run.entity}


def _opened_trackio(args: TrainingArguments, recipe: dict[str, Any]) -> dict[str, Any]:
    import trackio

    trackio.config.update({"recipe": recipe}, allow_val_change=True)
    return {"project": args.project, "name": args.run_name}


def _opened_mlflow(args: TrainingArguments, recipe: dict[str, Any]) -> dict[str, Any] | None:
    import mlflow

    run = mlflow.active_run()
    if run is None:
        return None
    longest = mlflow.utils.validation.MAX_PARAM_VAL_LENGTH
    values = {name: value for name, value in flatten(recipe).items() if len(str(value)) <= longest}
    # What an earlier attempt said stands: MLflow lets no parameter change.
    known = run.data.params
    mlflow.log_params({name: value for name, value in values.items() if name not in known})
    return {"id": run.info.run_id}


_OPENED: dict[str, Callable[[TrainingArguments, dict[str, Any]], dict[str, Any] | None]] = {
    "tensorboard": _opened_tensorboard,
    "wandb": _opened_wandb,
    "trackio": _opened_trackio,
    "mlflow": _opened_mlflow,
}
"""Gives a tracker the recipe, and says what finds its run again."""
