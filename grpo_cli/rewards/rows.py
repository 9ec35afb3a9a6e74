"""Scoring row by row, for kinds whose rows do not depend on each other.

Owns the loop; an error stands in the place of the score it prevents, so that no other row suffers.
"""

from collections.abc import Callable, Sequence

from grpo_cli.rewards.contract import Batch, Score, Scorer


def score_rows(score: Callable[[Batch, int], Score]) -> Scorer:
    """Makes a scorer of a function that scores one row of a batch.

    Args:
        score: Takes the batch and a row's index.

    Returns:
        A scorer; what `score` raises for a row is that row's result.
    """

    def scorer(batch: Batch) -> Sequence[Score | Exception]:
        return [_score_row(score, batch, row) for row in range(len(batch.completions))]

    return scorer


def _score_row(score: Callable[[Batch, int], Score], batch: Batch, row: int) -> Score | Exception:
    try:
        return score(batch, row)
    except Exception as error:
        return error
