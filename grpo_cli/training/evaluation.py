"""TRL's evaluation (`eval_strategy`): each metric over all of its completions, as in held-out measurements."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from grpo_cli.analysis.metrics import per_prompt
from grpo_cli.analysis.samples import ScoredCompletion, group_by_row, log_over_all
from grpo_cli.environments.episode import episode_metrics, is_clipped
from grpo_cli.fast.batches import Counts, Logged, loss_mask
from grpo_cli.fast.metrics import merge_evaluation, merge_metrics
from grpo_cli.recipe.dataset import IMAGES, SOURCE
from grpo_cli.rewards.contract import EPISODE, Batch
from grpo_cli.rewards.scoring import Reward, weighted_sum
from grpo_cli.training.checkpoints import states_kept
from grpo_cli.training.rollout.rollout import NO_REWARD, Rollout
from grpo_cli.upstream.trl import (
    CLIPPED_RATIO,
    FRAC_ZERO_STD,
    MEAN_LENGTH,
    REWARD,
    REWARD_STD,
    reward_metric,
)

Metrics = dict[str, float | None]
"""None if a metric has no value, as in TRL's records."""


class Evaluation:
    """One evaluation in progress.

    With several processes the last batch is filled up with rows of the first; these count once.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._size: int = trainer.num_generations_eval
        self._seen: Counter[int] = Counter()
        """Completions of each row so far, on all processes."""
        self._completions: list[ScoredCompletion] = []
        self._batches: list[Batch] = []
        self._logged: list[Logged] = []
        self._tools: set[str] = set()
        """Names of the tools of all episodes so far."""

    def add(self, batch: dict[str, Any], rollout: Rollout, metrics: Mapping[str, float]) -> None:
        """Take a batch, and what was logged of it; leave completions that came before out of it.

        Args:
            batch: As TRL's loss takes it.
            rollout: Its completions of this process.
            metrics: Of the batch, over all processes.
        """
        rows = rollout.rows
        first, is_new = self._trainer.accelerator.process_index * len(rows), list[bool]()
        for row in gather_object([row["row_id"] for row in rows]):
            is_new.append(self._seen[row] < self._size)
            self._seen[row] += 1
        logged = {name: [value] for name, value in metrics.items()}
        self._logged.append(Logged(logged, sum(is_new)))
        if not all(is_new):
            self._leave_out(batch, [not new for new in is_new[first : first + len(rows)]])
        here = [index for index in range(len(rows)) if is_new[first + index]]
        own, ended = rollout.own_scores(), self._trainer.find_ended(rollout)
        self._completions += [self._describe(rollout, at, own[at], ended[at]) for at in here]
        self._tools |= rollout.tools
        if here:
            self._batches.append(self._keep(rollout).take(here))

    def _leave_out(self, batch: dict[str, Any], repeated: Sequence[bool]) -> None:
        places = torch.tensor(repeated, device=batch["completion_mask"].device)
        for name in ("completion_mask", "advantages"):
            batch[name] = batch[name].clone()
            batch[name][places] = 0
        counted = loss_mask(batch).sum()
        batch["num_items_in_batch"] = self._trainer.accelerator.gather(counted).sum()

    def _describe(
        self, rollout: Rollout, index: int, scores: Sequence[float], has_ended: bool
    ) -> ScoredCompletion:
        """Return what metrics read of a completion."""
        trainer, row, ids = self._trainer, rollout.rows[index], rollout.own_ids[index]
        episode = row.get(EPISODE)
        known = [None if math.isnan(score) else score for score in scores]
        return ScoredCompletion(
            group=0,
            row=row["row_id"],
            prompt=None,
            text="",
            tokens=len(ids),
            clipped=is_clipped(episode["end"]) if episode else not has_ended,
            rewards=dict(zip(trainer.reward_func_names, known, strict=True)),
            reasons={},
            failed=[],
            answers={},
            total=weighted_sum(trainer.reward_weights.tolist(), known),
            episode=episode,
            source=row.get(SOURCE),
        )

    def _keep(self, rollout: Rollout) -> Batch:
        """Return completions as rewards get them; images only if one looks at them."""
        batch = rollout.as_batch()
        if any(reward.meta.reads_images for reward in self._trainer.rewards):
            return batch
        columns = {name: values for name, values in batch.columns.items() if name != IMAGES}
        return replace(batch, columns=columns)

    def metrics(self, losses: Sequence[Logged]) -> Metrics:
        """Return the metrics of the whole evaluation; all processes take part.

        Args:
            losses: What TRL logged with the loss of each batch.
        """
        trainer = self._trainer
        groups = group_by_row(gather_object(self._completions))
        count = sum(map(len, groups))
        weights = [[0.0, each.rows] for each in self._logged]
        merged: Metrics = {
            **self._log_over_all(),
            **merge_metrics([each.metrics for each in self._logged], weights, Counts(0, count)),
            **merge_evaluation(
                losses,
                count,
                loss_type=trainer.loss_type,
                by_token=trainer.importance_sampling_level == "token",
            ),
            **_measure_lengths([each for group in groups for each in group]),
        }
        if trainer.parts.player is not None:
            records = [each.episode for group in groups for each in group if each.episode]
            merged |= episode_metrics(records, sorted(set().union(*gather_object([self._tools]))))
        merged = {name: value for name, value in merged.items() if name != FRAC_ZERO_STD}
        if trainer.reward_func_names != [NO_REWARD]:
            merged |= self._measure_rewards(groups)
        return {
            name: None if value is None or math.isnan(value) else value
            for name, value in merged.items()
        }

    def _log_over_all(self) -> dict[str, float]:
        """Return what rewards log of all completions in one call, which the main process makes."""
        trainer = self._trainer
        names = {*gather_object([*trainer.scoring.logging])}
        return log_in_main_process(
            trainer.rewards, names, self._batches, trainer.args.seed, trainer.state
        )

    def _measure_rewards(self, groups: Sequence[Sequence[ScoredCompletion]]) -> Metrics:
        trainer, sources = self._trainer, self._trainer.parts.sources
        names = trainer.reward_func_names
        values = per_prompt(groups, {}, sources)
        everyone = [each for group in groups for each in group]
        merged: Metrics = {
            REWARD: _mean(values[REWARD].values()),
            REWARD_STD: _spread(each.total for each in everyone),
        }
        for name in names:
            merged[reward_metric(name)] = _mean(values[f"rewards/{name}"].values())
            merged[reward_metric(name, "std")] = _spread(each.rewards[name] for each in everyone)
        scores = [[each.rewards[name] for name in names] for each in everyone]
        table = torch.tensor(
            [[math.nan if score is None else score for score in row] for row in scores]
        )
        silent = {*trainer.aggregation.find_silent(table, self._size)} if self._size > 1 else None
        if silent is not None:
            merged[FRAC_ZERO_STD] = len(silent) / len(groups)
        for source in sources:
            own = {number for number, group in enumerate(groups) if group[0].source == source}
            prefix = f"sources/{source}"
            merged[f"{prefix}/share"] = len(own) / len(groups)
            if rewards := values.get(f"{REWARD}@{source}"):
                merged[f"{prefix}/{REWARD}"] = _mean(rewards.values())
            if own and silent is not None:
                merged[f"{prefix}/{FRAC_ZERO_STD}"] = len(silent & own) / len(own)
        return merged


def log_in_main_process(
    rewards: Sequence[Reward],
    names: set[str],
    batches: Sequence[Batch],
    seed: int,
    state: Any = None,
) -> dict[str, float]:
    """Return what rewards log of the completions of all processes; their states stay as they are.

    Args:
        names: Of the rewards that log metrics, the same on all processes.
        batches: Completions of this process; no row is in two of them, or in those of two processes.
        state: The `trainer_state`, in training.
    """
    if not names:
        return {}
    everyone = [replace(each, extra={"trainer_state": state}) for each in gather_object([*batches])]
    logged: dict[str, float] = {}
    if PartialState().is_main_process:
        with states_kept(rewards):
            logged = log_over_all(rewards, names, everyone, seed)
    return dict(broadcast_object_list([logged])[0])


def _measure_lengths(completions: Sequence[ScoredCompletion]) -> Metrics:
    """Return what TRL logs of the lengths of a batch; if no completion ended, it gives 0."""
    lengths = [each.tokens for each in completions]
    ended = [each.tokens for each in completions if not each.clipped] or [0]
    return {
        MEAN_LENGTH: fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        CLIPPED_RATIO: fmean(each.clipped for each in completions),
        "completions/mean_terminated_length": fmean(ended),
        "completions/min_terminated_length": float(min(ended)),
        "completions/max_terminated_length": float(max(ended)),
    }


def _mean(values: Iterable[float]) -> float | None:
    known = [*values]
    return fmean(known) if known else None


def _spread(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return stdev(known) if len(known) > 1 else None
