"""Runs side by side: the settings that differ, how each trained, and what each reaches on the same prompts."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from grpo_cli.analysis.held_out import HeldOutDifference, compare_held_out, scored_alike
from grpo_cli.recipe.comparison import flatten
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.report.summary import RunReport, Trend
from grpo_cli.runs.files import SCHEMA_VERSION
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import PHASES, STAGES, Point, count_averaged
from grpo_cli.runs.run import Run

_NO_SETTINGS = {"name", "description", "expect"}
"""Sections that say what a run is called and expected to reach, not what is trained."""
_METRICS = {
    "frac_reward_zero_std": "zero_signal",
    "completions/mean_length": "completion_length",
    "completions/clipped_ratio": "clipped",
    "episode/turns": "turns",
    "tools/call_frequency": "calls",
    "tools/failure_frequency": "failed_calls",
    **{name: name for name in ("entropy", "kl", "grad_norm", "tokens_per_s", "step_time")},
    **{f"time/{phase}": f"time/{phase}" for phase in PHASES},
}
"""TRL's names → those of `--json`."""
_QUICK = ("entropy", "kl", "grad_norm")
"""The first steps may move these so far that a mean hides where they began."""


@dataclass(frozen=True)
class RunsComparison:
    """Several runs side by side; the first is the base of the paired differences."""

    runs: tuple[RunReport, ...]
    settings: dict[str, tuple[Any, ...]]
    """Dotted path of a setting in which the recipes differ → its value in each; None if it is not there."""
    held_out: tuple[HeldOutDifference, ...]
    """Each run but the first against the first."""

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "grpo-runs-comparison",
            "runs": list(map(_run_json, self.runs)),
            "settings": [
                {"path": path, "values": list(values)} for path, values in self.settings.items()
            ],
            "held_out": list(map(asdict, self.held_out)),
        }


def _run_json(run: RunReport) -> dict[str, Any]:
    measured = run.held_out.measurements["after"]
    metrics = {} if isinstance(measured, str) else measured.metrics
    return {
        "name": run.name,
        "run": str(run.folder.path),
        "state": run.status.state,
        "steps": run.status.step,
        "total_steps": run.status.total_steps,
        "seconds": round(run.status.seconds, 1),
        "metrics": {name: each.as_json() for name, each in find_trends(run).items()},
        "held_out": {name: each.as_json() for name, each in metrics.items()},
        "held_out_warmup": {name: each.as_json() for name, each in run.held_out.warmup.items()},
        "held_out_unscored": {
            stage: {key: read.get(key, {}) for key in ("timeouts", "failures")}
            for stage in STAGES
            if (read := run.measured(stage))
        },
        "held_out_reason": measured if isinstance(measured, str) else None,
    }


def read_runs(opened: Sequence[RunReport | RunFolder | Path]) -> list[RunReport]:
    """Open runs that are not open yet; those that would be called alike are called by their paths."""
    runs = [each if isinstance(each, RunReport) else RunReport(each) for each in opened]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder.path)
    return runs


def compare_runs(runs: Sequence[RunReport]) -> RunsComparison:
    """Compare runs with the first of them; the result says what one of them lacks."""
    base, *others = (run.held_out.measurements["after"] for run in runs)
    return RunsComparison(
        tuple(runs),
        _compare_settings(runs),
        tuple(
            compare_held_out(base, other, (runs[0].name, run.name))
            for run, other in zip(runs[1:], others, strict=True)
        ),
    )


def _compare_settings(runs: Sequence[RunReport]) -> dict[str, tuple[Any, ...]]:
    recipes = [run.recipe for run in runs]
    known = [run.known_settings for run in runs if run.known_settings is not None]
    whole, chosen = (
        [
            dict(flatten(each.model_dump(mode="json", exclude=_NO_SETTINGS, exclude_defaults=only)))
            for each in recipes
        ]
        for only in (False, True)
    )
    # Of a section that another recipe does not have, the defaults say nothing.
    shared = set.intersection(*map(set, whole))
    paths = dict.fromkeys(path for each in whole for path in each)
    paths |= dict.fromkeys(path for each in chosen for path in each)
    rows = {
        path: tuple(
            own.get(path, every.get(path) if path in shared else None)
            for own, every in zip(chosen, whole, strict=True)
        )
        for path in paths
    }
    return {
        path: row
        for path, row in rows.items()
        if any(value != row[0] for value in row) and all(path in each for each in known)
    }


def find_trends(run: Run) -> dict[str, Trend]:
    """Return the trend of each main metric that was logged: `reward`, `rewards/NAME`, and `_METRICS`."""
    series = run.series
    points_of: dict[str, Sequence[Point]] = {"reward": series.get("reward", ())}
    points_of |= {
        name.removesuffix("/mean"): points
        for name, points in series.items()
        if name.startswith("rewards/") and name.endswith("/mean")
    }
    points_of |= {name: series[logged] for logged, name in _METRICS.items() if logged in series}
    trends = {name: _find_trend(name, points) for name, points in points_of.items()}
    return {name: trend for name, trend in trends.items() if trend}


def drop_scored_apart(
    runs: Sequence[Run], values: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return each run's values by metric without the metrics that its recipes score differently."""
    recipes: dict[str, list[Recipe]] = defaultdict(list)
    for run, own in zip(runs, values, strict=True):
        for metric in own:
            recipes[metric].append(run.recipe)
    alike = {
        metric
        for metric, (base, *others) in recipes.items()
        if all(scored_alike(metric, base, each) for each in others)
    }
    return [{metric: own[metric] for metric in own if metric in alike} for own in values]


def _find_trend(name: str, points: Sequence[Point]) -> Trend | None:
    known = [(step, value) for step, value in points if value is not None]
    if not known:
        return None
    width = count_averaged(len(known))
    sums = list(accumulate((value for _, value in known), initial=0.0))
    means = [(sums[end] - sums[end - width]) / width for end in range(width, len(sums))]
    if not name.startswith("reward"):
        return Trend(known[0][1] if name in _QUICK else means[0], means[-1], width)
    # The earliest of equally good ones: it needed the fewest steps.
    best = max(range(len(means)), key=means.__getitem__)
    best_step = known[best + width - 1][0]
    return Trend(means[0], means[-1], width, best=means[best], best_step=best_step)


def show_apart(texts: Sequence[str | None], longest: int) -> list[str]:
    """Return texts cut to their last `longest` characters, in which long ones differ; None becomes a dash."""
    shown = ["–" if text is None else text for text in texts]
    return [text if len(text) <= longest else f"…{text[1 - longest :]}" for text in shown]


def tell_settings(settings: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return in words in which settings two measurements differ; of nested values, the parts that differ."""
    differing = []
    for name, pair in settings.items():
        if name == "data":
            differing.append("the data")
            continue
        then, now = (dict(flatten(value, name)) for value in pair)
        paths = [path for path in {**then, **now} if then.get(path) != now.get(path)]
        for path in paths:
            texts = [str(each[path]) if path in each else None for each in (then, now)]
            differing.append(f"{path} ({' and '.join(show_apart(texts, 40))})")
    return differing
