"""`GRPOTrainer` that learns from rollouts: they are made as data, and reach TRL by its two public seams.

`rollout_func` returns what was sampled, and each of `reward_funcs` its column of the scores. TRL makes the batch,
the advantages, the log-probabilities and the loss.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import ParameterList
from transformers import ProcessorMixin
from trl import SyncRefModelCallback
from trl.trainer import grpo_trainer

from grpo_cli.fast.batches import ENTROPY, loss_mask
from grpo_cli.fast.tokens import CompletionReader, build_reader
from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.rewards.scoring import Reward
from grpo_cli.training.checkpoints import ExactResume
from grpo_cli.training.rollout.rollout import (
    NO_REWARD,
    Aggregation,
    Context,
    Rollout,
    Scoring,
    measure_lengths,
)
from grpo_cli.training.rollout.samplers import AnswerSampler, Sampler
from grpo_cli.training.rollout.step import CompletionLog, GenerationStep, PhaseClock
from grpo_cli.upstream import replaced
from grpo_cli.upstream.trl import FRAC_ZERO_STD, NUM_TOKENS, REWARD, REWARD_STD, reward_metric

if TYPE_CHECKING:
    from grpo_cli.environments.player import Player
    from grpo_cli.training.difficulty import DifficultySampler
    from grpo_cli.training.evaluation import Evaluation
    from grpo_cli.training.held_out_sets import HeldOutSets
    from grpo_cli.training.teacher import TeacherReference

_NEWEST = {NUM_TOKENS, "dynamic_sampling/prompts_seen", "dynamic_sampling/epochs"}
"""Counts, of which a record has the newest and not the mean."""


@dataclass(frozen=True)
class Parts:
    """What a trainer of a run is made of, beside the arguments of `GRPOTrainer`."""

    rewards: Sequence[Reward] = ()
    seed: str = "0"
    """Of this process, for the random numbers of rewards."""
    reader: CompletionReader | None = None
    """Where completions end, and their texts; None reads them as TRL does."""
    log: CompletionLog | None = None
    player: "Player | None" = None
    """Plays episodes; None if completions are single answers."""
    sampler: Sampler | None = None
    """Samples **and scores** by itself; None samples with the trainer's backend."""
    sampling_parts: int = 1
    difficulty: "DifficultySampler | None" = None
    max_resample: int | None = None
    """Rounds of dynamic sampling; None replaces no groups."""
    sources: Sequence[str] = ()
    """Of a mixture; some metrics are logged for each."""
    forced: bool = False
    """Whether to resume even if the checkpoint lacks a reward's state."""
    names: Sequence[str] = ()
    """What the scores of `sampler` are called."""
    teacher: "TeacherReference | None" = None
    """Takes the place of TRL's reference model."""
    syncs_adapter: bool = False
    """Whether the reference is an adapter that follows the trained one."""
    held_out_sets: "Callable[[Any], HeldOutSets | None] | None" = None
    """Makes what is evaluated beside TRL's own evaluation, given the trainer."""


class RunTrainer(ExactResume, FastTrainer):
    """The trainer of a run."""

    mask_truncated_completions: bool

    def __init__(self, *args: Any, parts: Parts, **options: Any) -> None:
        """Make a trainer; `args` and `options` are those of `GRPOTrainer`, except for its two seams."""
        self.parts = parts
        self._clock = PhaseClock()
        self._rollout: Rollout | None = None
        """Of which TRL makes a batch at the moment."""
        self._evaluation: Evaluation | None = None
        """TRL's, while it goes on."""
        scoring = (
            None if parts.sampler else Scoring(parts.rewards, parts.seed, parts.sampling_parts)
        )
        names = [*parts.names] if scoring is None else scoring.names
        columns = [self._return_scores(*each) for each in enumerate(names)]
        # TRL warns that `rollout_func` may change.
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        super().__init__(*args, reward_funcs=columns, rollout_func=self._return_sampled, **options)
        self.add_callback(self._clock)
        self._images: Any = None
        """Completes the fields of images; None if the model reads text alone."""
        if isinstance(self.processing_class, ProcessorMixin):
            from grpo_cli.training.images import ImageFields

            models = [each for each in (self.model, self.ref_model) if each is not None]
            self._images = ImageFields(self.processing_class, models)
        self.reader = parts.reader or build_reader(self._tokenizer, self.eos_token_ids)
        # TRL would leave out those that ended at a stop string too.
        self._masks_truncated = self.mask_truncated_completions
        if self.reader.stop_strings is not None:
            self.mask_truncated_completions = False
        self.scoring = scoring
        self.aggregation = Aggregation(
            names, self.reward_weights, self.multi_objective_aggregation == "normalize_then_sum"
        )
        self.rollouts = self._build_step()
        if parts.teacher is not None:
            self.ref_model: Any = parts.teacher.load(self)
            self.beta = self.args.beta = parts.teacher.weight
        if parts.syncs_adapter:
            self.synced_adapter = sync_adapter(self)
        sets = None if parts.held_out_sets is None else parts.held_out_sets(self)
        self.held_out_sets: HeldOutSets | None = sets

    def _build_step(self) -> GenerationStep:
        parts = self.parts
        sampler = parts.sampler or AnswerSampler(self, self.reader)
        if parts.player is not None:
            from grpo_cli.training.rollout.episodes import EpisodeSampler

            sampler = EpisodeSampler(self, self.reader, parts.player)
        step = GenerationStep(
            sampler,
            self.scoring,
            self.aggregation,
            self._clock,
            data=self.train_dataset,
            difficulty=parts.difficulty,
            sources=parts.sources,
        )
        if parts.max_resample is not None:
            from grpo_cli.training.rollout.dynamic_sampling import DynamicSampling

            step.stages.append(
                DynamicSampling(
                    self.train_dataset,
                    self.args.seed,
                    parts.max_resample,
                    sample=step.sample,
                    aggregation=self.aggregation,
                    ended=self.find_ended,
                    difficulty=parts.difficulty,
                )
            )
        step.log = parts.log
        return step

    # --- the generation step -------------------------------------------------------------------

    def make_batch(self, rows: list[Any]) -> dict[str, Any]:
        """Return TRL's batch of rows that it has drawn: they are sampled and scored, and may be replaced."""
        mode, training = ("train" if self.model.training else "eval"), bool(self.model.training)
        size = self.num_generations if training else self.num_generations_eval
        rollout = self.rollouts.run(rows, Context(self.state, training, size))
        self.state.num_input_tokens_seen += rollout.unused_tokens
        self._rollout = rollout
        try:
            with self._catching(mode) as logged:
                batch = super().make_batch([self._as_trl(row, rollout) for row in rollout.rows])
            if self._images is not None:
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
                self._images.add(batch, ids, rollout)
        finally:
            self._rollout = None
            if self._images is not None:
                self._images.forget()
        if self.notes_entropies:
            batch[ENTROPY] = _sum_entropies(batch, rollout.entropies)
        self._clear_silent(batch["advantages"], rollout)
        metrics = {name: values[-1] for name, values in logged.items()} | self._measure(rollout)
        if self._evaluation is not None:
            self._evaluation.add(batch, rollout, metrics)
        else:
            self._log_batch(self._metrics[mode], metrics)
        return batch

    def _as_trl(self, row: Any, rollout: Rollout) -> dict[str, Any]:
        """Return what TRL reads of a row; episodes have images of their own."""
        names = ("prompt",) if rollout.images is not None else ("prompt", "images")
        return {name: row[name] for name in names if name in row}

    def _return_sampled(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        """Return the rollout's tokens, as TRL's `rollout_func`."""
        rollout: Any = self._rollout
        fields: dict[str, Any] = {
            "prompt_ids": rollout.prompt_ids,
            "completion_ids": rollout.completion_ids,
            "logprobs": rollout.logprobs,
        }
        mask = rollout.mask
        if self._masks_truncated and self.reader.stop_strings is not None:
            masks = mask or [[1] * len(ids) for ids in rollout.completion_ids]
            pairs = zip(masks, self.find_ended(rollout), strict=True)
            mask = [own if end else [0] * len(own) for own, end in pairs]
        return fields if mask is None else {**fields, "env_mask": mask}

    def _return_scores(self, index: int, name: str) -> Callable[..., list[float]]:
        """Return one of TRL's `reward_funcs`: the rollout's scores by one reward."""

        def column(**loggers: Any) -> list[float]:
            rollout: Any = self._rollout
            for logger, arguments in rollout.calls[index] if rollout.calls else ():
                loggers[logger](*arguments)
            if rollout.seconds:
                loggers["log_metric"](f"rewards/{name}/seconds", rollout.seconds[index])
            return [scores[index] for scores in rollout.own_scores()]

        column.__name__ = name
        return column

    def find_ended(self, rollout: Rollout) -> list[bool]:
        """Return which completions were not cut off."""
        pairs = zip(rollout.completion_ids, rollout.prompt_ids, strict=True)
        return [self.reader.is_terminated(*pair) for pair in pairs]

    def _measure(self, rollout: Rollout) -> dict[str, float]:
        """Return the metrics of a batch that TRL does not know, or counts otherwise."""
        if self.reader.stop_strings is None:
            return rollout.metrics
        return measure_lengths(rollout, self.find_ended(rollout)) | rollout.metrics

    def _log_batch(self, metrics: dict[str, list[float]], values: dict[str, float]) -> None:
        if self.reward_func_names == [NO_REWARD]:
            own = (reward_metric(NO_REWARD, statistic) for statistic in ("mean", "std"))
            for name in (REWARD, REWARD_STD, FRAC_ZERO_STD, *own):
                values.pop(name, None)
        for name, value in values.items():
            metrics[name] = [value] if name in _NEWEST else [*metrics[name], value]

    def _clear_silent(self, advantages: torch.Tensor, rollout: Rollout) -> None:
        """Set the advantages of groups without signal to exactly 0."""
        size, first = (
            rollout.context.group_size,
            self.accelerator.process_index * len(advantages),
        )
        members = [
            group * size + member - first for group in rollout.silent for member in range(size)
        ]
        # One write: on a GPU each costs a kernel.
        advantages[[index for index in members if 0 <= index < len(advantages)]] = 0.0

    def add_fields(self, fields: dict[str, Any], input_ids: torch.Tensor) -> None:
        """Add what the model reads of the images of episodes."""
        if self._images is not None:
            self._images.add(fields, input_ids, self._rollout)
        # TRL (1.16) passes it here alone, and not to what is trained; `ImageFields` adds it to both.
        fields.pop("batch_num_images", None)

    # --- evaluation and records ----------------------------------------------------------------

    @property
    def rewards(self) -> Sequence[Reward]:  # type: ignore[override]
        """The recipe's, whose states checkpoints hold."""
        return self.parts.rewards

    @property
    def difficulty(self) -> "DifficultySampler | None":  # type: ignore[override]
        """Draws the prompts; None if TRL does."""
        return self.parts.difficulty

    @property
    def forced(self) -> bool:  # type: ignore[override]
        """True to resume even if the checkpoint lacks a reward's state."""
        return self.parts.forced

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; if the recipe has images, that of the processor."""
        return self._tokenizer

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add the time of each phase to records of training steps, and to TRL's evaluation its metrics."""
        if "loss" in logs:
            logs.update(self._clock.take())
        elif self._evaluation is not None:
            metrics = self._evaluation.metrics(self._logged)
            logs.update({f"eval_{name}": value for name, value in metrics.items()})
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate as TRL does, and the held-out sets that are due."""
        metrics: dict[str, float] = {}
        if self.held_out_sets is None or not self.held_out_sets.only_these:
            metrics = self.evaluate_rows(*args, **options)
        return metrics if self.held_out_sets is None else {**metrics, **self.evaluate_sets()}

    def evaluate_rows(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate the rows of `eval_dataset` as TRL does, each metric over all of them."""
        from grpo_cli.training.evaluation import Evaluation

        self._evaluation, self._merges_evaluation = Evaluation(self), True
        try:
            return super().evaluate(*args, **options)
        finally:
            self._evaluation, self._merges_evaluation, self._logged = None, False, []

    def load_state(self, checkpoint: Path, last_step: int) -> None:
        """Load the state of a checkpoint; first evaluate what it lacks, since that may decide on what follows."""
        super().load_state(checkpoint, last_step)
        if self.held_out_sets is not None and self.held_out_sets.find_missing(self.state):
            self.load_weights(checkpoint)
            self._determine_best_metric(self.evaluate_sets(), None)
            self.replace_state(checkpoint)
            self.held_out_sets.raise_if_stopped(self.state)

    def evaluate_sets(self) -> dict[str, float]:
        """Evaluate the held-out sets that are due."""
        metrics = self.held_out_sets.evaluate() if self.held_out_sets else {}
        if metrics:
            self.log_evaluation(metrics)
        self.control: Any = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def log_evaluation(self, metrics: dict[str, float]) -> None:
        """Log the metrics of an evaluation that is not TRL's own."""
        training = self.model.training
        # By this TRL tells whether a record is of training.
        self.model.training = False
        self.log(dict(metrics))
        self.model.training = training

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # With `save_strategy: best` the result decides on saving, which a requested stop does too.
        stops = self.control.should_training_stop and self.control.should_save
        # At a step, only some sets may be due.
        if self.held_out_sets is not None and self.args.metric_for_best_model not in metrics:
            return stops
        return super()._determine_best_metric(metrics, trial) or stops


def _sum_entropies(batch: dict[str, Any], entropies: Sequence[Sequence[float]] | None) -> Any:
    """Return the sums over the tokens of each row, `[rows] float32`; NaN if they were not computed."""
    lengths = loss_mask(batch).sum(1)
    if entropies is None or len(entropies) != len(lengths):
        return torch.full_like(lengths, math.nan, dtype=torch.float32)
    sums = [math.fsum(own) for own in entropies]
    return torch.tensor(sums, device=lengths.device) * (lengths > 0)


def reference_on(device: torch.device | None) -> AbstractContextManager[None]:
    """Make TRL read the reference model to a device too: with several processes its `device_map` is None."""
    if device is None:
        return nullcontext()
    read = grpo_trainer.create_model_from_path

    def read_to_device(path: str, **options: Any) -> Any:
        if options.get("device_map", "auto") is None:
            options["device_map"] = {"": device}
        return read(path, **options)

    return replaced(grpo_trainer, create_model_from_path=read_to_device)


class SyncAdapterCallback(SyncRefModelCallback):
    """Mixes the trained adapter into the reference, a copy of it at the start.

    Source: trl 1.16, `SyncRefModelCallback`, which mixes models; `GRPOTrainer.__init__`, which makes the copy.
    """

    def __init__(self, model: Any) -> None:
        """Find the weights of the adapters `default` (trained) and `ref` in a `peft.PeftModel`."""
        weights = dict(model.named_parameters())
        names = [name for name in weights if ".default." in name]
        self._trained = ParameterList(weights[name] for name in names)
        reference = ParameterList(weights[name.replace(".default.", ".ref.")] for name in names)
        super().__init__(ref_model=reference, accelerator=None)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Mix the weights if it is time."""
        super().on_step_end(args, state, control, **{**more, "model": self._trained})


def sync_adapter(trainer: Any) -> ParameterList:
    """Make the reference of a trainer with an adapter follow that adapter; return the reference."""
    callback = SyncAdapterCallback(trainer.accelerator.unwrap_model(trainer.model))
    trainer.add_callback(callback)
    reference: ParameterList = callback.ref_model
    return reference
