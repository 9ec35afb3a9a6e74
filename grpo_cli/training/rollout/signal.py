"""What a batch's scores say: totals, groups without signal, and metrics under TRL's names."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import nanstd

from grpo_cli.rewards.scoring import ROUNDING
from grpo_cli.training.rollout.rollout import Rollout
from grpo_cli.upstream.trl import (
    CLIPPED_RATIO,
    MEAN_LENGTH,
    REWARD,
    REWARD_STD,
    reward_metric,
)

_EPSILON = 1e-4
"""TRL adds this to a standard deviation that it divides by."""


@dataclass(frozen=True)
class Aggregation:
    """How the scores of a completion become its total."""

    names: Sequence[str]
    weights: torch.Tensor
    """`[rewards] float32`."""
    normalized_first: bool
    """Whether each reward is normalized within its group before the sum."""

    def find_silent(self, scores: torch.Tensor, group_size: int) -> list[int]:
        """Return the groups whose scored completions all have the same total, up to rounding.

        TRL looks for a standard deviation of 0 in float32, where the mean of eight totals of 1.3 is not 1.3: equal
        totals get advantages of about 1e-3 and are learned from. Here totals are compared in float64, up to
        rounding.

        Args:
            scores: `[completions, rewards] float32`, whole groups; NaN if a reward gave none.
            group_size: Completions of a group.
        """
        grouped = scores.double().view(-1, group_size, scores.shape[1])
        if self.normalized_first:
            rounding = ROUNDING * grouped.abs().nan_to_num().amax(1, True)
            centred = grouped - grouped.nanmean(dim=1, keepdim=True)
            centred = torch.where(centred.abs() <= rounding, 0.0, centred)
            grouped = centred / (nanstd(grouped, dim=1, keepdim=True) + _EPSILON)
        parts = grouped * self.weights.double().to(scores.device)
        unscored = scores.isnan().all(dim=1).view(-1, group_size)
        totals = parts.nansum(dim=2)
        most = totals.masked_fill(unscored, -torch.inf).amax(dim=1)
        least = totals.masked_fill(unscored, torch.inf).amin(dim=1)
        scale = parts.abs().nansum(dim=2).amax(dim=1)
        return (~(most - least > ROUNDING * scale)).nonzero().flatten().tolist()

    def totals(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each completion's scores, `[completions]`; NaN if no reward scored it."""
        totals = (scores * self.weights.to(scores.device)).nansum(dim=1)
        totals[scores.isnan().all(dim=1)] = torch.nan
        return totals

    def measure(self, scores: torch.Tensor) -> dict[str, float]:
        """Return the means and deviations that TRL logs of the scores of a batch."""
        totals = self.totals(scores)
        metrics = {REWARD: totals.nanmean().item(), REWARD_STD: nanstd(totals).item()}
        for index, name in enumerate(self.names):
            metrics[reward_metric(name)] = scores[:, index].nanmean().item()
            metrics[reward_metric(name, "std")] = nanstd(scores[:, index]).item()
        return metrics


def measure_lengths(rollout: Rollout, ended: Sequence[bool]) -> dict[str, float]:
    """Return the lengths that TRL logs, over all processes; `ended` says which completions were not cut off."""
    masks = rollout.mask or [[1] * len(ids) for ids in rollout.completion_ids]
    own = [(sum(mask), end) for mask, end in zip(masks, ended, strict=True)]
    pairs = gather_object(own)
    lengths = torch.tensor([length for length, _ in pairs]).float()
    whole = torch.tensor([length for length, end in pairs if end] or [0]).float()
    return {
        MEAN_LENGTH: lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        CLIPPED_RATIO: 1 - sum(end for _, end in pairs) / len(pairs),
        "completions/mean_terminated_length": whole.mean().item(),
        "completions/min_terminated_length": whole.min().item(),
        "completions/max_terminated_length": whole.max().item(),
    }


def count_tokens(rollout: Rollout) -> int:
    """Return the tokens of prompts and completions of all processes, as TRL counts them."""
    masks = rollout.mask or rollout.completion_ids
    lengths = [len(ids) for ids in rollout.prompt_ids]
    lengths += [sum(row) if rollout.mask else len(row) for row in masks]
    return sum(gather_object([sum(lengths)]))
