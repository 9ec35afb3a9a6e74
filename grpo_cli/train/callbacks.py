"""What we do inside TRL's training loop, through `TrainerCallback` alone."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from grpo_cli.errors import RunError
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.status import StatusFile
from grpo_cli.train.session import Session


class RunCallback(TrainerCallback):
    """Writes metrics and status as they come (main process), and stops when asked (all)."""

    def __init__(
        self, session: Session, listeners: Sequence[Callable[[Mapping[str, Any]], None]] = ()
    ) -> None:
        """Makes the callback.

        Args:
            session: Of the run.
            listeners: Are told of every record that is written (main process).
        """
        self.session = session
        self.listeners = listeners
        self.stopped = False
        """Whether the loop ended because somebody asked."""
        self._saves_epoch = False
        """Whether the checkpoint of this step waits for what follows the epoch."""
        self._tokens = 0.0
        self._began: float | None = None
        self._stepping_s = 0.0
        """Spent on the steps since the last record with tokens; evaluating and saving are no part of it."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Says how many steps are planned."""
        # A run that goes on has counted before.
        self._tokens = float(state.num_input_tokens_seen)
        self.session.heartbeat.beat()
        self._update_status(state, phase="training", total_steps=state.max_steps)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Starts the clock of the step."""
        self._began = time.monotonic()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Gives a sign of life after each micro-step."""
        self.session.heartbeat.beat()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Gives a sign of life after each batch of TRL's evaluation."""
        self.session.heartbeat.beat()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stops all processes at this step where one of them was asked to."""
        if self._began is not None:
            self._stepping_s += time.monotonic() - self._began
        self.session.heartbeat.beat()
        self._update_status(state)
        if self._asked_anywhere():
            self.stopped = True
            control.should_save = True
            control.should_training_stop = True
        # A checkpoint is the last of its step: a run that goes on begins with the next epoch.
        epochs = IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy)
        if epochs and self._ends_epoch(state):
            self._saves_epoch, control.should_save = control.should_save, False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Saves what was put off; does nothing else for an epoch that was cut short."""
        if not self._ends_epoch(state):
            control.should_log = control.should_evaluate = control.should_save = False
        control.should_save = control.should_save or self._saves_epoch
        self._saves_epoch = False

    def _ends_epoch(self, state: TrainerState) -> bool:
        """Whether the step is the last of its epoch, or of all."""
        return state.global_step >= state.max_steps or float(state.epoch or 0.0).is_integer()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Saves a model that is better than all before, also between two checkpoints."""
        value = (metrics or {}).get(
            f"eval_{(args.metric_for_best_model or '').removeprefix('eval_')}"
        )
        if value is None or args.save_strategy == SaveStrategy.NO:
            return
        best = state.best_metric
        better = best is None or (value > best if args.greater_is_better else value < best)
        control.should_save = control.should_save or better

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Appends a record to `metrics.jsonl`; ends a training whose weights are lost.

        Raises:
            RunError: The gradient is not finite.
        """
        if not state.is_world_process_zero or not logs:
            return
        evaluated = any(name.startswith("eval_") for name in logs)
        event = "train" if "loss" in logs else "eval" if evaluated else "end"
        record = {"event": event, "step": state.global_step, "total_steps": state.max_steps, **logs}
        if event == "train":
            record["tokens_per_s"] = self._measure_pace(logs.get("num_tokens"))
        append_record(self.session.folder.metrics, record)
        for tell in self.listeners:
            tell(record)
        # In fp16 the gradient scaler skips such steps by itself.
        if not (args.fp16 or math.isfinite(logs.get("grad_norm", 0.0))):
            raise RunError(
                f"the gradient of step {state.global_step} is {logs['grad_norm']}, which ruins the weights; "
                "the last checkpoint is from before. Fix: a lower training.learning_rate, or a lower "
                "training.max_grad_norm"
            )

    def _measure_pace(self, num_tokens: float | None) -> float | None:
        """Tokens a second in the steps since the last record that has them; those that sample nothing do not."""
        if num_tokens is None:
            return None
        seconds, self._stepping_s = self._stepping_s, 0.0
        tokens, self._tokens = num_tokens - self._tokens, num_tokens
        return tokens / seconds if seconds > 0 and tokens >= 0 else None

    def _asked_anywhere(self) -> bool:
        """Whether any process was asked to stop: a maximum over all, so that they agree."""
        asked = torch.tensor(
            float(self.session.stop.seen_here()), device=self.session.processes.device
        )
        if self.session.processes.num_processes > 1:
            torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        return bool(asked.item())

    def _update_status(self, state: TrainerState, **changes: Any) -> None:
        if state.is_world_process_zero:
            StatusFile(self.session.folder.status).update(step=state.global_step, **changes)
