"""Learning rates between which GRPO learns: below them hardly anything moves, above them most runs are lost.

Owns the numbers. Who speaks up about them, and when, is not decided here.
"""

from dataclasses import dataclass

from grpo_cli.recipe.recipe import Recipe


@dataclass(frozen=True)
class Rates:
    """What is usual for one way of training."""

    least: float
    """Below it, hardly anything moves."""
    usual: float
    """What a run that has no reason for another may take."""
    most: float
    """Above it, the policy leaves the language it knew within tens of steps."""


LORA = Rates(least=5e-6, usual=1e-4, most=2e-3)
"""Adapters start at zero and need steps 10 to 100 times those of full fine-tuning."""
FULL = Rates(least=1e-7, usual=1e-6, most=5e-5)


def rates_of(recipe: Recipe) -> Rates:
    """What is usual for a recipe, by what it trains."""
    return FULL if recipe.model.lora is None else LORA
