"""Scoring row by row, for kinds whose rows do not depend on each other.

Owns the loop, and the record of the row a failure came from.
"""

from collections.abc import Callable, Sequence

from grpo_cli.rewards.contract import Batch, Score, Scorer


class RowError(Exception):
    """A row could not be scored; the cause is chained to it."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row}")
        self.row = row


def score_rows(score: Callable[[Batch, int], Score]) -> Scorer:
    """Makes a scorer of a function that scores one row of a batch.

    Args:
        score: Takes the batch and a row's index.

    Returns:
        A scorer; it raises `RowError` from whatever `score` raised.
    """

    def scorer(batch: Batch) -> Sequence[Score]:
        return [_score_row(score, batch, row) for row in range(len(batch.completions))]

    return scorer


def _score_row(score: Callable[[Batch, int], Score], batch: Batch, row: int) -> Score:
    try:
        return score(batch, row)
    except Exception as error:
        raise RowError(row) from error
