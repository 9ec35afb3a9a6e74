"""Reward against going in circles: `repetition`. Does not look at what a completion says."""

from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from grpo_cli.errors import RewardError
from grpo_cli.recipe.base import Integer, Number
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.rows import score_rows


class RepetitionParams(RewardParams):
    """Punishes completions that repeat themselves.

    Formula: `max_penalty * (1 - different n-grams / n-grams)`; 0 where the completion is shorter
    than one n-gram.
    Range: [max_penalty, 0].
    Some repetition is language: a fair text of 300 words repeats few of its three-word sequences.

    Source: the idea of the repetition penalty of Demystifying Long Chain-of-Thought (Yeo et al.
    2025, arXiv:2502.03373) and of open-r1's `get_repetition_penalty_reward`.
    """

    kind: ClassVar[str] = "repetition"

    ngram_size: Integer = Field(default=3, ge=1)
    """How many units in a row make a repetition."""
    max_penalty: Number = Field(default=-1.0, le=0)
    """The score that a completion of nothing but repetition comes near."""
    unit: Literal["words", "tokens", "characters"] = "words"
    """What to count; words are separated by white space, and their case does not matter. Use
    `tokens` for languages written without spaces."""

    def reads_tokens(self) -> bool:
        """Where its n-grams are of tokens."""
        return self.unit == "tokens"

    def build(self, context: RewardContext) -> Scorer:
        """Returns the scorer; nothing has to be loaded."""
        return score_rows(self._score)

    def _score(self, batch: Batch, row: int) -> Score:
        share = repeated_share(self._units(batch, row), self.ngram_size)
        penalty = self.max_penalty * share
        return Score(penalty if penalty else 0.0, f"{share:.0%} repeated")

    def _units(self, batch: Batch, row: int) -> Sequence[Hashable]:
        if self.unit == "words":
            return batch.texts[row].casefold().split()
        if self.unit == "characters":
            return batch.texts[row]
        if batch.completion_ids is None:
            raise RewardError("unit: tokens needs token ids, and these completions have none")
        return batch.completion_ids[row]


def repeated_share(units: Sequence[Hashable], size: int) -> float:
    """The share of n-grams that occurred before, in [0, 1); 0 where there is none."""
    total = len(units) - size + 1
    if total < 1:
        return 0.0
    different = {tuple(units[start : start + size]) for start in range(total)}
    return 1 - len(different) / total
