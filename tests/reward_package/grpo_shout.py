"""The reward kind `shout`, in a package of its own."""

from grpo_cli.rewards.contract import Batch, Meta, RewardParams, Score


class ShoutParams(RewardParams):
    """Rewards capital letters.

    Formula: capital letters / `target`, at most 1.
    Range: [0, 1].
    """

    kind = "shout"
    meta = Meta(range=(0.0, 1.0))

    target: int = 10
    """Capital letters that get the full score."""

    def score(self, batch: Batch, row: int) -> Score:
        """Return the share of the wanted capital letters."""
        count = sum(sign.isupper() for sign in batch.texts[row])
        return Score(min(1.0, count / self.target), f"{count} capital letters")
