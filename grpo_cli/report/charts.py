"""The charts of a page as plain numbers, which `assets/charts.js` draws."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from math import isnan
from typing import Any

from grpo_cli.analysis.expectations import bands_of
from grpo_cli.analysis.held_out import SHARES
from grpo_cli.analysis.metrics import Metric
from grpo_cli.report.summary import RunReport
from grpo_cli.report.tables import list_measured, rank_runs
from grpo_cli.runs.metrics import Point, Series

_NOT_SHOWN = frozenset({"epoch", "num_tokens", "dynamic_sampling/prompts_seen"})
_RUNTIME = re.compile(r"eval_[^/]+/runtime")
"""Seconds of held-out sets, which the table of time adds up."""
_OF_SET = re.compile(r"eval_([^/]+)/(.+)")
"""Metrics of the sets of `evaluation.during`, and some of TRL's own evaluation."""
_MOST_POINTS = 10_000
_OPEN = ("Reward", "Evaluation during training", "Signal", "Stability")
"""Headings whose charts are not folded away."""


def read_asset(name: str) -> str:
    """Return a file of `assets/`."""
    return resources.files("grpo_cli.report").joinpath("assets", name).read_text("utf-8")


@cache
def _read_patterns(name: str) -> list[list[str]]:
    """Return the headings with their metrics, or the metrics with their notes; metrics are patterns."""
    return list(json.loads(read_asset("charts.json"))[name])


def build_charts(runs: Sequence[RunReport]) -> dict[str, Any]:
    """Choose and order the charts of one run, or of several over each other.

    Returns:
        `reward`: place of the chart that a page begins with; `held_out`: metric of the one next to it, empty if of
        several, None if nothing was measured; `groups` under their headings; `data` for the script; `marks` and
        `evaluations`: how these were sampled, if there are any; `has_sets`: whether some marks are of sets of
        `evaluation.during`.
    """
    logged = sorted({name for run in runs for name in run.series} - _NOT_SHOWN)
    names = [name for name in logged if any(run.values(name) for run in runs)]
    names = [name for name in names if not _RUNTIME.fullmatch(name)]
    steps: dict[tuple[int, ...], int] = {}
    charts = [_build("reward", runs, steps)] if "reward" in names else []
    groups = []
    for heading, members in _sort_under_headings(names, runs).items():
        still = {name: value for name in members if (value := _constant(name, runs)) is not None}
        drawn = [name for name in members if name not in still]
        group = {
            "heading": heading,
            "is_open": heading in _OPEN,
            "charts": [
                {"place": place, "metric": name, "note": _note(name)}
                for place, name in enumerate(drawn, start=len(charts))
            ],
            "unchanged": [(name, f"{value:.4g}") for name, value in still.items()],
        }
        groups.append(group)
        charts += [_build(name, runs, steps) for name in drawn]
    metric, rows = _held_out_rows(runs)
    held_out = [run.sampling for run in runs]
    in_sets = [each.sampling for run in runs for each in run.held_out_sets.values()]
    evaluated = [f"at temperature {run.recipe.generation.temperature:g}" for run in runs]
    return {
        "reward": 0 if "reward" in names else None,
        "held_out": metric if rows else None,
        "groups": groups,
        "data": {
            "runs": [run.name for run in runs],
            "held_out": held_out,
            "evaluated": evaluated,
            "steps": list(map(list, steps)),
            "charts": charts,
            "held_out_rows": rows,
        },
        "marks": _join([*held_out, *in_sets]) if any(each["marks"] for each in charts) else None,
        "has_sets": bool(in_sets),
        "evaluations": _join(evaluated) if any(each["evaluated"] for each in charts) else None,
    }


def _join(texts: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(filter(None, texts)))


def _sort_under_headings(names: Sequence[str], runs: Sequence[RunReport]) -> dict[str, list[str]]:
    """Return heading → its metrics; without the reward, which stands first, and what only repeats it."""
    rest = [name for name in names if name != "reward"]
    members_of = {}
    for heading, pattern in _read_patterns("headings"):
        members = [name for name in rest if re.fullmatch(pattern, name)]
        rest = [name for name in rest if name not in members]
        shown = [name for name in members if not _repeats_reward(name, runs)]
        if shown:
            members_of[heading] = sorted(
                shown, key=lambda name: (name.startswith("rewards/"), name)
            )
    return members_of


def _repeats_reward(name: str, runs: Sequence[RunReport]) -> bool:
    """Return whether a metric is that of the only reward, of weight 1, so that the total says the same."""
    match = re.fullmatch(r"(?:eval_)?rewards/(.+)/(?:mean|std)", name)
    return match is not None and all(run.weights == {match[1]: 1} for run in runs)


def _constant(name: str, runs: Sequence[RunReport]) -> float | None:
    """Return the value of a metric that has no other, if no band or mark is drawn with it; else None."""
    values = [value for run in runs for value in run.values(name)]
    lone = len(values) < 2 * len(runs)
    values += [mark["value"] for run in runs for mark in _marks(0, run, name)]
    banded = any(list(_bands(run, name)) for run in runs)
    return None if lone or banded or min(values) < max(values) else values[0]


def _note(name: str) -> str:
    logged = name.removeprefix("eval_")
    return next((text for name, text in _read_patterns("notes") if re.fullmatch(name, logged)), "")


def _build(
    name: str, runs: Sequence[RunReport], steps: dict[tuple[int, ...], int]
) -> dict[str, Any]:
    """Return a chart; its lines name their steps by place, since most metrics share them."""

    def lines(metric: str) -> list[dict[str, Any]]:
        return [
            make_line(place, points, steps)
            for place, run in enumerate(runs)
            if (points := _read_points(run, metric))
        ]

    return {
        "metric": name,
        "lines": lines(name),
        # Drawn with the training reward too.
        "evaluated": lines("eval_reward") if name == "reward" else [],
        "bands": list(_bands(runs[0], name)),
        "marks": [mark for place, run in enumerate(runs) for mark in _marks(place, run, name)],
    }


def make_line(
    run: int, points: Sequence[Point], steps: dict[tuple[int, ...], int]
) -> dict[str, Any]:
    """Return a line of a chart, and add its steps to those that lines share."""
    place = steps.setdefault(tuple(step for step, _ in points), len(steps))
    return {"run": run, "steps": place, "values": [_round(value) for _, value in points]}


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _read_points(run: RunReport, name: str) -> Sequence[Point]:
    """Return a metric's records; of a held-out set also those before and after training."""
    if (match := _OF_SET.fullmatch(name)) and (series := run.held_out_sets.get(match[1])):
        return list(series.values(match[2]).items())
    return thin(run.series.get(name, Series()))


def thin(series: Series) -> Sequence[Point]:
    """Return a line's points; of more than can be drawn, the lowest and the highest of equal stretches."""
    if len(series) <= _MOST_POINTS:
        return series
    size = 2 * len(series) // _MOST_POINTS + 1
    thinned: list[Point] = []
    for first in range(0, len(series), size):
        values = series.values[first : first + size].tolist()
        # The sum is NaN if one of them is.
        numbers = [each for each in values if each == each] if isnan(sum(values)) else values
        if numbers:
            places = {values.index(pick(numbers)) for pick in (min, max)}
            thinned += [(series.steps[first + place], values[place]) for place in sorted(places)]
    return thinned


def _bands(run: RunReport, name: str) -> Iterator[dict[str, float]]:
    for band in bands_of(run, name):
        # Wide enough to be seen, if it stands for a single record.
        yield {**band, "from": min(band["from"], band["to"] - 1)}


def _marks(place: int, run: RunReport, name: str) -> Iterator[dict[str, Any]]:
    if (match := _OF_SET.fullmatch(name)) and (series := run.held_out_sets.get(match[1])):
        for step, metrics in series.points.items():
            metric, own = metrics.get(match[2]), {"step": step, "sampled": series.sampling}
            if metric and metric.value is not None:
                yield {"run": place, "when": f"at step {step}", **own, **_ends(metric)}
        return
    measured = re.sub(r"^(rewards/.+)/mean$", r"\1", name)
    measured = {"completions/mean_length": "completion_length"}.get(measured, measured)
    if measured == name != "reward":
        return
    for when, step, metrics in _stages_by_step(run):
        metric = metrics.get(measured)
        if metric and metric.value is not None:
            yield {"run": place, "when": when, "step": step, **_ends(metric)}


def _stages_by_step(run: RunReport) -> Iterator[tuple[str, int, Mapping[str, Metric]]]:
    """Yield the measurements before and after training, and those of the same prompts in between."""
    last = run.final_step
    for when, metrics in _stages(run):
        yield when, last if when == "after" else 0, metrics
    for series in run.held_out_sets.values():
        for step, metrics in series.points.items() if series.repeats else ():
            if step not in (0, last):
                yield f"at step {step}", step, metrics


def _held_out_rows(runs: Sequence[RunReport]) -> tuple[str, list[dict[str, Any]]]:
    """Return all measurements with intervals: one metric of several runs, or all on one scale of one run."""
    metric, ranked = rank_runs(runs)
    places = [(runs[place].name, place, metric) for place in ranked]
    if len(runs) == 1:
        kinds = SHARES if metric.startswith(SHARES) else ("reward",)
        names = [row["name"] for row in list_measured(runs[0]) if row["name"].startswith(kinds)]
        places = [(name, 0, name) for name in names]
        metric = metric if len(names) == 1 else ""
    rows = []
    for label, place, name in places:
        stages = ((when, metrics.get(name)) for when, metrics in _stages(runs[place]))
        ends = {when: _ends(each) for when, each in stages if each and each.value is not None}
        if ends:
            rows.append({"label": label, "run": place, "ends": ends})
    return metric, rows


def _stages(run: RunReport) -> tuple[tuple[str, Mapping[str, Metric]], ...]:
    held_out = run.held_out
    return (
        ("before", held_out.before),
        ("after the warm-up", held_out.warmup),
        ("after", held_out.after),
    )


def _ends(metric: Metric) -> dict[str, float | None]:
    return {name: _round(getattr(metric, name)) for name in ("value", "low", "high")}
