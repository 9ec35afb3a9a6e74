"""Callbacks of the training loop: records and status, requests and rules to stop, time, and trackers."""

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import broadcast_object_list
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from grpo_cli.analysis.diagnosis.diagnosis import diagnose
from grpo_cli.analysis.diagnosis.history import History, read_history
from grpo_cli.analysis.diagnosis.rule import Symptom
from grpo_cli.errors import RunError
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.run import Run
from grpo_cli.runs.status import StatusFile
from grpo_cli.runs.trackers import read_trackers, write_trackers
from grpo_cli.training.session import Session, Stopped, StoppedByRule
from grpo_cli.upstream.trl import NUM_TOKENS

_FATAL = "nan_loss"
"""The rule after which nothing is worth a checkpoint."""
_REASON_LENGTH = 200
_EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


class RunCallback(TrainerCallback):
    """Writes metrics and status (main process); ends the loop on request or by a rule (all)."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._requested = False
        self._symptom: Symptom | None = None
        self._history = History(session.recipe)
        self._records = 0
        """Of training steps in this attempt."""
        self._saves_epoch = False
        """Whether this step's checkpoint waits until the epoch was evaluated and logged."""
        self._tokens = 0.0
        self._started: float | None = None
        self._stepping_s = 0.0
        """Spent in steps since the last record with tokens, without evaluation and saving."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Report the number of planned steps; read earlier attempts, since rules compare with the beginning."""
        self._tokens = float(state.num_input_tokens_seen)
        self.session.heartbeat.beat()
        self._update_status(state, phase="training", total_steps=state.max_steps)
        if self._rules and state.is_world_process_zero:
            self._history = read_history(Run(self.session.folder))
            # There will be others by the time a rule applies.
            self._history.checkpoints = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock of the step."""
        self._started = time.monotonic()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Give a sign of life after each micro-step, and each batch of TRL's evaluation."""
        self.session.heartbeat.beat()

    on_prediction_step = on_substep_end

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop all processes at this step if any of them was requested to."""
        if self._started is not None:
            self._stepping_s += time.monotonic() - self._started
        self.session.heartbeat.beat()
        self._update_status(state)
        self._obey_request(control)
        # A checkpoint comes last in its step: a resumed run begins with the next epoch.
        epochs = IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy)
        if epochs and _ends_epoch(state):
            self._saves_epoch, control.should_save = control.should_save, False

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save what was put off; do nothing else for an epoch that was cut short."""
        if not _ends_epoch(state):
            control.should_log = control.should_evaluate = control.should_save = False
        control.should_save = control.should_save or self._saves_epoch
        self._saves_epoch = False

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """Obey a request to stop, and save a model that is better than all before, also between checkpoints."""
        self._obey_request(control)
        value, best = (metrics or {}).get(args.metric_for_best_model), state.best_metric
        if value is None or args.save_strategy == SaveStrategy.NO:
            return
        better = best is None or (value > best if args.greater_is_better else value < best)
        control.should_save = control.should_save or better

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any
    ) -> None:
        """Append a record to `metrics.jsonl`; save and stop if a rule applies to it.

        Raises:
            RunError: The loss or the gradient is not finite, so this step must not be saved.
        """
        if logs and state.is_world_process_zero:
            self._append(state, logs)
            # In fp16 the gradient scaler skips such steps itself.
            if not (args.fp16 or math.isfinite(logs.get("grad_norm", 0.0))):
                raise RunError(
                    f"the gradient of step {state.global_step} is {logs['grad_norm']}, which ruins the weights; "
                    "the last checkpoint is from before. Fix: a lower training.learning_rate, or a lower "
                    "training.max_grad_norm"
                )
        if not self._rules or "loss" not in (logs or {}):
            return
        # Only the main process has the records; the others wait here.
        self._symptom = broadcast_object_list([self._find_symptom()])[0]
        if self._symptom is not None:
            if self._symptom.rule == _FATAL:
                raise RunError(f"{self._symptom}. The last checkpoint is from before")
            control.should_save = control.should_training_stop = True

    def _obey_request(self, control: TrainerControl) -> None:
        """Stop all processes after this step, which is saved, if any of them was requested to."""
        if is_stop_requested(self.session):
            self._requested = control.should_save = control.should_training_stop = True

    def raise_if_stopped(self, state: TrainerState) -> None:
        """Raise `Stopped` if a request or a rule ended the loop."""
        if self._requested:
            raise Stopped(f"stopped after step {state.global_step}, which is saved")
        if (symptom := self._symptom) is not None:
            raise StoppedByRule(
                symptom.rule,
                f"stopped by the rule {symptom.rule} after step {symptom.step}, which is saved: {symptom.seen}. "
                f"{symptom.why} Fix: {symptom.fix}. Otherwise the rule stops it again; "
                "`--set training.stop_when=[]` turns it off",
            )

    @property
    def _rules(self) -> Any:
        return self.session.recipe.training.stop_when

    def _append(self, state: TrainerState, logs: dict[str, Any]) -> None:
        evaluated = any(name.startswith("eval_") for name in logs)
        event = "train" if "loss" in logs else "eval" if evaluated else "end"
        record = {"event": event, "step": state.global_step, "total_steps": state.max_steps, **logs}
        if event == "train":
            record["tokens_per_s"] = self._tokens_per_s(logs.get(NUM_TOKENS))
            self._records += 1
        append_record(self.session.folder.metrics, record)
        if self._rules:
            self._history.metrics.add(record)

    def _find_symptom(self) -> Symptom | None:
        """The worst finding that this attempt's own records show; an earlier attempt stopped for its own."""
        symptoms = diagnose(self._history, self._rules) if self._records else []
        return next((each for each in symptoms if each.window <= self._records), None)

    def _tokens_per_s(self, num_tokens: float | None) -> float | None:
        """Pace since the last record with tokens; steps that sample nothing have none."""
        if num_tokens is None:
            return None
        seconds, self._stepping_s = self._stepping_s, 0.0
        tokens, self._tokens = num_tokens - self._tokens, num_tokens
        # A resumed run may log the number that its checkpoint holds once more.
        return tokens / seconds if seconds > 0 and tokens > 0 else None

    def _update_status(self, state: TrainerState, **changes: Any) -> None:
        if state.is_world_process_zero:
            StatusFile(self.session.folder.status).update(step=state.global_step, **changes)


class EarlyStoppingCallback(transformers.EarlyStoppingCallback):
    """Stops by a metric of a held-out set too, which needs no `eval_strategy` and is not in every evaluation.

    Checkpoints hold its state under the name of the class it comes from.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Require no `eval_strategy`."""

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """Compare the metric with the best so far, if it was evaluated."""
        if args.metric_for_best_model in (metrics or {}):
            super().on_evaluate(args, state, control, metrics)


def is_stop_requested(session: Session) -> bool:
    """Return whether any process was requested to stop: a maximum over all, so that they agree."""
    seen = torch.tensor(float(session.stop.seen_here()), device=session.processes.device)
    if session.processes.num_processes > 1:
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
    return bool(seen.item())


def _ends_epoch(state: TrainerState) -> bool:
    return state.global_step >= state.max_steps or float(state.epoch or 0.0).is_integer()


class PhaseClock(TrainerCallback):
    """Seconds that this process's optimizer steps spend in each phase; learning is the rest."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._wall_s = 0.0
        self._steps = 0
        self._started: float | None = None

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - started)

    def add(self, phase: str, seconds: float, *, out_of: str | None = None) -> None:
        """Add seconds to a phase, taking them out of another; only during a step."""
        if self._started is None:
            return
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        if out_of is not None:
            self._seconds[out_of] = self._seconds.get(out_of, 0.0) - seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the clock: saving, logging and evaluation do not count."""
        if self._started is not None:
            self._wall_s += time.perf_counter() - self._started
            self._started = None
            self._steps += 1

    def take(self) -> dict[str, float]:
        """Return the mean seconds of each phase since the last call, as `time/PHASE`.

        Empty if sampling was never timed: the rest would be mistaken for learning.
        """
        if not self._steps or "sampling" not in self._seconds:
            return {}
        learning = max(self._wall_s - sum(self._seconds.values()), 0.0)
        phases = {**self._seconds, "learning": learning}
        steps, self._steps, self._wall_s = self._steps, 0, 0.0
        # The names stay: a step without sampling spends 0 seconds on it.
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return {f"time/{phase}": seconds / steps for phase, seconds in phases.items()}


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
                        f"{name} could not start a run ({seen}). Fix: follow its message, or train "
                        f"without it: remove `{name}` from logging.report_to"
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
    """Have the command warn at the end of the run."""
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
