"""What a training did to the held-out prompts: every number before and after with its interval, and the change.

Owns the pair of measurements of one run. Reading one is `held_out.py`'s.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.analysis.estimates import ALL_EQUAL
from grpo_cli.analysis.metrics import Metric, PerPrompt, compare
from grpo_cli.analysis.ranking import GAP
from grpo_cli.report.held_out import Measurement, try_measurement
from grpo_cli.runs.folder import RunFolder

SHARES = ("accuracy/", "pass@", "maj@")
"""How metrics begin that are shares of right answers."""
_ORDER = ("accuracy/", "pass@", "maj@", GAP, "reward", "rewards/")
"""What says most first."""
_NO_SAMPLES = "its samples are not there"


@dataclass(frozen=True)
class Gain:
    """The measurements of one run; empty where nothing was measured."""

    before: dict[str, Metric] = field(default_factory=dict)
    after: dict[str, Metric] = field(default_factory=dict)
    change: dict[str, Metric] = field(default_factory=dict)
    """The difference of each metric that both have, paired by prompt."""
    values: dict[str, dict[str, PerPrompt]] = field(default_factory=dict)
    """`before` and `after` → metric → the value for each prompt; where the samples are there."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`before` and `after` → how long it took."""
    temperature: float | None = None
    """Of sampling; 0 is greedy."""

    @property
    def names(self) -> list[str]:
        """Every metric, those that say most first."""
        return sort_names((*self.before, *self.after))

    @property
    def sampling(self) -> str:
        """How the answers came about, in words; empty where that was not written down."""
        if self.temperature is None:
            return ""
        return f"at temperature {self.temperature:g}" if self.temperature else "greedily"

    def moved(self) -> dict[str, Metric]:
        """The changes of rewards and accuracies beyond their interval, but for that of the primary metric.

        Falls come first. A reward that says the same as the primary metric, as the only one does, is left out.
        """
        told = self.change.get(self.primary or "")
        found = {
            name: change
            for name in self.names
            if name.startswith(("accuracy/", "reward"))
            and name != self.primary
            and (change := self.change.get(name))
            and direction(change)
            and not (told and _same(change, told))
        }
        return dict(sorted(found.items(), key=lambda each: direction(each[1])))

    @property
    def primary(self) -> str | None:
        """The metric that a verdict speaks of."""
        told = (name for name in self.names if name.startswith(("accuracy/", "reward")))
        return next(told, None)


def read_gain(run: RunFolder, before: Mapping[str, Any], after: Mapping[str, Any]) -> Gain:
    """Reads both measurements of a run.

    Args:
        run: The run.
        before: What `eval/before.json` says; empty where it is not there.
        after: The same of `eval/after.json`.
    """
    sampled = {
        when: found
        for when in ("before", "after")
        if isinstance(found := try_measurement(run, "the run", when), Measurement)
    }
    told = {"before": before, "after": after}
    values = {when: found.values for when, found in sampled.items()}
    # A run that was forced to go on with other rows has measured other prompts.
    asked = [found.prompts for found in sampled.values()]
    same = len(asked) > 1 and asked[0] == asked[1]
    seed = next((found.recipe.seed for found in sampled.values()), 0)
    metrics = {
        when: sampled[when].metrics if when in sampled else _from_summary(told[when])
        for when in told
    }
    if len(sampled) > 1:
        # A function's scores may look like those of right answers in one measurement alone: all are 0.
        both = metrics["before"].keys() & metrics["after"].keys()
        metrics = {
            when: {
                name: each
                for name, each in found.items()
                if name in both or not name.startswith(SHARES)
            }
            for when, found in metrics.items()
        }
    temperatures = [each["temperature"] for each in told.values() if "temperature" in each]
    return Gain(
        **metrics,
        change=compare(values["before"], values["after"], seed) if same else {},
        values=values,
        seconds={when: each["seconds"] for when, each in told.items() if _has(each, "seconds")},
        temperature=temperatures[-1] if temperatures and _is_number(temperatures[-1]) else None,
    )


def sort_names(names: Iterable[str]) -> list[str]:
    """Names of metrics, each once, those that say most first."""
    places = {
        name: next((i for i, each in enumerate(_ORDER) if name.startswith(each)), len(_ORDER))
        for name in names
    }
    return sorted(places, key=places.__getitem__)


def direction(change: Metric | None) -> int:
    """1 where a difference is beyond doubt a rise, -1 where it is a fall, else 0."""
    if change is None or change.value is None:
        return 0
    if change.reason == ALL_EQUAL:
        return (change.value > 0) - (change.value < 0)
    if change.low is None or change.high is None:
        return 0
    return (change.low > 0) - (change.high < 0)


def _same(one: Metric, other: Metric) -> bool:
    ends = ("value", "low", "high")
    return all(getattr(one, end) == getattr(other, end) for end in ends)


def _from_summary(told: Mapping[str, Any]) -> dict[str, Metric]:
    """The numbers of a measurement alone, where its samples are not there."""
    found = {name: told.get(name) for name in ("reward", GAP, "completion_length", "clipped")}
    for kind in ("accuracy", "rewards"):
        values = told.get(kind)
        if isinstance(values, dict):
            found |= {f"{kind}/{name}": value for name, value in values.items()}
    prompts = told["prompts"] if _has(told, "prompts") else 0
    return {
        name: Metric(float(value), None, None, int(prompts), _NO_SAMPLES)
        for name, value in found.items()
        if value is not None and _is_number(value)
    }


def _has(told: Mapping[str, Any], name: str) -> bool:
    return _is_number(told.get(name))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
