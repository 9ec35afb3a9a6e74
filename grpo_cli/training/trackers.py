"""Trackers such as W&B: one that fails does not end the training, and their runs are recorded."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from grpo_cli.errors import RunError
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trackers import read_trackers, write_trackers
from grpo_cli.training.session import Session

_REASON_LENGTH = 200
_EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


def track(trainer: Trainer, session: Session) -> None:
    """Keep trackers that fail from ending the training, and record their runs; call before training."""
    names = {kind: name for name, kind in INTEGRATION_TO_CALLBACK.items()}
    tracked = []
    for callback in trainer.callback_handler.callbacks:
        # The exact class: some are subclasses of others.
        if (name := names.get(type(callback))) is not None:
            _guard(callback, name, session.folder)
            tracked.append(name)
    if tracked:
        trainer.add_callback(TrackerRuns(session, tracked))
    # Otherwise TRL sends the time of every micro-step to them (`ProfilingContext._log_metrics` of trl 1.16),
    # unguarded and in between the steps. Our records have these times.
    trainer.args.report_to = []


def _guard(callback: TrainerCallback, name: str, folder: RunFolder) -> None:
    """Silence a tracker once it has failed; if it cannot start, when nothing is lost yet, end the run."""
    failed = False

    def guarded(event: str, act: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(act)
        def run(*args: Any, **options: Any) -> Any:
            nonlocal failed
            try:
                return None if failed else act(*args, **options)
            except Exception as error:
                seen = f"{type(error).__name__}: {error}".splitlines()[0][:_REASON_LENGTH]
                if event == "on_train_begin":
                    raise RunError(
                        f"{name} could not start a run ({seen})",
                        f"follow its message, or train without it: remove `{name}` from logging.report_to",
                    ) from error
                failed = True
                _record_failure(
                    folder, name, f"failed in {event}; it got nothing after that ({seen})"
                )
                return None

        return run

    for event in _EVENTS:
        setattr(callback, event, guarded(event, getattr(callback, event)))


def _record_failure(folder: RunFolder, name: str, why: str) -> None:
    """Record a failure, of which the command warns at the end of the run."""
    print(f"warning: {name} {why}", file=sys.stderr, flush=True)
    failures = {name: why, **read_trackers(folder, "failures")}
    # A full disk may be why the tracker failed.
    with contextlib.suppress(OSError):
        write_trackers(folder, read_trackers(folder, "runs"), failures)


class TrackerRuns(TrainerCallback):
    """Records the trackers' runs when they begin, and gives W&B and Trackio the recipe (main process)."""

    def __init__(self, session: Session, trackers: list[str]) -> None:
        self._session = session
        self._trackers = trackers

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Run after the trackers' own callbacks, which were added before."""
        if not state.is_world_process_zero:
            return
        folder, recipe = self._session.folder, self._session.recipe.model_dump(mode="json")
        runs = read_trackers(folder, "runs") if folder.read_resumption() else {}
        if "tensorboard" in self._trackers:
            written = Path(os.environ["TENSORBOARD_LOGGING_DIR"])
            is_inside = written.is_relative_to(folder.path)
            written = written.relative_to(folder.path) if is_inside else written
            runs["tensorboard"] = {"folder": str(written)}
        if "wandb" in self._trackers:
            import wandb

            if wandb.run is not None and not wandb.run.disabled:
                wandb.run.config.update({"recipe": recipe}, allow_val_change=True)
                names = ("id", "project", "entity", "url")
                runs["wandb"] = {name: getattr(wandb.run, name) for name in names}
        if "trackio" in self._trackers:
            import trackio

            trackio.config.update({"recipe": recipe}, allow_val_change=True)
            runs["trackio"] = {"project": args.project, "name": args.run_name}
        if "mlflow" in self._trackers:
            import mlflow

            if (run := mlflow.active_run()) is not None:
                runs["mlflow"] = {"id": run.info.run_id}
        write_trackers(folder, runs, {})
