"""Evaluates the held-out sets and the lm-eval tasks of `evaluation.during`."""

import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from grpo_cli.analysis.metrics import Metric
from grpo_cli.errors import RunError
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.recipe.evaluation import EvaluationConfig, HeldOutSetConfig
from grpo_cli.runs.files import SCHEMA_VERSION, write_json
from grpo_cli.runs.metrics import DURING, LOWER
from grpo_cli.training.callbacks import is_stop_requested
from grpo_cli.training.measurement import INTERVALS, Measurer, measure_together, select_rows
from grpo_cli.training.session import Session, Stopped

_QUANTILE = 1.96
"""Standard errors from the middle to the ends of a 95 % interval."""
_RUNTIME = "runtime"
"""Seconds, which are logged with the metrics of every set."""

_SHARE = re.compile(r"acc|exact_match|\w+_acc")
"""Metrics of lm-eval that are between 0 and 1, by how their names begin."""


@dataclass(frozen=True)
class TaskMeasurer:
    """Measures the model in a task of lm-eval: in the main process, while the others wait."""

    session: Session
    task: str
    evaluation: EvaluationConfig

    def write(self, name: str, phase: str, model: Any, tokenizer: Any) -> dict[str, Any]:
        """Evaluate, and write `eval/<name>.json`; return what it holds.

        A request to stop is obeyed between batches.

        Raises:
            Stopped: A stop was requested; nothing was written.
        """
        is_main = self.session.processes.is_main_process
        [result, *_] = measure_together(
            phase, lambda: self._measure(phase, model, tokenizer) if is_main else {}
        )
        if is_main:
            path = self.session.folder.evaluations / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, result)
        return result

    def _measure(self, phase: str, model: Any, tokenizer: Any) -> dict[str, Any]:
        from grpo_cli.fast.lm_eval_tasks import score_tasks, wrap_model

        started, limit = time.monotonic(), self.evaluation.limit or None

        def report(*_: Any) -> None:
            self.session.heartbeat.beat()
            if self.session.stop.seen_here():
                raise Stopped

        self.session.show(phase)
        # All that lm-eval asks of a model begins there, once for each batch or token.
        hook = model.get_input_embeddings().register_forward_pre_hook(report)
        try:
            with wrap_model(model, tokenizer, self.evaluation.batch_size) as wrapped:
                scored = score_tasks(
                    wrapped,
                    [self.task],
                    source=model_folder_or_id(self.session.recipe.model),
                    limit=limit,
                    seed=self.session.recipe.seed,
                )
        finally:
            hook.remove()
        # As lm-eval's own loggers call them.
        scores = {name.removesuffix(",none"): each for name, each in scored.main(self.task).items()}
        return {
            "schema_version": SCHEMA_VERSION,
            "task": self.task,
            "prompts": scored.examples,
            INTERVALS: {
                name: _as_metric(name, score, scored.examples).as_json()
                for name, score in scores.items()
            },
            LOWER: [name for name, score in scores.items() if score["higher_is_better"] is False],
            "backend": "lm-eval",
            "seconds": round(time.monotonic() - started, 2),
        }


@dataclass(frozen=True)
class HeldOutSet:
    """One entry of `evaluation.during`."""

    config: HeldOutSetConfig
    measurer: Measurer | TaskMeasurer
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
        """Have the trainer evaluate if a set is due."""
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
        self._session.show("training", detail="")
        return metrics

    def _measure(self, held_out: HeldOutSet, step: int) -> dict[str, float]:
        config, measurer, trainer = held_out.config, held_out.measurer, self._trainer
        name, phase = f"{DURING}/{config.label}/{step}", f"measuring {config.label} at step {step}"
        result = measurer.write(name, phase, trainer.model, trainer.tokenizer)
        metrics = {name: each["value"] for name, each in result[INTERVALS].items()}
        known = {name: value for name, value in metrics.items() if value is not None}
        if config.task is not None:
            self._prepare_best(config, list(known), result.get(LOWER, ()))
        known[_RUNTIME] = result["seconds"]
        return {f"{config.prefix}{name}": value for name, value in known.items()}

    def _prepare_best(
        self, config: HeldOutSetConfig, known: Sequence[str], lower: Collection[str]
    ) -> None:
        """Check the metric that is to decide, if it is of a task, and in which direction: only lm-eval knows."""
        recipe = self._session.recipe
        best = recipe.best_metric or ""
        if not best.startswith(config.prefix):
            return
        name = best.removeprefix(config.prefix)
        if name not in known:
            names = ", ".join(f"{config.prefix}{name}" for name in known)
            raise RunError(
                f"evaluation.during: the task `{config.task}` has no metric `{best}`. Fix: name one of {names}"
            )
        if recipe.training.extras.get("greater_is_better") is None:
            self._trainer.args.greater_is_better = name not in lower


def build_held_out_sets(
    session: Session, trainer: Any, held_out: Any, make_measurer: Callable[..., Measurer]
) -> HeldOutSets:
    """Return the sets of `evaluation.during`, which are a callback of the trainer too.

    Args:
        held_out: All held-out rows, a `Dataset`; None if there are none.
        make_measurer: Makes a `Measurer` of rows and settings.

    Raises:
        RunError: A set has no rows.
    """
    evaluation, sets = session.recipe.evaluation, []
    for config in evaluation.during:
        settings = evaluation.settings_of(config)
        rows = select_rows(held_out, settings.limit, config.source)
        measurer: Measurer | TaskMeasurer
        if config.task is not None:
            measurer = TaskMeasurer(session, config.task, settings)
        elif rows is not None:
            measurer = make_measurer(rows, settings, source=config.source)
        else:
            raise RunError(
                f"evaluation.during: `{config.label}` has no held-out rows. Fix: hold some out, or remove it"
            )
        sets.append(HeldOutSet(config, measurer, at_ends=not evaluation.repeats(config)))
    return HeldOutSets(session, trainer, sets)


def _as_metric(name: str, score: dict[str, float | None], examples: int) -> Metric:
    value, error = score["value"], score["stderr"]
    if value is None or error is None:
        return Metric(value, None, None, examples, "lm-eval gives no standard error")
    low, high = value - _QUANTILE * error, value + _QUANTILE * error
    if _SHARE.match(name) and value <= 1:
        low, high = max(low, 0.0), min(high, 1.0)
    return Metric(value, low, high, examples)
