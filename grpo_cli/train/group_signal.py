"""Which groups have a signal, and the advantages of a batch that was put together from several.

Source: trl 1.16.0, `GRPOTrainer._generate_and_score_completions`. TRL makes the advantages of all that it
samples at once; where they are scaled over a whole batch, those of a batch that was put together are made
here. `tests/integration/test_dynamic_sampling.py` compares them with TRL's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.utils import nanstd

_LEAST_SPREAD = 1e-8
"""What TRL takes for zero in `frac_reward_zero_std`."""
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
    def of(cls, trainer: Any) -> "GroupSignal":
        """As a `GRPOTrainer` has it."""
        first = trainer.multi_objective_aggregation == "normalize_then_sum"
        by_batch = first or trainer.scale_rewards == "batch"
        weights = trainer.reward_weights.to(trainer.accelerator.device)
        return cls(trainer.num_generations, weights, first, by_batch)

    def find_silent(self, rewards: torch.Tensor) -> list[int]:
        """The groups whose scored completions all have the same total, so that all advantages are 0.

        Args:
            rewards: [completions, rewards] float32, whole groups; NaN where a reward gave none.
        """
        grouped = self._totals(rewards).view(-1, self.group_size)
        most = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
        least = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
        return (~(most - least > _LEAST_SPREAD)).nonzero().flatten().tolist()

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """Advantages scaled by the whole batch, [completions] float32, of [completions, rewards]."""
        totals = self._totals(rewards)
        if self.normalizes_first:
            centred = totals - totals.nanmean()
        else:
            grouped = totals.view(-1, self.group_size)
            centred = (grouped - grouped.nanmean(dim=1, keepdim=True)).flatten()
        return (centred / (nanstd(totals) + _EPSILON)).nan_to_num(nan=0.0)

    def _totals(self, rewards: torch.Tensor) -> torch.Tensor:
        """What completions of a group are compared by; NaN where no reward scored one."""
        scored = rewards
        if self.normalizes_first:
            grouped = rewards.view(-1, self.group_size, rewards.shape[1])
            centred = grouped - grouped.nanmean(dim=1, keepdim=True)
            spread = nanstd(grouped, dim=1, keepdim=True)
            scored = (centred / (spread + _EPSILON)).view_as(rewards)
        totals = (scored * self.weights).nansum(dim=1)
        return totals.masked_fill(rewards.isnan().all(dim=1), torch.nan)
