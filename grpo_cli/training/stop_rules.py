"""`training.stop_when`: rules of `grpo diagnose` that end a training."""

from typing import Any

from accelerate.utils import broadcast_object_list

from grpo_cli.analysis.diagnosis.diagnosis import diagnose
from grpo_cli.analysis.diagnosis.history import History, read_history
from grpo_cli.analysis.diagnosis.rule import Symptom
from grpo_cli.errors import RunError
from grpo_cli.runs.run import Run
from grpo_cli.training.session import Session, Stopped

_FATAL = "nan_loss"
"""The rule after which nothing is worth a checkpoint."""


class StopRules:
    """The rules of a recipe, applied to its records as they are written by the main process."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._symptom: Symptom | None = None
        self._history = History(session.recipe)
        self._records = 0
        """Of training steps in this attempt."""

    def begin(self) -> None:
        """Read earlier attempts, since rules compare with the beginning."""
        self._history = read_history(Run(self._session.folder))
        # There will be others by the time a rule applies.
        self._history.checkpoints = None

    def add(self, record: dict[str, Any]) -> None:
        """Take a record of `metrics.jsonl`."""
        self._records += record["event"] == "train"
        self._history.metrics.extend([record])

    def apply(self) -> bool:
        """Return whether a rule ends the training; all processes take part.

        Raises:
            RunError: The loss is not a number, so this step must not be saved.
        """
        # Only the main process has the records; the others wait here.
        self._symptom = broadcast_object_list([self._find_symptom()])[0]
        if self._symptom is not None and self._symptom.rule == _FATAL:
            raise RunError(f"{self._symptom}. The last checkpoint is from before")
        return self._symptom is not None

    def _find_symptom(self) -> Symptom | None:
        """Return the worst finding that this attempt's own records show; an earlier one stopped for its own."""
        rules = self._session.recipe.training.stop_when
        symptoms = diagnose(self._history, rules) if self._records else []
        return next((each for each in symptoms if each.window <= self._records), None)

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` if a rule ended the loop."""
        if (symptom := self._symptom) is not None:
            raise Stopped(
                f"stopped by the rule {symptom.rule} after step {symptom.step}, which is saved: {symptom.seen}. "
                f"{symptom.why.rstrip('.')}",
                f"{symptom.fix}. Otherwise the rule stops it again; "
                "`--set training.stop_when=[]` turns it off",
                symptom.rule,
            )
