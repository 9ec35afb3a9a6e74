"""Callbacks of the training loop: records and status, requests to stop, and early stopping."""

import math
import time
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from grpo_cli.errors import RunError
from grpo_cli.runs.metrics import append_record
from grpo_cli.training.session import Session, Stopped
from grpo_cli.upstream.trl import NUM_TOKENS

if TYPE_CHECKING:
    from grpo_cli.training.stop_rules import StopRules


class RunCallback(TrainerCallback):
    """Writes metrics and status (main process); ends the loop on request or by a rule (all)."""

    def __init__(self, session: Session, rules: "StopRules | None" = None) -> None:
        """Make a callback; `rules` may end the loop too."""
        self.session = session
        self._rules = rules
        self._requested = False
        self._saves_epoch = False
        """Whether this step's checkpoint waits until the epoch was evaluated and logged."""
        self._tokens = 0.0
        self._started: float | None = None
        self._stepping_s = 0.0
        """Spent in steps since the last record with tokens, without evaluation and saving."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Report the number of planned steps."""
        self._tokens = float(state.num_input_tokens_seen)
        self.session.heartbeat.beat()
        self._update_status(state, phase="training", total_steps=state.max_steps)
        if self._rules and state.is_world_process_zero:
            self._rules.begin()

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
                    "the last checkpoint is from before",
                    "a lower training.learning_rate, or a lower training.max_grad_norm",
                )
        if self._rules and "loss" in (logs or {}) and self._rules.apply():
            control.should_save = control.should_training_stop = True

    def _obey_request(self, control: TrainerControl) -> None:
        """Stop all processes after this step, which is saved, if any of them was requested to."""
        if is_stop_requested(self.session):
            self._requested = control.should_save = control.should_training_stop = True

    def raise_if_stopped(self, state: TrainerState) -> None:
        """Raise `Stopped` if a request or a rule ended the loop."""
        if self._requested:
            raise Stopped(f"stopped after step {state.global_step}, which is saved")
        if self._rules:
            self._rules.raise_if_stopped()

    def _append(self, state: TrainerState, logs: dict[str, Any]) -> None:
        evaluated = any(name.startswith("eval_") for name in logs)
        event = "train" if "loss" in logs else "eval" if evaluated else "end"
        record = {"event": event, "step": state.global_step, "total_steps": state.max_steps, **logs}
        if event == "train":
            record["tokens_per_s"] = self._tokens_per_s(logs.get(NUM_TOKENS))
        append_record(self.session.folder.metrics, record)
        if self._rules:
            self._rules.add(record)

    def _tokens_per_s(self, num_tokens: float | None) -> float | None:
        """Pace since the last record with tokens; steps that sample nothing have none."""
        if num_tokens is None:
            return None
        seconds, self._stepping_s = self._stepping_s, 0.0
        tokens, self._tokens = num_tokens - self._tokens, num_tokens
        # A resumed run may log the number that its checkpoint holds once more.
        return tokens / seconds if seconds > 0 and tokens > 0 else None

    def _update_status(self, state: TrainerState, **changes: Any) -> None:
        self.session.show(step=state.global_step, **changes)


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
