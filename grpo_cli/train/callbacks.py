"""What we do inside TRL's training loop, through `TrainerCallback` alone."""

import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.status import StatusFile
from grpo_cli.train.session import Session


class RunCallback(TrainerCallback):
    """Writes metrics and status as they come (main process), and stops when asked (all)."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.stopped = False
        """Whether the loop ended because somebody asked."""
        self._tokens = 0.0
        self._since = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Says how many steps are planned."""
        self._since = time.monotonic()
        self._update_status(state, phase="training", total_steps=state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stops all processes at this step where one of them was asked to."""
        self._update_status(state)
        if self._asked_anywhere():
            self.stopped = True
            control.should_save = True
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Appends a record to `metrics.jsonl`."""
        if not state.is_world_process_zero or not logs:
            return
        event = "train" if "loss" in logs else "eval" if "eval_loss" in logs else "end"
        record = {"event": event, "step": state.global_step, "total_steps": state.max_steps, **logs}
        if event == "train":
            record["tokens_per_s"] = self._measure_pace(logs.get("num_tokens"))
        append_record(self.session.folder.metrics, record)

    def _measure_pace(self, num_tokens: float | None) -> float | None:
        """Tokens a second since the last record: prompts and completions, over all processes."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        if num_tokens is None:
            return None
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
