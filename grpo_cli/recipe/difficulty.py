"""The `dataset.difficulty` section: which prompts are drawn, by how often they are answered rightly."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_cli.errors import recipe_error
from grpo_cli.recipe.base import Number, Section, ShortForm


class OrderDifficulty(Section):
    """Prompts in the order of a column, pass after pass; equal ones are shuffled."""

    kind: Literal["order"]
    column: str
    """Column of numbers, such as a level: prompts with low ones come first."""
    descending: bool = False
    """Whether prompts with high numbers come first, as for solve rates."""


class _EstimatedDifficulty(Section):
    solve_rate: str | None = None
    """Column with the share of right answers, 0 to 1, known from before: what a prompt's estimate begins with.
    Each group of completions then counts as much as all before it."""
    samples: str | None = None
    """Samples from before that tell how often prompts were solved, relative to the recipe: the folder of
    `grpo eval RECIPE --split train --out DIR`, one of its files of samples, or the output of
    `grpo probe RECIPE --json`. A prompt with samples begins with their share of right answers instead of
    `solve_rate`."""
    by: str | None = None
    """Column such as a level or a topic. A prompt that has not been drawn yet is expected to be answered as
    prompts with the same value were lately; by default `source` in a mixture and `level` of a task with levels,
    and otherwise all prompts are alike."""
    reward: str | None = None
    """Name of the reward, between 0 and 1, that says whether an answer is right; by default all that do so."""


class PoolsDifficulty(_EstimatedDifficulty):
    """Prompts that are solved, or hopeless, are drawn only as often as asked for.

    Which they are is known once they were drawn, or from `solve_rate` or `samples`. If no other prompts are left,
    those of the pools are drawn after all.
    """

    kind: Literal["pools"]
    easy: Number = Field(default=1.0, gt=0, le=1)
    """A prompt is easy if its estimated share of right answers is at least this."""
    hard: Number = Field(default=0.0, ge=0, lt=1)
    """A prompt is hard if its estimated share of right answers is at most this."""
    easy_share: Number = Field(default=0.0, ge=0, le=1)
    """Share of the prompts that are drawn from the easy ones."""
    hard_share: Number = Field(default=0.0, ge=0, le=1)
    """Share of the prompts that are drawn from the hard ones."""


class AdaptiveDifficulty(_EstimatedDifficulty):
    """Prompts are drawn most often where about half of the answers are right, since these teach most.

    How often a prompt comes is proportional to `floor + (1 - floor) * 4 * p * (1 - p)`, where `p` is its estimated
    share of right answers.
    """

    kind: Literal["adaptive"]
    floor: Number = Field(default=0.1, gt=0, le=1)
    """Weight of prompts that are always or never solved, relative to those solved half of the time."""


DifficultyConfig = Annotated[
    Annotated[OrderDifficulty | PoolsDifficulty | AdaptiveDifficulty, Field(discriminator="kind")],
    ShortForm(
        lambda value: {"kind": value} if isinstance(value, str) else value,
        lambda full: {"enum": ["adaptive", "pools"]},
    ),
]
"""May be written as its `kind` alone, if that has a default for all else."""


def read_number(key: str, column: str, value: Any) -> float:
    """Return a row's number that prompts are drawn by; NaN if it has none.

    Raises:
        RecipeError: It is not a number, or a solve rate beyond 0 to 1.
    """
    path = f"dataset.difficulty.{key}"
    try:
        number = math.nan if value in (None, "") else float(value)
    except (TypeError, ValueError):
        seen = f"the column `{column}` has {value!r:.60}, which is not a number"
        fix = "name a column of numbers, or take the number out of it under `dataset.columns` (`regex`)"
        raise recipe_error(seen, fix, path) from None
    if key == "solve_rate" and not (math.isnan(number) or 0 <= number <= 1):
        seen = f"the column `{column}` has {number:g}, and shares are 0 to 1"
        fix = (
            "divide it by 100 if it is in percent, or by the number of attempts; if low values mean easy prompts, "
            "use `kind: order`"
        )
        raise recipe_error(seen, fix, path)
    return number
