"""The held-out measurements of a run, before and after: every number with its interval, and the change.

Owns finding the numbers in a run's files. What metrics count is `measure.metrics`'.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from grpo_cli.errors import GrpoError
from grpo_cli.estimates import ALL_EQUAL
from grpo_cli.measure.metrics import Metric, PerPrompt, compare, per_prompt, summarize
from grpo_cli.measure.ranking import GAP, RANKING, rank_by_prompt, read_ranked
from grpo_cli.measure.samples import ScoredCompletion, group_by_row
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import right_scores
from grpo_cli.runs.folder import RunFolder

STAGES = ("before", "after")
_SAMPLE = TypeAdapter(ScoredCompletion)
_NOT_METRICS = frozenset({"schema_version", "prompts", "completions", "temperature", "seconds"})


@dataclass(frozen=True)
class HeldOut:
    """What was measured on prompts that were not trained on; empty where nothing was."""

    stages: dict[str, dict[str, Metric]] = field(default_factory=dict)
    """`before` and `after`, where they are there → metric → its mean over prompts."""
    change: dict[str, Metric] = field(default_factory=dict)
    """The paired difference of each metric that both have."""
    per_prompt: dict[str, dict[str, PerPrompt]] = field(default_factory=dict)
    """Stage → metric → the value for each row; only where the samples are there."""
    samples: dict[str, list[list[ScoredCompletion]]] = field(default_factory=dict)
    """Stage → the completions of each prompt."""
    right: dict[str, float] = field(default_factory=dict)
    """For each reward that judges answers, the score of a right one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Stage → how long it took."""
    temperature: float | None = None
    """Of sampling; 0 is greedy."""

    @property
    def names(self) -> list[str]:
        """Every metric, in the order of first sight."""
        return list(dict.fromkeys(name for found in self.stages.values() for name in found))

    @property
    def leading(self) -> str | None:
        """The metric that says most: an accuracy, else the ranking of scored answers, else the reward."""
        judged = [name for name in self.names if name.startswith("accuracy/")]
        return next((name for name in (*judged, RANKING, "reward") if name in self.names), None)


def read_held_out(
    run: RunFolder, recipe: Recipe, before: Mapping[str, Any], after: Mapping[str, Any]
) -> HeldOut:
    """Reads both measurements.

    Args:
        run: The run.
        recipe: Its recipe, which says what a right answer scores.
        before: What `eval/before.json` says; empty where it is not there.
        after: The same of `eval/after.json`.
    """
    told = {stage: each for stage, each in zip(STAGES, (before, after), strict=True) if each}
    samples = {stage: read_samples(run.evaluations / f"{stage}.jsonl") for stage in told}
    right = _read_right(recipe)
    values = {stage: _values(run, stage, samples[stage], right) for stage in told}
    stages = {
        stage: _from_summary(told[stage])
        | summarize(values[stage], recipe.evaluation.samples_per_prompt, recipe.seed)
        for stage in told
    }
    temperature = next((each.get("temperature") for each in told.values()), None)
    return HeldOut(
        {stage: _in_order(found) for stage, found in stages.items()},
        compare(values["before"], values["after"], recipe.seed) if len(told) > 1 else {},
        values,
        {stage: groups for stage, groups in samples.items() if groups},
        right,
        {stage: float(each["seconds"]) for stage, each in told.items() if _is_number(each.get("seconds"))},
        temperature if _is_number(temperature) else None,
    )


def read_samples(path: Path) -> list[list[ScoredCompletion]]:
    """The completions of each prompt; damaged lines, and those of other rewards, are passed over."""
    found = list(_read_lines(path))
    return group_by_row([each for each in found if each.rewards.keys() == found[0].rewards.keys()])


def explain(metric: Metric) -> str:
    """Why a number has no interval, in words; empty where it has one."""
    return "the same change for all prompts" if metric.reason == ALL_EQUAL else metric.reason or ""


def _read_lines(path: Path) -> Iterator[ScoredCompletion]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield _SAMPLE.validate_json(line)
        except ValueError:
            continue


def _read_right(recipe: Recipe) -> dict[str, float]:
    try:
        return right_scores(recipe.rewards)
    except (GrpoError, KeyError):
        # A kind that this version does not know: its answers stay unjudged.
        return {}


def _values(
    run: RunFolder, stage: str, groups: Sequence[Sequence[ScoredCompletion]], right: dict[str, float]
) -> dict[str, PerPrompt]:
    found: dict[str, PerPrompt] = {}
    if groups:
        known = groups[0][0].rewards
        found = per_prompt(groups, {name: best for name, best in right.items() if name in known})
        if not known:
            # Nothing scores what scored data is answered: a total of nothing is no reward.
            del found["reward"]
    try:
        ranked = rank_by_prompt(read_ranked(run.evaluations / f"{stage}_ranked.jsonl"))
    except (OSError, ValueError, TypeError):
        ranked = {}
    return {**ranked, **found}


def _from_summary(told: Mapping[str, Any]) -> dict[str, Metric]:
    """The numbers of the measurement alone, for runs whose samples are not there."""
    found = {name: value for name, value in told.items() if name not in _NOT_METRICS}
    nested = {
        name if name == RANKING else f"{kind}/{name}": value
        for kind in ("accuracy", "rewards")
        if isinstance(found.get(kind), dict)
        for name, value in found[kind].items()
    }
    prompts = told.get("prompts")
    return {
        name: Metric(
            float(value), None, None, prompts if isinstance(prompts, int) else 0, "its samples are not there"
        )
        for name, value in {**found, **nested}.items()
        if _is_number(value)
    }


def _in_order(found: dict[str, Metric]) -> dict[str, Metric]:
    """What says most first."""
    first = ("accuracy/", "pass@", "maj@", RANKING, GAP, "reward")
    places = {name: next((i for i, each in enumerate(first) if name.startswith(each)), 9) for name in found}
    return {name: found[name] for name in sorted(found, key=places.__getitem__)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
