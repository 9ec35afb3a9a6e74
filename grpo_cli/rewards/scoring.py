"""Rewards at work: built from a recipe's list, called on batches, their results checked.

Owns the rules every score must keep and the turning of any failure into a `RewardError`. The
texts of those errors are `failures.py`'s; where the scores go is the trainer's business.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, Literal

from pydantic import ValidationError

from grpo_cli.errors import RewardError, SetupError, nearest
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards import failures
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.registry import KINDS
from grpo_cli.rewards.rows import RowError

LARGEST = 1e18
"""Scores beyond this are refused: their squares, which TRL's standard deviation sums in float32,
overflow, and the gradient becomes zero without a word."""
SEARCH_S = 5.0
"""Longest search for the row a whole-batch failure came from."""


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
    clip: tuple[float, float] | None = None

    def score(self, batch: Batch) -> list[Score]:
        """Scores a batch, as the recipe's `on_error` and `clip` want it.

        Where a batch fails and `on_error` forgives, its rows are scored one by one.

        Args:
            batch: The completions.

        Returns:
            One score a completion, its value a finite float or None.

        Raises:
            RewardError: The reward raised, returned another number of scores, or one that is not
                a usable number, and `on_error` is `raise`. Its text names the reward and the row.
        """
        try:
            scores = self._score_strictly(batch)
        except RewardError:
            if self.on_error == "raise":
                raise
            rows = range(len(batch.completions))
            scores = [self._score_forgivingly(batch.take([row])) for row in rows]
        return [self._clip(score) for score in scores]

    def _score_forgivingly(self, single: Batch) -> Score:
        try:
            return self._score_strictly(single)[0]
        except RewardError as error:
            value = 0.0 if self.on_error == "zero" else None
            return Score(value, str(error).partition("\n")[0], failed=True)

    def _clip(self, score: Score) -> Score:
        if self.clip is None or score.value is None:
            return score
        low, high = self.clip
        return score._replace(value=min(max(score.value, low), high))

    def _score_strictly(self, batch: Batch) -> list[Score]:
        scores = self._call(batch)
        if len(scores) != len(batch.completions):
            raise RewardError(
                f"reward {self.name!r} ({self.kind}) returned {len(scores)} scores for "
                f"{len(batch.completions)} completions. Fix: return one number a completion"
            )
        return [self._check(score, batch, row) for row, score in enumerate(scores)]

    def _call(self, batch: Batch) -> list[Score]:
        try:
            return list(self.scorer(batch))
        except RowError as error:
            cause = error.__cause__ or error
            raise RewardError(failures.of_row(self, batch, error.row, cause)) from cause
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            row = None if isinstance(error, RewardError) else self._find_row(batch, error)
            raise RewardError(failures.of_batch(self, batch, row, error)) from error

    def _find_row(self, batch: Batch, error: BaseException) -> int | None:
        """The first row that raises the same kind of error on its own."""
        deadline = time.monotonic() + SEARCH_S
        for row in range(len(batch.completions)):
            if time.monotonic() > deadline:
                break
            try:
                self.scorer(batch.take([row]))
            except (Exception, SystemExit, KeyboardInterrupt) as again:
                if type(again) is type(error):
                    return row
        return None

    def _check(self, score: Score, batch: Batch, row: int) -> Score:
        if score.value is None:
            return score
        value = as_float(score.value)
        fault = _fault(value, self.weight)
        if value is None or fault:
            raise RewardError(failures.of_value(self, batch, row, score.value, fault))
        return score._replace(value=value)


def build_rewards(configs: Sequence[RewardConfig], context: RewardContext) -> list[Reward]:
    """Builds a recipe's rewards, in order; imports what they need.

    Args:
        configs: The recipe's `rewards`.
        context: What rewards may know about the recipe.

    Raises:
        RewardError: A kind or its parameters are wrong (preflight reports these with their
            lines), names repeat, or a user's module cannot be imported.
        SetupError: A kind's library is not installed.
    """
    names = name_rewards(configs)
    return [_build(config, name, context) for config, name in zip(configs, names, strict=True)]


def name_rewards(configs: Sequence[RewardConfig]) -> list[str]:
    """The rewards' names: their own, else their kind's usual one, with `_2`, `_3`, … where that is taken.

    Raises:
        RewardError: Two rewards were given the same name.
    """
    given = Counter(config.name for config in configs if config.name is not None)
    repeated = [name for name, count in given.items() if count > 1]
    if repeated:
        raise RewardError(f"two rewards have the name {repeated[0]!r}. Fix: rename one of them")
    taken = set(given)
    names = []
    for config in configs:
        schema = KINDS.get(config.kind)
        usual = schema.default_name(config.params) if schema else config.kind
        name = config.name or _free_name(usual, taken)
        taken.add(name)
        names.append(name)
    return names


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


def _free_name(kind: str, taken: set[str]) -> str:
    if kind not in taken:
        return kind
    number = 2
    while f"{kind}_{number}" in taken:
        number += 1
    return f"{kind}_{number}"


def _build(config: RewardConfig, name: str, context: RewardContext) -> Reward:
    params = _read_params(config, name)
    try:
        scorer = params.build(context)
    except (RewardError, SetupError) as error:
        raise type(error)(f"reward {name!r} ({config.kind}): {error}") from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise RewardError(failures.of_build(name, config.kind, error)) from error
    return Reward(name, config.weight, config.kind, params, scorer, config.on_error, config.clip)


def _read_params(config: RewardConfig, name: str) -> RewardParams:
    if config.kind not in KINDS:
        close = nearest(config.kind, KINDS)
        fix = f"kind: {close}" if close else f"use one of {', '.join(KINDS)}"
        raise RewardError(f"reward {name!r}: there is no kind {config.kind!r}. Fix: {fix}")
    try:
        return KINDS[config.kind].model_validate(config.params)
    except ValidationError as error:
        faults = [
            f"{'.'.join(str(part) for part in each['loc']) or 'parameters'}: {each['msg']}"
            for each in error.errors()
        ]
        raise RewardError(f"reward {name!r} ({config.kind}): {'; '.join(faults)}") from error


def _fault(value: float | None, weight: float) -> str:
    """Why a value cannot be trained on; empty where it can."""
    if value is None:
        return "is not a number"
    if not math.isfinite(value):
        return "is not finite"
    if max(abs(value), abs(value * weight)) > LARGEST:
        return f"is too large (with weight {weight:g}; the limit is {LARGEST:g})"
    return ""
