"""A run's held-out measurement prompt by prompt, and the paired difference between those of two runs.

Owns reading `eval/after.jsonl`, and what makes two measurements comparable. The metrics and their
intervals are `analysis.metrics`'s.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from grpo_cli.analysis.metrics import Metric, PerPrompt, compare, per_prompt, summarize
from grpo_cli.analysis.ranking import GAP, RANKING, rank_by_prompt, read_ranked
from grpo_cli.analysis.samples import ScoredCompletion, as_scored, group_by_row
from grpo_cli.analysis.sentences import primary_metric, say_difference
from grpo_cli.errors import RewardError, UsageError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import name_rewards, right_scores
from grpo_cli.runs.files import parse_json
from grpo_cli.runs.folder import RunFolder

When = Literal["before", "after"]
_OF_REWARDS = ("reward", "rewards/", "accuracy/", "pass@", "maj@")


@dataclass(frozen=True)
class Measurement:
    """What was measured, prompt by prompt."""

    name: str
    """Of the run."""
    recipe: Recipe
    data: str | None
    """Fingerprint of the run's data; None where it was not written down."""
    prompts: dict[int, str]
    """Row of the data → what was asked, told apart from the same prompt of another row."""
    values: dict[str, PerPrompt]
    size: int
    """Completions a prompt."""
    primary: str
    """The metric that a verdict speaks of."""

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The mean of each metric with its 95 % interval."""
        return summarize(self.values, self.size, self.recipe.seed)

    def settings(self) -> dict[str, Any]:
        """What a difference may come from, beside the models."""
        recipe = self.recipe
        return {
            "temperature": recipe.evaluation.temperature,
            "samples_per_prompt": self.size,
            "max_completion_length": recipe.generation.max_completion_length,
            "rewards": [reward.model_dump(mode="json") for reward in recipe.rewards],
            "data": self.data,
        }


@dataclass(frozen=True)
class HeldOutDifference:
    """One run against the base run on the prompts that both measured."""

    base: str
    run: str
    prompts: int
    """How many both measured; 0 where nothing is paired."""
    only_base: int
    """Prompts that the base run alone measured."""
    only_run: int
    primary: str | None
    """The metric of the verdict."""
    differences: dict[str, Metric]
    """`run - base`, paired by prompt."""
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """What was measured otherwise: of the base, of the run."""
    verdict: str | None = None
    """The difference in a sentence."""
    reason: str | None = None
    """Why nothing is paired."""

    def as_json(self) -> dict[str, Any]:
        """The difference as plain values."""
        return {
            **vars(self),
            "differences": {name: each.as_json() for name, each in self.differences.items()},
            "settings": {name: list(pair) for name, pair in self.settings.items()},
        }


def read_measurement(run: RunFolder, name: str, when: When = "after") -> Measurement:
    """Reads the samples of a measurement.

    Args:
        run: The run.
        name: What it is called.
        when: Before or after training.

    Raises:
        UsageError: There are none, or they are damaged; the text is a reason in words.
    """
    recipe = run.read_recipe()
    samples = run.evaluations / f"{when}.jsonl"
    if not samples.is_file():
        raise UsageError(f"{name} has no held-out measurement {when} training{_say_why(recipe)}")
    try:
        groups = group_by_row(list(_read_samples(samples)))
        values, primary = _score(run, recipe, groups, when)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RewardError):
        raise UsageError(f"{samples} is damaged, or of another version") from None
    if not groups:
        raise UsageError(f"{samples} is empty")
    fingerprint = (run.read_manifest().get("data") or {}).get("fingerprint")
    size = min(map(len, groups))
    return Measurement(name, recipe, fingerprint, _tell_apart(groups), values, size, primary)


def compare_measurements(base: Measurement, run: Measurement) -> HeldOutDifference:
    """The paired difference `run - base` over the prompts that both measured."""
    rows = {prompt: row for row, prompt in base.prompts.items()}
    paired = {row: rows[prompt] for row, prompt in run.prompts.items() if prompt in rows}
    alone = len(base.prompts) - len(paired), len(run.prompts) - len(paired)
    then, now = base.settings(), run.settings()
    settings = {name: (then[name], now[name]) for name in then if then[name] != now[name]}
    if not paired:
        seen = f"{len(base.prompts)} and {len(run.prompts)} prompts, none the same"
        return _unpaired(base.name, run.name, f"they were measured on other prompts ({seen})")
    aligned = {
        metric: {paired[row]: value for row, value in found.items() if row in paired}
        for metric, found in run.values.items()
    }
    differences = {
        metric: found
        for metric, found in compare(base.values, aligned, base.recipe.seed).items()
        if _means_the_same(metric, base.recipe, run.recipe)
    }
    primary = _choose_primary(base.primary, differences)
    if primary.startswith((*_OF_REWARDS, GAP)):
        verdict = say_difference(primary, differences[primary], run.name, base.name)
    else:
        verdict = f"no verdict: {run.name} and {base.name} have no reward in common"
    return HeldOutDifference(
        base.name, run.name, len(paired), *alone, primary, differences, settings, verdict
    )


def compare_held_out(
    base: Measurement | UsageError, run: Measurement | UsageError, names: tuple[str, str]
) -> HeldOutDifference:
    """The same where one of the two may be lacking: the reason is then told.

    Args:
        base: The base run's, or why there is none.
        run: The other's.
        names: Of the two runs.
    """
    if isinstance(base, UsageError):
        return _unpaired(*names, str(base))
    if isinstance(run, UsageError):
        return _unpaired(*names, str(run))
    return compare_measurements(base, run)


def try_measurement(run: RunFolder, name: str, when: When = "after") -> Measurement | UsageError:
    """A measurement, or the reason why there is none."""
    try:
        return read_measurement(run, name, when)
    except UsageError as error:
        return error


def _unpaired(base: str, run: str, reason: str) -> HeldOutDifference:
    return HeldOutDifference(base, run, 0, 0, 0, None, {}, reason=reason)


def _say_why(recipe: Recipe) -> str:
    return " (evaluation.limit is 0)" if recipe.evaluation.limit == 0 else ""


def _read_samples(path: Path) -> Iterator[ScoredCompletion]:
    # Not `splitlines`, which also breaks at U+2028 and its kin inside a text.
    for line in path.read_bytes().split(b"\n"):
        if line:
            yield as_scored(parse_json(line))


def _score(
    run: RunFolder, recipe: Recipe, groups: Sequence[Sequence[ScoredCompletion]], when: When
) -> tuple[dict[str, PerPrompt], str]:
    """Every metric of every prompt, and the one that matters most."""
    # Both measurements decide: one in which an answer is never right shows zeros alone.
    samples = [run.evaluations / f"{each}.jsonl" for each in ("before", "after")]
    scores = (one.rewards for path in samples if path.is_file() for one in _read_samples(path))
    right = right_scores(recipe.rewards, scores)
    values = per_prompt(groups, right)
    if recipe.is_sampled:
        return values, primary_metric(right)
    # Nothing scores the sampled answers: what was learnt is which response is likelier.
    ranked = rank_by_prompt(read_ranked(run.evaluations / f"{when}_ranked.jsonl"))
    values.pop("reward", None)
    found = {f"accuracy/{RANKING}": ranked[RANKING], GAP: ranked[GAP], **values}
    return found, f"accuracy/{RANKING}"


def _tell_apart(groups: Sequence[Sequence[ScoredCompletion]]) -> dict[int, str]:
    """Each row's prompt as text; that of a prompt's second row is another than that of its first."""
    seen: Counter[str] = Counter()
    found = {}
    for group in groups:
        text = json.dumps(group[0].prompt, sort_keys=True, ensure_ascii=False)
        seen[text] += 1
        found[group[0].row] = f"{seen[text]}: {text}"
    return found


def _means_the_same(metric: str, base: Recipe, run: Recipe) -> bool:
    """Whether two recipes score a metric alike."""
    if not metric.startswith(_OF_REWARDS):
        return True
    if metric == "reward":
        return base.rewards == run.rewards
    name = metric.partition("/")[2]
    return _read_reward(base, name) == _read_reward(run, name)


def _read_reward(recipe: Recipe, name: str) -> Mapping[str, Any] | None:
    """A reward's settings by its name, but for those that leave its score as it is."""
    named = zip(name_rewards(recipe.rewards), recipe.rewards, strict=True)
    for own, config in named:
        if own == name:
            free = {"name", "weight", "timeout_s"}
            return {
                key: value
                for key, value in config.model_dump(mode="json").items()
                if key not in free
            }
    return None


def _choose_primary(wanted: str, differences: Mapping[str, Metric]) -> str:
    """The wanted metric, or the first that both have and that says most."""
    order = (wanted, "reward", *(name for name in differences if name.startswith("accuracy/")))
    return next((name for name in order if name in differences), next(iter(differences)))
