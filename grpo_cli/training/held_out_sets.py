"""Evaluates the held-out sets of `evaluation.during`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from grpo_cli.errors import RunError
from grpo_cli.fast.trainer import shares_weights
from grpo_cli.recipe.evaluation import HeldOutSetConfig
from grpo_cli.runs.metrics import DURING
from grpo_cli.training.build import Inputs
from grpo_cli.training.callbacks import is_stop_requested
from grpo_cli.training.measurement import INTERVALS, Measurer, make_measurer, select_rows
from grpo_cli.training.session import Session, Stopped

_RUNTIME = "runtime"
"""Seconds, which are logged with the metrics of every set."""


@dataclass(frozen=True)
class HeldOutSet:
    """One entry of `evaluation.during`."""

    config: HeldOutSetConfig
    measurer: Measurer
    at_ends: bool
    """Whether it is measured before the first and after the last step too; otherwise others do that."""

    def is_due(self, step: int, last: int) -> bool:
        """Return whether it is evaluated at a step."""
        return (self.at_ends and step in (0, last)) or (step > 0 and step % self.config.every == 0)


class HeldOutSets(TrainerCallback):
    """Evaluates each set when it is due; what training samples does not depend on it."""

    def __init__(self, session: Session, trainer: Any, sets: Sequence[HeldOutSet]) -> None:
        self._session, self._trainer, self._sets = session, trainer, sets
        self._due: list[HeldOutSet] = []
        self.only_these = False
        """Whether TRL's own evaluation is not due as well."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Evaluate before the first step; what a checkpoint lacks was evaluated as its state was loaded.

        Raises:
            Stopped: A stop was requested.
        """
        if self.find_missing(state):
            self._trainer.evaluate_sets()
            self.raise_if_stopped(state)

    def find_missing(self, state: TrainerState) -> bool:
        """Return whether sets are due whose metrics the state does not hold; these are evaluated next."""
        step = state.global_step
        logged = {name for each in state.log_history if each["step"] == step for name in each}
        due = self._find_due(state)
        self._due = [each for each in due if f"{each.config.prefix}{_RUNTIME}" not in logged]
        return bool(self._due)

    def raise_if_stopped(self, state: TrainerState) -> None:
        """Raise `Stopped` if a stop was requested during an evaluation outside of training."""
        if is_stop_requested(self._session):
            raise Stopped(f"stopped after step {state.global_step}, which is saved")

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Let the trainer evaluate if a set is due."""
        self._due = self._find_due(state)
        self.only_these = bool(self._due) and not control.should_evaluate
        control.should_evaluate = control.should_evaluate or bool(self._due)

    def _find_due(self, state: TrainerState) -> list[HeldOutSet]:
        return [each for each in self._sets if each.is_due(state.global_step, state.max_steps)]

    def evaluate(self) -> dict[str, float]:
        """Evaluate what is due; return its metrics as they are logged.

        If a stop is requested meanwhile, a resumed run evaluates the rest before its first step.
        """
        due, self._due, self.only_these = self._due, [], False
        step = self._trainer.state.global_step
        metrics: dict[str, float] = {}
        for each in due:
            try:
                metrics |= self._measure(each, step)
            except Stopped:
                break
        self._session.show(phase="training")
        return metrics

    def _measure(self, held_out: HeldOutSet, step: int) -> dict[str, float]:
        config, measurer, trainer = held_out.config, held_out.measurer, self._trainer
        name, phase = f"{DURING}/{config.label}/{step}", f"measuring {config.label} at step {step}"
        result = measurer.write(name, phase, trainer.model, trainer.tokenizer)
        metrics = {name: each["value"] for name, each in result[INTERVALS].items()}
        known = {name: value for name, value in metrics.items() if value is not None}
        known[_RUNTIME] = result["seconds"]
        return {f"{config.prefix}{name}": value for name, value in known.items()}


def build_held_out_sets(session: Session, inputs: Inputs, trainer: Any) -> HeldOutSets | None:
    """Return the sets of `evaluation.during`; None if no process has a model that it could sample from.

    Raises:
        RunError: A set has no rows.
    """
    if shares_weights(trainer):
        return None
    evaluation, sets = session.recipe.evaluation, []
    for config in evaluation.during:
        settings = evaluation.settings_of(config)
        rows = select_rows(inputs.data.eval, settings.limit, config.source)
        if rows is None:
            raise RunError(
                f"evaluation.during: `{config.label}` has no held-out rows",
                "hold some out, or remove it",
            )
        measurer = make_measurer(session, inputs, trainer, rows, settings, source=config.source)
        sets.append(HeldOutSet(config, measurer, at_ends=not evaluation.repeats(config)))
    return HeldOutSets(session, trainer, sets)
