"""Rewards for how long a completion is. Does not look at what it says."""

from typing import ClassVar, Literal

from pydantic import Field

from grpo_cli.errors import RewardError
from grpo_cli.recipe.base import Integer, Number
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.rows import score_rows


class LengthParams(RewardParams):
    """Rewards completions whose length is near `target`.

    Formula: `-scale * |length - target|`, and not below `-max_penalty` where that is given.
    Range: `[-max_penalty, 0]`, or `(-inf, 0]` without it; 0 is exactly the target.
    With `scale: 1.0` a completion 300 characters off scores -300, which drowns rewards of 0 to 1:
    set `scale: 0.01`, a `max_penalty` or a small `weight` beside them.

    Source: the example `-abs(20 - len(completion))` of TRL's quickstart, which `target: 20` gives.
    """

    kind: ClassVar[str] = "length"

    target: Integer = Field(ge=0)
    """The best length, in `unit`."""
    unit: Literal["characters", "words", "tokens"] = "characters"
    """What to count; words are separated by white space."""
    scale: Number = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Penalty for each unit of distance."""
    max_penalty: Number | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest penalty; leave out for none."""

    def reads_tokens(self) -> bool:
        """Where it counts them."""
        return self.unit == "tokens"

    def build(self, context: RewardContext) -> Scorer:
        """Returns the scorer; nothing has to be loaded."""
        return score_rows(self._score)

    def _score(self, batch: Batch, row: int) -> Score:
        length = self._measure(batch, row)
        penalty = self.scale * abs(length - self.target)
        if self.max_penalty is not None:
            penalty = min(penalty, self.max_penalty)
        return Score(-penalty if penalty else 0.0, f"{length} {self.unit}")

    def _measure(self, batch: Batch, row: int) -> int:
        if self.unit == "characters":
            return len(batch.texts[row])
        if self.unit == "words":
            return len(batch.texts[row].split())
        if batch.completion_ids is None:
            raise RewardError("unit: tokens needs token ids, and these completions have none")
        return len(batch.completion_ids[row])
