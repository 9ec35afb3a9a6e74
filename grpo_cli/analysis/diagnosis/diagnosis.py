"""Every rule, applied to a run: to a finished one, or to one in progress as its records come."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.analysis.diagnosis.rule import Rule
from grpo_cli.analysis.diagnosis.rules import RULES
from grpo_cli.analysis.diagnosis.symptom import Symptom
from grpo_cli.recipe.recipe import Recipe

_LOG = logging.getLogger(__name__)
_ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Diagnosis:
    """What all rules say of a run."""

    symptoms: tuple[Symptom, ...]
    """The worst first."""
    obstacles: Mapping[str, str]
    """Why rules could not look, by their names."""
    rules: int
    """How many there are."""

    @property
    def errors(self) -> tuple[Symptom, ...]:
        """Those by which the run learns nothing, or loses what it learned."""
        return tuple(each for each in self.symptoms if each.level == "error")

    def as_json(self) -> dict[str, Any]:
        """The diagnosis as plain values, for `--json`."""
        return {
            "symptoms": [each.as_json() for each in self.symptoms],
            "rules": self.rules,
            "not_looked": dict(self.obstacles),
        }


def examine(history: History) -> Diagnosis:
    """Applies every rule, and says which could not look."""
    blind = {rule.name: why for rule in RULES if (why := rule.unsupported_reason(history))}
    return Diagnosis(tuple(diagnose(history)), blind, len(RULES))


def diagnose(history: History, names: Collection[str] | None = None) -> list[Symptom]:
    """What is wrong with a run, the worst first.

    Args:
        history: The run, as far as it has come.
        names: The rules to apply; None applies all.
    """
    rules = [rule for rule in RULES if names is None or rule.name in names]
    return sorted(_apply(rules, history), key=lambda each: _ORDER[each.level])


def _apply(rules: Iterable[Rule], history: History) -> Iterable[Symptom]:
    for rule in rules:
        try:
            found = rule.apply(history)
        except Exception:
            # A damaged value must not take a training or a display down.
            _LOG.warning("the rule %s failed", rule.name, exc_info=True)
            continue
        if found is not None:
            yield found


class Watch:
    """The rules beside a training: tells of each symptom once, when it first arises.

    Args:
        recipe: What is trained.
        source: What commands take as this recipe, such as the path of its `resolved.json`.
    """

    def __init__(self, recipe: Recipe, source: str = "RECIPE") -> None:
        self.history = History(recipe, source=source)
        self._told: set[str] = set()

    def add(self, record: Mapping[str, Any]) -> list[Symptom]:
        """Takes a record of `metrics.jsonl`; gives the symptoms that were not there before it."""
        self.history.add(record)
        fresh = [each for each in diagnose(self.history) if each.rule not in self._told]
        self._told |= {each.rule for each in fresh}
        return fresh
