"""Rewards at work: called on batches, their results checked.

Owns the rules every score must keep, what becomes of a failure, and which rows a reward applies
to. Making rewards of a recipe is `building.py`'s, the texts of failures are `failures.py`'s; where
the scores go is the trainer's business.
"""

import io
import math
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, Literal

from grpo_cli.errors import RewardError
from grpo_cli.rewards import failures
from grpo_cli.rewards.conditions import Condition
from grpo_cli.rewards.contract import Batch, DescribedError, RewardParams, Score, Scorer

LARGEST = 1e18
"""Scores beyond this are refused: their squares, which TRL's standard deviation sums in float32,
overflow, and the gradient becomes zero without a word."""
SEARCH_S = 5.0
"""Longest search for the row a whole-batch failure came from."""
DOES_NOT_APPLY = Score(None, "`when` does not hold")

_ANYTHING = (Exception, SystemExit)
"""What a user's code may raise without meaning to end the run."""


Clip = tuple[float, float] | None
"""Least and greatest score; None leaves scores as they are."""


def clip_score(value: float, clip: Clip) -> float:
    """A score as `clip` lets it be."""
    return value if clip is None else min(max(value, clip[0]), clip[1])


def right_score(best: float | None, clip: Clip) -> float | None:
    """The score of a right answer, as `clip` lets it be.

    Args:
        best: What the kind gives a right answer; None where it judges no answers.
        clip: The reward's.

    Returns:
        None for rewards that judge no answers, and where `clip` makes right and wrong the same.
    """
    if best is None or clip_score(best, clip) == clip_score(0.0, clip):
        return None
    return clip_score(best, clip)


@dataclass(frozen=True)
class Reward:
    """A reward of the recipe, ready to score."""

    name: str
    """Unique within the recipe."""
    weight: float
    """Factor in the weighted sum; `score` does not apply it."""
    kind: str
    params: RewardParams
    scorer: Scorer
    on_error: Literal["raise", "zero", "skip"] = "raise"
    clip: Clip = None
    condition: Condition | None = None
    """Which rows it applies to; None for all."""
    waits: bool = False
    """Whether it mostly waits for something outside of this process, and may do so on any thread."""
    right_answer: float | None = None
    """The score of a right answer, for those that judge answers as far as the recipe tells."""

    def clipped(self, value: float) -> float:
        """A value as `clip` lets it be."""
        return clip_score(value, self.clip)

    def score(self, batch: Batch) -> list[Score]:
        """Scores a batch, as the recipe's `when`, `on_error` and `clip` want it.

        Args:
            batch: The completions.

        Returns:
            One score a completion, its value a finite float or None.

        Raises:
            RewardError: `when` fails on a row; or the reward raised, returned another number of
                scores, or one that is not a usable number, and `on_error` is `raise`. Its text
                names the reward and the row.
        """
        size = len(batch.completions)
        rows = self._applying(batch)
        if len(rows) == size:
            return [self._settle(result) for result in self.try_score(batch)]
        scores = [DOES_NOT_APPLY] * size
        if rows:
            for row, result in zip(rows, self.try_score(batch.take(rows)), strict=True):
                scores[row] = self._settle(result)
        return scores

    def try_score(self, batch: Batch) -> list[Score | RewardError]:
        """One score a completion, or the failure in its place; knows no `when` and `on_error`.

        Where a whole batch fails and `on_error` forgives, its rows are scored one by one.
        """
        try:
            results = list(self.scorer(batch))
        except KeyboardInterrupt as error:
            # Never forgiven: it may be the person who asks to stop.
            raise RewardError(failures.of_batch(self, batch, None, error)) from error
        except _ANYTHING as error:
            return self._blame(batch, error)
        size = len(batch.completions)
        if len(results) != size:
            message = (
                f"reward {self.name!r} ({self.kind}) returned {len(results)} scores for "
                f"{size} completions. Fix: return one number a completion"
            )
            return self._blame(batch, DescribedError(message))
        return [self._check(result, batch, row) for row, result in enumerate(results)]

    def _applying(self, batch: Batch) -> Sequence[int]:
        rows = range(len(batch.completions))
        if self.condition is None:
            return rows
        try:
            return [row for row in rows if self.condition.holds(batch, row)]
        except RewardError as error:
            raise RewardError(f"reward {self.name!r} ({self.kind}): {error}") from error

    def _settle(self, result: Score | RewardError) -> Score:
        if isinstance(result, Score):
            return self._clip(result)
        if self.on_error == "raise":
            raise result
        value = 0.0 if self.on_error == "zero" else None
        return self._clip(Score(value, str(result).partition("\n")[0], failed=True))

    def _clip(self, score: Score) -> Score:
        return score if score.value is None else score._replace(value=self.clipped(score.value))

    def _blame(self, batch: Batch, error: BaseException) -> list[Score | RewardError]:
        """The results of a batch that failed as a whole."""
        size = len(batch.completions)
        if self.on_error != "raise" and size > 1:
            return [self.try_score(batch.take([row]))[0] for row in range(size)]
        if isinstance(error, DescribedError):
            return [error] * size
        row = None if isinstance(error, RewardError) else self._find_row(batch, error)
        failure = RewardError(failures.of_batch(self, batch, row, error))
        failure.__cause__ = error
        return [failure] * size

    def _find_row(self, batch: Batch, error: BaseException) -> int | None:
        """The first row that raises the same kind of error on its own."""
        deadline = time.monotonic() + SEARCH_S
        for row in range(len(batch.completions)):
            if time.monotonic() > deadline:
                break
            try:
                self.scorer(batch.take([row]))
            except _ANYTHING as again:
                if type(again) is type(error):
                    return row
        return None

    def _check(self, result: Score | Exception, batch: Batch, row: int) -> Score | RewardError:
        if isinstance(result, DescribedError):
            return result
        if isinstance(result, Exception):
            failure = RewardError(failures.of_row(self, batch, row, result))
            failure.__cause__ = result
            return failure
        if result.value is None:
            return result
        value = as_float(result.value)
        fault = _fault(value, self.weight)
        if value is None or fault:
            return RewardError(failures.of_value(self, batch, row, result.value, fault))
        return result._replace(value=value)


def as_float(value: Any) -> float | None:
    """A number of any library (numpy, torch, Decimal, bool) as a float; None where it is none."""
    if isinstance(value, Real | Decimal):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        inner = item()
        return as_float(inner) if isinstance(inner, Real) else None
    return None


def _fault(value: float | None, weight: float) -> str:
    """Why a value cannot be trained on; empty where it can."""
    if value is None:
        return "is not a number"
    if not math.isfinite(value):
        return "is not finite"
    if max(abs(value), abs(value * weight)) > LARGEST:
        return f"is too large (with weight {weight:g}; the limit is {LARGEST:g})"
    return ""


def has_state(reward: Reward) -> bool:
    """Return whether a reward offers a state for checkpoints to keep."""
    return hasattr(reward.scorer, "state_dict")


def read_state(reward: Reward) -> Any:
    """Return a copy of a reward's state, made as a checkpoint makes it.

    Raises:
        RewardError: It cannot be read, or holds what a checkpoint could not give back.
    """
    import torch

    kept = io.BytesIO()
    try:
        torch.save(reward.scorer.state_dict(), kept)  # type: ignore[attr-defined]
        kept.seek(0)
        return torch.load(kept, weights_only=True)
    except Exception as error:
        other = isinstance(error, pickle.UnpicklingError)
        why = "it holds objects of other classes" if other else f"{error!r:.300}"
        raise RewardError(
            f"the state of reward {reward.name!r} cannot be kept in a checkpoint: {why}. Fix: let its "
            "state_dict() return numbers, texts, lists, dicts, sets and tensors"
        ) from error
