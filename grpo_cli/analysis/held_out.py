"""Held-out measurements prompt by prompt: one run's before and after training, and those of two runs."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from grpo_cli.analysis.metrics import (
    GAP,
    LOGGED,
    RANKING,
    Metric,
    PerPrompt,
    add_logged,
    compare,
    flatten_summary,
    per_prompt,
    rank_by_prompt,
    read_ranked,
    say_difference,
    subtract_logged,
    summarize,
)
from grpo_cli.analysis.samples import ScoredCompletion, as_scored, group_by_row
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import name_rewards, right_scores
from grpo_cli.runs.metrics import STAGES, When
from grpo_cli.runs.run import Run

SHARES = ("accuracy/", "pass@", "maj@")
"""Prefixes of metrics that are shares of right answers."""
_OF_REWARDS = ("reward", "rewards/", *SHARES)
_ORDER = (*SHARES, GAP, "reward", "rewards/")
"""The most telling first."""
_SCORE_KEEPING = {"name", "weight", "timeout_s"}
"""Parameters of a reward that do not change its scores."""


@dataclass(frozen=True)
class Measurement:
    """One measurement, prompt by prompt."""

    run: Run
    prompts: dict[int, str]
    """Row of the data → the prompt; repeated prompts are numbered."""
    values: dict[str, PerPrompt]
    size: int
    """Completions a prompt."""
    logged: dict[str, float] = field(default_factory=dict)
    """What rewards logged of all completions together."""

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The mean of each metric with its 95 % interval."""
        return add_logged(summarize(self.values, self.size), self.logged, len(self.prompts))

    def settings(self) -> dict[str, Any]:
        """Return what may explain a difference besides the models."""
        recipe = self.run.recipe
        return {
            "temperature": recipe.evaluation.temperature,
            "samples_per_prompt": self.size,
            "max_completion_length": recipe.generation.max_completion_length,
            "rewards": [reward.model_dump(mode="json") for reward in recipe.rewards],
            "data": self.run.manifest["data"].get("fingerprint"),
        }


def read_measurement(run: Run, when: When = "after") -> Measurement | str:
    """Read a measurement; return the reason in words if there is none."""
    path = run.folder.evaluations / f"{when}.jsonl"
    if not path.is_file():
        why = " (evaluation.limit is 0)" if run.recipe.evaluation.limit == 0 else ""
        return f"{run.name} has no held-out measurement {when} training{why}"
    groups = group_by_row(map(as_scored, run.samples(when)))
    if not groups:
        return f"{path} holds no samples that can be read"
    if (values := _score(run, groups, when)) is None:
        return f"{path} is of an earlier version, or of other rewards"
    logged = run.measured(when).get(LOGGED, {})
    return Measurement(run, _number_prompts(groups), values, min(map(len, groups)), logged)


def _score(
    run: Run, groups: Sequence[Sequence[ScoredCompletion]], when: When
) -> dict[str, PerPrompt] | None:
    """Return each metric by prompt; None if a sample lacks the score of a reward."""
    names = {*name_rewards(run.recipe.rewards)}
    if any(names - each.rewards.keys() for group in groups for each in group):
        return None
    values = per_prompt(groups, right_scores(run.recipe.rewards), run.recipe.dataset.shares)
    if not run.recipe.rewards:
        values.pop("reward", None)
    if run.recipe.is_sampled:
        return values
    # Nothing scores the sampled answers: what was learned is which response is likelier.
    ranked = rank_by_prompt(read_ranked(run.folder.evaluations / f"{when}_ranked.jsonl"))
    return {f"accuracy/{RANKING}": ranked[RANKING], GAP: ranked[GAP], **values}


def _number_prompts(groups: Sequence[Sequence[ScoredCompletion]]) -> dict[int, str]:
    seen: Counter[str] = Counter()
    prompts = {}
    for group in groups:
        text = json.dumps(group[0].prompt, sort_keys=True, ensure_ascii=False)
        seen[text] += 1
        prompts[group[0].row] = f"{seen[text]}: {text}"
    return prompts


@dataclass(frozen=True)
class HeldOut:
    """What training did to one run's held-out prompts; empty if nothing was measured."""

    measurements: dict[When, Measurement | str]
    """Each stage, or why there are no samples of it."""
    before: dict[str, Metric]
    after: dict[str, Metric]
    warmup: dict[str, Metric]
    change: dict[str, Metric]
    """From before to after, of each metric that both have, paired by prompt."""
    since_warmup: dict[str, Metric]

    @property
    def values(self) -> dict[str, dict[str, PerPrompt]]:
        """Stage → metric → the value of each prompt, of those whose samples are there."""
        read = self.measurements.items()
        return {stage: each.values for stage, each in read if isinstance(each, Measurement)}

    @property
    def names(self) -> list[str]:
        """Every metric, the most telling first."""
        return sort_names((*self.before, *self.after))

    @property
    def primary(self) -> str:
        """The metric that a verdict speaks of; empty if there is none."""
        return find_primary(self.names)

    @property
    def stages(self) -> dict[When, Metric]:
        """The change of the primary metric since each earlier stage that was measured, the nearest first."""
        changes: dict[When, dict[str, Metric]] = {
            "warmup": self.since_warmup,
            "before": self.change,
        }
        known = {stage: each.get(self.primary) for stage, each in changes.items()}
        return {stage: each for stage, each in known.items() if each}

    def moved(self) -> dict[str, Metric]:
        """Return changes of rewards and accuracies beyond their interval, falls first.

        Leaves out the primary metric, and a reward that says the same, as an only reward does.
        """
        primary = self.change.get(self.primary)
        moved = {
            name: change
            for name in self.names
            if name.startswith(("accuracy/", "reward")) and name != self.primary
            if (change := self.change.get(name)) and change.direction and change != primary
        }
        return dict(sorted(moved.items(), key=lambda each: each[1].direction))


def read_held_out(run: Run) -> HeldOut:
    """Read the measurements of a run; their summaries stand in if the samples are gone."""
    read = {stage: read_measurement(run, stage) for stage in STAGES}
    metrics = {
        stage: _from_summary(run.measured(stage)) if isinstance(each, str) else each.metrics
        for stage, each in read.items()
    }
    change, since_warmup = (_change(read[stage], read["after"]) for stage in ("before", "warmup"))
    return HeldOut(read, **metrics, change=change, since_warmup=since_warmup)


def _change(before: Measurement | str, after: Measurement | str) -> dict[str, Metric]:
    # A run that was forced to resume with other rows has measured other prompts.
    if isinstance(before, str) or isinstance(after, str) or before.prompts != after.prompts:
        return {}
    changes = subtract_logged(before.logged, after.logged)
    return add_logged(compare(before.values, after.values), changes, len(before.prompts))


def _from_summary(summary: Mapping[str, Any]) -> dict[str, Metric]:
    prompts, reason = summary.get("prompts", 0), "its samples are not there"
    return {
        name: Metric(float(value), None, None, prompts, reason)
        for name, value in flatten_summary(summary).items()
        if value is not None
    }


def sort_names(names: Iterable[str]) -> list[str]:
    """Return names of metrics, each once, the most telling first."""
    places = {
        name: next((i for i, each in enumerate(_ORDER) if name.startswith(each)), len(_ORDER))
        for name in names
    }
    return sorted(places, key=places.__getitem__)


def find_primary(names: Iterable[str]) -> str:
    """Return the metric that a verdict speaks of; empty if there is none."""
    return next(
        (name for name in sort_names(names) if name.startswith(("accuracy/", "reward"))), ""
    )


Tone = Literal["good", "bad", "plain"]


def find_tone(changes: Iterable[Metric], *, collapsed: bool) -> Tone:
    """Return how the changes of a model's primary metric are meant, in every view.

    Args:
        changes: Since each earlier stage, the nearest first: what GRPO did counts, not what a warm-up did.
        collapsed: Whether its answers became the same for all prompts.
    """
    if collapsed:
        return "bad"
    nearest = next(iter(changes), None)
    tones: dict[int, Tone] = {1: "good", 0: "plain", -1: "bad"}
    return tones[direction(nearest)]


def direction(change: Metric | None) -> int:
    """Return 1 if a difference is beyond doubt a rise, -1 if it is a fall, else 0."""
    return change.direction if change else 0


@dataclass(frozen=True)
class HeldOutDifference:
    """One run against the base run on the prompts that both measured."""

    base: str
    run: str
    prompts: int
    """How many both measured; 0 if nothing is paired."""
    only_base: int
    """Prompts that only the base run measured."""
    only_run: int
    primary: str | None
    differences: dict[str, Metric]
    """`run - base`, paired by prompt."""
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings of the measurement that differ: of the base, of the run."""
    verdict: str | None = None
    reason: str | None = None


def compare_held_out(
    base: Measurement | str, run: Measurement | str, names: tuple[str, str]
) -> HeldOutDifference:
    """Return the paired difference `run - base` of two named runs, or why there is none."""
    if isinstance(base, str) or isinstance(run, str):
        reason = base if isinstance(base, str) else str(run)
        return HeldOutDifference(*names, 0, 0, 0, None, {}, reason=reason)
    recipes = base.run.recipe, run.run.recipe
    rows = {prompt: row for row, prompt in base.prompts.items()}
    paired = {row: rows[prompt] for row, prompt in run.prompts.items() if prompt in rows}
    alone = len(base.prompts) - len(paired), len(run.prompts) - len(paired)
    then, now = base.settings(), run.settings()
    settings = {name: (then[name], now[name]) for name in then if then[name] != now[name]}
    if not paired:
        seen = f"{len(base.prompts)} and {len(run.prompts)} prompts, none the same"
        reason = f"they were measured on other prompts ({seen})"
        return HeldOutDifference(*names, 0, *alone, None, {}, reason=reason)
    aligned = {
        metric: {paired[row]: value for row, value in values.items() if row in paired}
        for metric, values in run.values.items()
    }
    differences = {
        metric: difference
        for metric, difference in compare(base.values, aligned).items()
        if scored_alike(metric, *recipes)
    }
    primary = sort_names(differences)[0]
    if primary.startswith((*_OF_REWARDS, GAP)):
        verdict = say_difference(primary, differences[primary], names[1], names[0])
    else:
        verdict = f"no verdict: {names[1]} and {names[0]} have no reward in common"
    return HeldOutDifference(*names, len(paired), *alone, primary, differences, settings, verdict)


def scored_alike(metric: str, base: Recipe, run: Recipe) -> bool:
    """Return whether two recipes give a metric the same meaning."""
    metric = metric.partition("@")[0] if not metric.startswith(("pass@", "maj@")) else metric
    if not metric.startswith(_OF_REWARDS):
        return True
    if metric == "reward":
        return base.rewards == run.rewards
    name = metric.partition("/")[2]
    return _scoring_of(base, name) == _scoring_of(run, name)


def _scoring_of(recipe: Recipe, name: str) -> dict[str, Any] | None:
    configs = dict(zip(name_rewards(recipe.rewards), recipe.rewards, strict=True))
    return (
        configs[name].model_dump(mode="json", exclude=_SCORE_KEEPING) if name in configs else None
    )
