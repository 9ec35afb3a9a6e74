"""The result of an evaluation: metrics with intervals, the gain over the baseline, and a verdict."""

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_cli.analysis.diagnosis.history import describe_collapse, find_answers
from grpo_cli.analysis.metrics import (
    Metric,
    PerPrompt,
    add_logged,
    compare,
    metric_names,
    per_prompt,
    primary_metric,
    say_difference,
    subtract_logged,
    summarize,
)
from grpo_cli.analysis.samples import ScoredCompletion, as_scored, count_failures, group_by_row
from grpo_cli.errors import RunError, UsageError
from grpo_cli.eval.folder import EvalFolder
from grpo_cli.eval.request import WARMUP, EvalRequest
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import name_rewards, right_scores
from grpo_cli.runs.files import SCHEMA_VERSION, damaged, read_file, write_json
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.manifest import describe_origin
from grpo_cli.runs.records import EvalResult
from grpo_cli.runs.selection import is_run

_ROUNDING = 1e-9
_SETTINGS = ("split", "limit", "samples", "temperature", "seed", "backend", "batch_size")


@dataclass(frozen=True)
class Measured:
    """One subject's completions, and its metrics prompt by prompt."""

    groups: list[list[ScoredCompletion]]
    right: dict[str, float]
    """For each reward that judges answers, the score of a right one."""
    values: dict[str, PerPrompt]
    seconds: float
    """Spent on sampling, by all processes together."""
    logged: dict[str, float]
    """What rewards logged of all completions together."""

    @property
    def tokens(self) -> int:
        """Sampled in all."""
        return sum(each.tokens for group in self.groups for each in group)

    def unscored(self) -> dict[str, Any]:
        """Return how many completions there are, and how many of them rewards did not score."""
        scored = [each for group in self.groups for each in group]
        return {"completions": len(scored), **count_failures(scored)}

    def as_json(self, samples: int) -> dict[str, Any]:
        """Return the subject's numbers as the result holds them."""
        metrics = add_logged(summarize(self.values, samples), self.logged, len(self.groups))
        return {
            "prompts": len(self.groups),
            "tokens": self.tokens,
            "sampling_s": round(self.seconds, 2),
            "tokens_per_s": round(self.tokens / self.seconds, 1) if self.seconds else None,
            **self.unscored(),
            "metrics": {name: metric.as_json() for name, metric in metrics.items()},
        }

    def change_from(self, baseline: "Measured") -> dict[str, Metric]:
        """Return the difference of each metric that both have, paired by prompt."""
        changes = subtract_logged(baseline.logged, self.logged)
        return add_logged(compare(baseline.values, self.values), changes, len(self.groups))


def read_measured(folder: EvalFolder, subject: str, recipe: Recipe) -> Measured:
    """Read a subject's samples back; raises `UsageError` if there are none."""
    chunks = list(folder.read_chunks(subject).values())
    groups = group_by_row([as_scored(each) for chunk in chunks for each in chunk])
    if not groups:
        raise UsageError(f"{folder.path} holds no samples of `{subject}`", "measure it again")
    right = right_scores(recipe.rewards)
    return Measured(
        groups,
        right,
        per_prompt(groups, right, recipe.dataset.shares),
        sum(chunk[0]["chunk_s"] for chunk in chunks),
        folder.read_logged(subject),
    )


def finish(
    request: EvalRequest, folder: EvalFolder, harness: dict[str, Any] | None
) -> dict[str, Any]:
    """Sum up what was sampled; write and return the result, with the harness's scores if it was run.

    Raises `RunError` if samples are missing.
    """
    recipe, data, baseline = request.recipe, folder.read_data(), request.baseline
    measured = {
        subject.name: read_measured(folder, subject.name, recipe) for subject in request.subjects
    }
    for name, each in measured.items():
        torn = sum(len(group) != request.samples for group in each.groups)
        if len(each.groups) != data["rows"] or torn:
            raise RunError(
                f"the samples of `{name}` hold {len(each.groups)} of {data['rows']} prompts, {torn} of them not "
                f"with {request.samples} completions",
                "measure again with another --out",
            )
    differences = {
        name: each.change_from(measured[baseline])
        for name, each in measured.items()
        if baseline is not None and name != baseline
    }
    first, *others = [each.right for each in measured.values()]
    primary = primary_metric(name for name in first if all(name in each for each in others))
    result = {
        "schema_version": SCHEMA_VERSION,
        "kind": "grpo-eval",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "source": request.source,
        "origin": describe_origin(sys.argv, Path(request.source), request.seed),
        "settings": request.model_dump(mode="json", include=set(_SETTINGS)),
        "data": data,
        "primary": primary,
        "baseline": baseline,
        "subjects": {
            subject.name: {
                "model": subject.model.path,
                "adapter": subject.adapter,
                **measured[subject.name].as_json(request.samples),
            }
            for subject in request.subjects
        },
        "differences": {
            name: {metric: change.as_json() for metric, change in changes.items()}
            for name, changes in differences.items()
        },
        "verdicts": {
            name: _say_verdict(name, primary, baseline or "", measured, recipe)
            for name in differences
        },
        "recipe": recipe.model_dump(mode="json"),
        **({"harness": harness} if harness is not None else {}),
    }
    write_json(folder.result, result)
    return result


def _say_verdict(
    name: str, metric: str, baseline: str, measured: Mapping[str, Measured], recipe: Recipe
) -> str:
    """Return what a model gained over the stage before it, then over the baseline, and whether it collapsed."""
    model = measured[name]
    stages = [WARMUP] if WARMUP in measured and name != WARMUP else []
    changes = {
        stage: compare(measured[stage].values, model.values)[metric]
        for stage in [*stages, baseline]
    }
    answers, *earlier = (
        find_answers(each.groups, recipe) for each in (model, *(measured[each] for each in changes))
    )
    nearest, *others = (say_difference(metric, each, name, of) for of, each in changes.items())
    if collapse := describe_collapse(recipe, answers, *earlier):
        others, nearest = [nearest, *others], f"worse: {collapse}"
    return "; ".join([nearest, *others])


def read_result(path: Path) -> tuple[EvalFolder, dict[str, Any]]:
    """Read a result and the folder it lies in; `path` is either, or a run, whose newest result it then is.

    Raises `UsageError` if there is no result, or it is of another version.
    """
    if is_run(path):
        finished = [each.parent for each in RunFolder(path).evaluations.glob("*/result.json")]
        if not finished:
            raise UsageError(
                f"{path} has no finished evaluation by `grpo eval`",
                f"grpo eval {path}, with --resume for "
                "one that was interrupted; `grpo runs compare RUN_A RUN_B` compares the runs' own measurements",
            )
        path = max(finished)
    folder = EvalFolder(path if path.is_dir() else path.parent)
    file = folder.result if path.is_dir() else path
    if not file.is_file():
        begun = folder.request.is_file()
        hint = (
            "grpo eval … --resume finishes it" if begun else "name a folder that `grpo eval` made"
        )
        raise UsageError(f"{path} holds no result.json", hint)
    fix = "name a result.json of `grpo eval`, or measure again"
    result = read_file(file, EvalResult, fix=fix)
    try:
        Recipe.model_validate(result["recipe"])
    except ValueError as error:
        raise damaged(file, error, fix) from None
    return folder, result


def compare_results(first: str, second: str) -> dict[str, Any]:
    """Return the paired difference between the models of two results.

    Each is a result or its folder, with `:NAME` behind it if it holds several models.

    Raises `UsageError` if they were not measured on the same prompts, or hold several models and none is
    named.
    """
    (before, old, result), (after, new, other) = _read_side(first), _read_side(second)
    settings, others = _read_settings(result), _read_settings(other)
    prompts, other_prompts = _prompts(old), _prompts(new)
    if prompts != other_prompts:
        common = len(prompts.items() & other_prompts.items())
        raise UsageError(
            f"the two were measured on different prompts ({len(prompts)} and {len(other_prompts)}, "
            f"{common} of them the same)",
            "measure both with the same recipe, --split and --limit",
        )
    differences = new.change_from(old)
    primary = result["primary"] if result["primary"] in differences else "reward"
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "grpo-eval-comparison",
        "before": before,
        "after": after,
        "prompts": len(prompts),
        "settings": {
            name: [value, others[name]] for name, value in settings.items() if value != others[name]
        },
        "unscored": {before: old.unscored(), after: new.unscored()},
        "differences": {name: change.as_json() for name, change in differences.items()},
        "verdict": say_difference(primary, differences[primary], after, before),
    }


def _read_side(side: str) -> tuple[str, Measured, dict[str, Any]]:
    """Return `PATH:NAME`, the model's samples, and the result."""
    path, _, name = (side, "", "") if Path(side).exists() else side.rpartition(":")
    folder, result = read_result(Path(path or side))
    measured = [each for each in result["subjects"] if each != result["baseline"]] or [""]
    if name not in ("", *result["subjects"]) or (not name and len(measured) > 1):
        raise UsageError(
            f"{path} holds {', '.join(result['subjects'])}",
            f"name one of them, as {path}:{measured[0]}",
        )
    recipe = Recipe.model_validate(result["recipe"])
    samples = read_measured(folder, name or measured[0], recipe)
    return side if name else f"{side}:{measured[0]}", samples, result


def _read_settings(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what may explain a difference between two results besides the models."""
    recipe = Recipe.model_validate(result["recipe"])
    return {
        **{
            name: result["settings"][name] for name in ("samples", "temperature", "seed", "backend")
        },
        "data (prompts alike, other columns or rows)": result["data"].get("fingerprint"),
        "max_completion_length": recipe.generation.max_completion_length,
        "rewards": [reward.model_dump(mode="json") for reward in recipe.rewards],
    }


def _prompts(measured: Measured) -> dict[int, str]:
    return {
        group[0].row: json.dumps(group[0].prompt, sort_keys=True, ensure_ascii=False)
        for group in measured.groups
    }


def known_metrics(request: EvalRequest) -> list[str]:
    """Return the metrics that the result may hold."""
    rewards = request.recipe.rewards
    return metric_names(
        name_rewards(rewards),
        right_scores(rewards),
        request.samples,
        episodes=request.recipe.has_episodes,
        sources=request.recipe.dataset.shares,
    )


def check_floors(
    floors: Sequence[str], metrics: Collection[str], *, baseline: bool
) -> list[tuple[str, str, float]]:
    """Return name, metric and least value of floors (`METRIC=VALUE`), before anything is measured.

    A part of a metric's name is enough if it is unambiguous (`accuracy` for `accuracy/math`), and `gain/METRIC`
    is the difference to the baseline.

    Raises `UsageError` if one cannot be read, names no metric, or requires a gain although there is no
    baseline.
    """
    read = []
    for floor in floors:
        name, _, text = floor.partition("=")
        try:
            least = float(text)
        except ValueError:
            least = math.nan
        if not math.isfinite(least):
            raise UsageError(
                f"--fail-under {floor}: cannot be read", "METRIC=VALUE, as accuracy=0.5"
            )
        if name.startswith("gain/") and not baseline:
            raise UsageError("--fail-under gain/… needs a baseline", "--baseline PATH")
        read.append((name, _resolve(name.removeprefix("gain/"), metrics), least))
    return read


def _resolve(name: str, metrics: Collection[str]) -> str:
    if name in metrics:
        return name
    close = [full for full in metrics if full.partition("/")[0] == name]
    if len(close) == 1 or (close and name == "accuracy"):
        # Of several accuracies it is the first reward's, as in verdicts.
        return close[0]
    raise UsageError(
        f"--fail-under: there is no metric `{name}`",
        f"one of {', '.join(metrics)} (a prefix is enough if "
        "unambiguous: accuracy=0.5), or the gain over the baseline (gain/accuracy=0)",
    )


def falls_short(result: Mapping[str, Any], floors: Sequence[str]) -> list[str]:
    """Return which floors (see `check_floors`) the measured subjects do not reach, in words."""
    subjects = result["subjects"]
    # What a run had after its warm-up is there to compare with.
    others = (result["baseline"], WARMUP)
    gains = {name: each for name, each in result["differences"].items() if name != WARMUP}
    measured = {name: each["metrics"] for name, each in subjects.items() if name not in others}
    known = {name: None for each in subjects.values() for name in each["metrics"]}
    short = []
    for name, metric, least in check_floors(floors, known, baseline=bool(gains)):
        for subject, metrics in (gains if name.startswith("gain/") else measured).items():
            value = metrics.get(metric, {}).get("value")
            # A mean of many floats may be below the exact value by rounding.
            if value is None or value < least - _ROUNDING:
                seen = "has no value" if value is None else f"is {value:.3g}"
                short.append(f"{name} of {subject} {seen}, below {least:g}")
    return short
