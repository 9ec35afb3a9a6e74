"""Stops a training where a rule of `training.stop_when` finds something, at the same step on every process.

Owns when a finding counts. What rules look for is `grpo_cli.analysis.diagnosis`'s.
"""

from collections.abc import Mapping
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_cli.analysis.diagnosis.diagnosis import diagnose
from grpo_cli.analysis.diagnosis.history import History, read_history
from grpo_cli.analysis.diagnosis.symptom import Symptom
from grpo_cli.errors import RunError
from grpo_cli.train.session import Session
from grpo_cli.train.stopping import StoppedByRule

_FATAL = "nan_loss"
"""The rule after which there is nothing worth a checkpoint."""


class RuleStop(TrainerCallback):
    """Looks at every record of `metrics.jsonl` (main process), and stops all processes together."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.symptom: Symptom | None = None
        """What the loop was ended for."""
        self._history = History(session.recipe)
        self._records = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Takes a record as it is written."""
        self._history.add(record)
        self._records += record.get("event") == "train"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Reads what an earlier attempt has left: rules compare with the beginning of the run."""
        if state.is_world_process_zero:
            self._history = read_history(self.session.folder)
            # There will be others by the time a rule speaks.
            self._history.checkpoints = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Saves and stops after the step whose record shows it.

        Raises:
            RunError: The loss is no number, so that this step must not be saved.
        """
        if "loss" not in (logs or {}):
            return
        # Only the main process has the records; the others wait here for what it says.
        found: list[Symptom | None] = [self._find()]
        self.symptom = broadcast_object_list(found)[0]
        if self.symptom is None:
            return
        if self.symptom.rule == _FATAL:
            raise RunError(f"{self.symptom}. The last checkpoint is from before")
        control.should_save = True
        control.should_training_stop = True

    def raise_if_found(self) -> None:
        """Ends a training whose loop a rule has ended.

        Raises:
            StoppedByRule: With what was seen and what mends it.
        """
        found = self.symptom
        if found is not None:
            raise StoppedByRule(
                found.rule,
                f"stopped by the rule {found.rule} after step {found.step}, which is saved: {found.seen}. "
                f"{found.why} Fix: {found.fix}. Unless that changes, it stops so again; "
                "`--set training.stop_when=[]` lets it go on",
            )

    def _find(self) -> Symptom | None:
        """The worst finding that this attempt's own records show: an earlier attempt was stopped for its own."""
        names = self.session.recipe.training.stop_when
        found = diagnose(self._history, names) if self._records else []
        return next((each for each in found if each.window <= self._records), None)
