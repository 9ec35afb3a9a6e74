"""The result of an evaluation: metrics with intervals, the gain over the baseline, and a verdict.

Owns the result file (`schema_version`, see `SCHEMA_VERSION`) and what it says in words.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_cli.analysis.metrics import PerPrompt, compare, metric_names, per_prompt, summarize
from grpo_cli.analysis.samples import ScoredCompletion, as_scored, group_by_row
from grpo_cli.analysis.sentences import primary_metric, say_difference
from grpo_cli.errors import RunError, UsageError
from grpo_cli.eval.folder import EvalFolder
from grpo_cli.eval.request import EvalRequest, Subject
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.building import name_rewards, right_scores
from grpo_cli.runs.files import SCHEMA_VERSION, write_json
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.selection import is_run

_HAIR = 1e-9
_KEYS = ("subjects", "differences", "verdicts", "settings", "data", "recipe", "primary", "baseline")


@dataclass(frozen=True)
class Measured:
    """One subject's completions, and what they come to prompt by prompt."""

    groups: list[list[ScoredCompletion]]
    """By row of the data."""
    right: dict[str, float]
    """For each reward that judges answers, the score of a right one."""
    values: dict[str, PerPrompt]
    seconds: float
    """Spent on sampling, by all processes together."""
    tokens_per_s: float | None
    """Of one process; None if no time was measured."""
    warm_up_included: bool
    """Whether `tokens_per_s` counts each process's first batch, because there are no others."""

    @property
    def tokens(self) -> int:
        """Sampled in all."""
        return sum(each.tokens for group in self.groups for each in group)


def read_measured(folder: EvalFolder, subject: str, rewards: Sequence[RewardConfig]) -> Measured:
    """Reads a subject's samples back.

    Args:
        folder: Holds them.
        subject: Its name.
        rewards: The recipe's.

    Raises:
        UsageError: There are none.
    """
    chunks = folder.samples.read(subject)
    groups = group_by_row([as_scored(each) for records in chunks.values() for each in records])
    if not groups:
        raise UsageError(f"{folder.path} holds no samples of `{subject}`. Fix: measure it anew")
    right = right_scores(rewards, (each.rewards for group in groups for each in group))
    seconds = sum(records[0]["chunk_s"] for records in chunks.values())
    warm = [records for records in chunks.values() if not records[0].get("chunk_warms_up", True)]
    pace = _tokens_per_s(warm or list(chunks.values()))
    return Measured(groups, right, per_prompt(groups, right), seconds, pace, not warm)


def _tokens_per_s(chunks: Sequence[Sequence[Mapping[str, Any]]]) -> float | None:
    seconds: float = sum(records[0]["chunk_s"] for records in chunks)
    tokens: int = sum(each["tokens"] for records in chunks for each in records)
    return tokens / seconds if seconds else None


def build_result(
    request: EvalRequest, folder: EvalFolder, about: Mapping[str, Any], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """The result of a finished evaluation, as it is written to `result.json`.

    Args:
        request: What was asked for.
        folder: Holds every sample.
        about: What the data is.
        origin: Command, versions, git, machine.
    """
    measured = {
        subject.name: read_measured(folder, subject.name, request.recipe.rewards)
        for subject in request.subjects
    }
    for name, found in measured.items():
        _check_whole(name, found, request.samples, about["rows"])
    differences = {
        name: compare(measured[request.baseline].values, found.values, request.seed)
        for name, found in measured.items()
        if request.baseline is not None and name != request.baseline
    }
    first, *others = [found.right for found in measured.values()]
    primary = primary_metric([name for name in first if all(name in each for each in others)])
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "grpo-eval",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "source": request.source,
        "origin": dict(origin),
        "settings": request.model_dump(
            mode="json",
            include={"split", "limit", "samples", "temperature", "seed", "backend", "batch_size"},
        ),
        "data": dict(about),
        "primary": primary,
        "baseline": request.baseline,
        "subjects": {
            subject.name: _describe(request, subject, measured[subject.name])
            for subject in request.subjects
        },
        "differences": {
            name: {metric: found.as_json() for metric, found in each.items()}
            for name, each in differences.items()
        },
        "verdicts": {
            name: say_difference(primary, each[primary], name, request.baseline or "")
            for name, each in differences.items()
        },
        "recipe": request.recipe.model_dump(mode="json"),
    }


def _check_whole(name: str, found: Measured, samples: int, rows: int) -> None:
    """Refuses to sum up what is not there: some prompts, or some of their completions.

    Raises:
        RunError: The samples do not hold every prompt once.
    """
    torn = sum(len(group) != samples for group in found.groups)
    if len(found.groups) != rows or torn:
        raise RunError(
            f"the samples of `{name}` hold {len(found.groups)} of {rows} prompts, {torn} of them not "
            f"with {samples} completions. Fix: measure anew with another --out"
        )


def _describe(request: EvalRequest, subject: Subject, found: Measured) -> dict[str, Any]:
    metrics = summarize(found.values, request.samples, request.seed)
    return {
        "model": subject.model.path,
        "adapter": subject.adapter,
        "prompts": len(found.groups),
        "completions": sum(map(len, found.groups)),
        "tokens": found.tokens,
        "sampling_s": round(found.seconds, 2),
        "tokens_per_s": None if found.tokens_per_s is None else round(found.tokens_per_s, 1),
        "warm_up_included": found.warm_up_included,
        "failures": _count_failures(found.groups),
        "metrics": {name: metric.as_json() for name, metric in metrics.items()},
    }


def _count_failures(groups: Sequence[Sequence[ScoredCompletion]]) -> dict[str, int]:
    """Completions whose scoring failed, by reward; rewards without failures are left out."""
    return dict(Counter(name for group in groups for each in group for name in each.failed))


def write_result(folder: EvalFolder, result: Mapping[str, Any]) -> None:
    """Writes the result, whole or not at all."""
    write_json(folder.result, result)


def read_result(path: Path) -> tuple[EvalFolder, dict[str, Any]]:
    """Read a result and the folder it lies in; `path` is either, or a run, whose newest result it then is.

    Raises:
        UsageError: There is no result, or it is of another version.
    """
    if is_run(path):
        path = _newest_result(RunFolder(path))
    folder = EvalFolder(path if path.is_dir() else path.parent)
    file = folder.result if path.is_dir() else path
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        begun = folder.request.is_file()
        hint = (
            "grpo eval … --resume finishes it" if begun else "name a folder that `grpo eval` made"
        )
        raise UsageError(f"{path} holds no result.json. Fix: {hint}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{file} is no JSON. Fix: name the result.json of an evaluation") from None
    if not isinstance(result, dict) or result.get("kind") != "grpo-eval":
        raise UsageError(
            f"{file} is not a result of `grpo eval`. Fix: name its result.json; a run's own measurements "
            "are compared by `grpo eval RUN`"
        )
    if result.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"{file} is of version {result.get('schema_version')}, this grpo reads {SCHEMA_VERSION}. "
            "Fix: measure anew, or use the grpo that wrote it"
        )
    if not all(key in result for key in _KEYS) or not result["subjects"]:
        raise UsageError(f"{file} is damaged: a part of it is missing. Fix: measure anew")
    return folder, result


def _newest_result(run: RunFolder) -> Path:
    finished = [path.parent for path in run.evaluations.glob("*/result.json")]
    if not finished:
        raise UsageError(
            f"{run.path} has no finished evaluation. Fix: grpo eval {run.path}, with --resume for one that "
            "was interrupted"
        )
    return max(finished)


def compare_results(first: str, second: str, seed: int = 0) -> dict[str, Any]:
    """The paired difference between the models of two results.

    Args:
        first: A result or its folder; with `:NAME` behind it where it holds several models.
        second: Another.
        seed: Of the bootstrap.

    Raises:
        UsageError: They were not measured on the same prompts, or hold several models and none is named.
    """
    sides = [_read_side(given) for given in (first, second)]
    settings = [_tell_settings(result) for _, _, result in sides]
    prompts = [_prompts(found.groups) for _, found, _ in sides]
    if prompts[0] != prompts[1]:
        common = len(prompts[0].items() & prompts[1].items())
        raise UsageError(
            f"the two were measured on different prompts ({len(prompts[0])} and {len(prompts[1])}, "
            f"{common} of them the same). Fix: measure both with the same recipe, --split and --limit"
        )
    (before, old, result), (after, new, _) = sides
    differences = compare(old.values, new.values, seed)
    names = tuple(
        given if given.endswith(f":{name}") else f"{given}:{name}"
        for given, name in ((first, before), (second, after))
    )
    primary = result["primary"] if result["primary"] in differences else "reward"
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "grpo-eval-comparison",
        "before": names[0],
        "after": names[1],
        "prompts": len(prompts[0]),
        "settings": {
            name: [settings[0][name], settings[1][name]]
            for name in settings[0]
            if settings[0][name] != settings[1][name]
        },
        "differences": {name: found.as_json() for name, found in differences.items()},
        "verdict": say_difference(primary, differences[primary], names[1], names[0]),
    }


def _read_side(given: str) -> tuple[str, Measured, dict[str, Any]]:
    path, _, wanted = (given, "", "") if Path(given).exists() else given.rpartition(":")
    folder, result = read_result(Path(path or given))
    measured = [name for name in result["subjects"] if name != result["baseline"]]
    if wanted not in ("", *result["subjects"]) or (not wanted and len(measured) > 1):
        raise UsageError(
            f"{path} holds {', '.join(result['subjects'])}. Fix: name one of them, as {path}:{measured[0]}"
        )
    name = wanted or measured[0]
    recipe = Recipe.model_validate(result["recipe"])
    return name, read_measured(folder, name, recipe.rewards), result


def _tell_settings(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a difference between two results may come from, beside the models."""
    recipe = Recipe.model_validate(result["recipe"])
    names = ("samples", "temperature", "seed", "backend")
    return {
        **{name: result["settings"][name] for name in names},
        "data (prompts alike, other columns or rows)": result["data"]["fingerprint"],
        "max_completion_length": recipe.generation.max_completion_length,
        "rewards": [reward.model_dump(mode="json") for reward in recipe.rewards],
    }


def _prompts(groups: Sequence[Sequence[ScoredCompletion]]) -> dict[int, str]:
    return {
        group[0].row: json.dumps(group[0].prompt, sort_keys=True, ensure_ascii=False)
        for group in groups
    }


def known_metrics(request: EvalRequest) -> list[str]:
    """The metrics that the result may hold."""
    rewards = request.recipe.rewards
    return metric_names(name_rewards(rewards), right_scores(rewards), request.samples)


def check_floors(
    floors: Sequence[str], metrics: Collection[str], *, baseline: bool
) -> list[tuple[str, str, float]]:
    """Reads floors (`METRIC=VALUE`), before anything is measured.

    Args:
        floors: As the command line gives them.
        metrics: Names of the metrics there are.
        baseline: Whether there is a difference to a baseline.

    Returns:
        For each the name as given, the metric's full name, and the least value.

    Raises:
        UsageError: One cannot be read, names no metric, or wants a gain where nothing is compared.
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
                f"--fail-under {floor}: cannot be read. Fix: METRIC=VALUE, as accuracy=0.5"
            )
        if name.startswith("gain/") and not baseline:
            raise UsageError("--fail-under gain/… needs a baseline. Fix: --baseline PATH")
        read.append((name, _resolve(name.removeprefix("gain/"), metrics), least))
    return read


def falls_short(result: Mapping[str, Any], floors: Sequence[str]) -> list[str]:
    """Which of the wanted floors (`METRIC=VALUE`) the measured subjects do not reach, in words.

    The metric may be named in short where that is unambiguous (`accuracy` for `accuracy/math`), and
    `gain/METRIC` is the difference to the baseline.

    Raises:
        UsageError: A floor cannot be read, or names no metric.
    """
    short = []
    known = {name: None for each in result["subjects"].values() for name in each["metrics"]}
    for name, full, least in check_floors(floors, known, baseline=bool(result["differences"])):
        for subject, metrics in _tables(result, gain=name.startswith("gain/")).items():
            value = metrics[full]["value"] if full in metrics else None
            # A mean of many floats may lie a hair below what it stands for.
            if value is None or value < least - _HAIR:
                seen = "has no value" if value is None else f"is {value:.3g}"
                short.append(f"{name} of {subject} {seen}, below {least:g}")
    return short


def _tables(result: Mapping[str, Any], *, gain: bool) -> dict[str, dict[str, Any]]:
    if gain:
        return dict(result["differences"])
    return {
        name: subject["metrics"]
        for name, subject in result["subjects"].items()
        if name != result["baseline"]
    }


def _resolve(name: str, metrics: Collection[str]) -> str:
    if name in metrics:
        return name
    close = [full for full in metrics if full.partition("/")[0] == name]
    if len(close) == 1 or (close and name == "accuracy"):
        # Of several accuracies it is the first reward's, as in verdicts.
        return close[0]
    raise UsageError(
        f"--fail-under: there is no metric `{name}`. Fix: one of {', '.join(metrics)}, in short where only "
        "one begins so (accuracy=0.5), or the gain over the baseline (gain/accuracy=0)"
    )
