"""Which groups have a signal, and the advantages of a batch that was put together from several.

Source: trl 1.16.0, `GRPOTrainer._generate_and_score_completions`. TRL computes the advantages of one sampling;
if they are scaled over the whole batch, those of a batch from several samplings are computed here.
`tests/integration/test_dynamic_sampling.py` compares them with TRL's.

TRL looks for a standard deviation of 0 in float32: the mean of eight totals of 1.3 is not 1.3 there, so that
equal totals get advantages of about 1e-3 and are learned from. Here totals are compared in float64, and
differences that rounding explains are none.
"""

from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.utils import nanstd

from grpo_cli.rewards.totals import ROUNDING

_EPSILON = 1e-4
"""What TRL adds to a standard deviation that it divides by."""


@dataclass(frozen=True)
class GroupSignal:
    """How rewards become advantages in one training."""

    group_size: int
    weights: torch.Tensor
    """Of each reward, float32."""
    normalizes_first: bool
    """Whether each reward is normalized within its group before the sum, and the sum over the batch."""
    scales_by_batch: bool
    """Whether the standard deviation of the whole batch scales the advantages."""

    @classmethod
    def of(cls, trainer: Any, group_size: int) -> "GroupSignal":
        """Return that of a `GRPOTrainer`."""
        first = trainer.multi_objective_aggregation == "normalize_then_sum"
        by_batch = first or trainer.scale_rewards == "batch"
        weights = trainer.reward_weights.to(trainer.accelerator.device)
        return cls(group_size, weights, first, by_batch)

    def find_silent(self, rewards: torch.Tensor) -> list[int]:
        """Return the groups whose scored completions all have the same total, up to rounding.

        Args:
            rewards: [completions, rewards] float32, whole groups; NaN if a reward gave none.
        """
        grouped = rewards.double().view(-1, self.group_size, rewards.shape[1])
        if self.normalizes_first:
            grouped = _normalize(grouped, least=ROUNDING * grouped.abs().nan_to_num().amax(1, True))
        parts = grouped * self.weights.double()
        unscored = rewards.isnan().all(dim=1).view(-1, self.group_size)
        totals = parts.nansum(dim=2)
        most = totals.masked_fill(unscored, -torch.inf).amax(dim=1)
        least = totals.masked_fill(unscored, torch.inf).amin(dim=1)
        scale = parts.abs().nansum(dim=2).amax(dim=1)
        return (~(most - least > ROUNDING * scale)).nonzero().flatten().tolist()

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """Advantages scaled by the whole batch, [completions] float32, of [completions, rewards]."""
        totals = self._totals(rewards)
        if self.normalizes_first:
            centred = totals - totals.nanmean()
        else:
            grouped = totals.view(-1, self.group_size)
            centred = (grouped - grouped.nanmean(dim=1, keepdim=True)).flatten()
        scaled = (centred / (nanstd(totals) + _EPSILON)).nan_to_num(nan=0.0)
        scaled.view(-1, self.group_size)[self.find_silent(rewards)] = 0.0
        return scaled

    def _totals(self, rewards: torch.Tensor) -> torch.Tensor:
        """What completions of a group are compared by; NaN where no reward scored one."""
        scored = rewards
        if self.normalizes_first:
            grouped = rewards.view(-1, self.group_size, rewards.shape[1])
            scored = _normalize(grouped).view_as(rewards)
        totals = (scored * self.weights).nansum(dim=1)
        return totals.masked_fill(rewards.isnan().all(dim=1), torch.nan)


def _normalize(grouped: torch.Tensor, least: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Return each reward normalized within its group, [groups, completions, rewards].

    Args:
        grouped: Rewards; NaN if there is none.
        least: Deviations from the mean up to this are taken for 0.
    """
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    centred = torch.where(centred.abs() <= least, 0.0, centred)
    return centred / (nanstd(grouped, dim=1, keepdim=True) + _EPSILON)
