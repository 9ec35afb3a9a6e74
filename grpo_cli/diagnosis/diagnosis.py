"""Every rule, applied to a run: to a finished one, or to one in progress as its records come."""

from collections.abc import Mapping
from typing import Any

from grpo_cli.diagnosis.history import History
from grpo_cli.diagnosis.symptom import Symptom
from grpo_cli.recipe.recipe import Recipe


def diagnose(history: History) -> list[Symptom]:
    """What is wrong with a run, the worst first."""
    return []


class Watch:
    """The rules beside a training: tells of each symptom once, when it arises."""

    def __init__(self, recipe: Recipe) -> None:
        self.history = History(recipe)
        self._told: set[str] = set()

    def add(self, record: Mapping[str, Any]) -> list[Symptom]:
        """Takes a record of `metrics.jsonl`; gives the symptoms that were not there before it."""
        self.history.add(record)
        fresh = [each for each in diagnose(self.history) if each.rule not in self._told]
        self._told |= {each.rule for each in fresh}
        return fresh
