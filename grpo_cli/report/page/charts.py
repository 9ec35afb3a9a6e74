"""The charts of a page as plain numbers: which metrics, under which heading, with which bands and marks.

Owns the choice and the order. Drawing is `assets/charts.js`'.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from grpo_cli.analysis.diagnosis.history import Point
from grpo_cli.analysis.expectations.verdicts import bands_of
from grpo_cli.analysis.metrics import Metric
from grpo_cli.report.page.gain_table import list_measured, rank_runs
from grpo_cli.report.page.held_out import SHARES
from grpo_cli.report.page.run_data import RunData

MOST_POINTS = 20_000
"""Points of all lines of a chart; of longer ones the least and the greatest of each stretch are kept."""
_NOT_SHOWN = frozenset({"epoch", "num_tokens", "dynamic_sampling/prompts_seen"})
_HEADINGS = (
    ("Reward", r"reward|reward_std|rewards/.+/(mean|std)"),
    ("Evaluation meanwhile", r"eval_.*"),
    ("Signal", r"frac_reward_zero_std|entropy|completions/repeated_share|dynamic_sampling/.*"),
    ("Length", r"completions/.*"),
    ("Stability", r"loss|grad_norm|kl|learning_rate|clip_ratio/.*|sampling/.*"),
    ("Speed", r"step_time|tokens_per_s|time/.*|rewards/.+/seconds"),
    ("Everything else", r".*"),
)
_SHARES = re.compile(
    r"(eval_|dynamic_sampling/)?"
    r"(frac_reward_zero_std|completions/(repeated_share|clipped_ratio)|clip_ratio/.+)"
    r"|rewards/.+/error_share"
)
"""Metrics between 0 and 1."""
_SMALL_SHARE = 0.2
"""Shares that are never above it would be a flat line on an axis up to 1."""
_TERMINATED = re.compile(r"(eval_)?completions/(min|max|mean)_terminated_length")
_OPEN = ("Reward", "Signal", "Stability")
"""Headings whose charts are not folded away."""
_NOTES = (
    (r"reward", "mean weighted total of all completions"),
    (r"reward_std", "standard deviation of the total over the batch"),
    (r"rewards/.+/mean", "before its weight"),
    (r"rewards/.+/seconds", "seconds of scoring"),
    (r"rewards/.+/error_share", "share of completions it failed on"),
    (r"frac_reward_zero_std", "share of groups whose totals are all equal"),
    (r"dynamic_sampling/frac_reward_zero_std", "the same after groups were replaced"),
    (r"dynamic_sampling/resampled_groups", "groups sampled to replace others"),
    (r"dynamic_sampling/rounds", "how often groups of a batch were replaced"),
    (r"dynamic_sampling/epochs", "prompts sampled so far, by those there are"),
    (r"completions/mean_terminated_length", "tokens, of completions not cut off"),
    (r"completions/min_terminated_length", "tokens, of the shortest not cut off"),
    (r"completions/max_terminated_length", "tokens, of the longest not cut off"),
    (r"completions/min_length", "tokens, of the shortest completion"),
    (r"completions/max_length", "tokens, of the longest completion"),
    (r"clip_ratio/low_mean", "share of tokens with a ratio below the bound"),
    (r"clip_ratio/low_min", "the same, of the process with the least"),
    (r"clip_ratio/high_mean", "share of tokens with a ratio above the bound"),
    (r"clip_ratio/high_max", "the same, of the process with the most"),
    (r"clip_ratio/region_mean", "share of tokens with a ratio beyond either bound"),
    (r"learning_rate", "as the schedule has it"),
    (r"rewards/.+/std", "standard deviation, before its weight"),
    (r"completions/repeated_share", "share that repeat another of their group"),
    (r"completions/clipped_ratio", "share of completions that were cut off"),
    (r"completions/mean_length", "tokens, of all completions"),
    (r"sampling/sampling_logp_difference/.+", "between vLLM and the trainer"),
    (r"sampling/importance_sampling_ratio/.+", "correction for vLLM"),
    (r"sample/staleness_mean", "weight updates since samples were drawn"),
    (r"ratio", "mean ratio of probabilities"),
    (r"entropy", "of the next token, in nats"),
    (r"kl", "divergence from the reference model"),
    (r"grad_norm", "before it is clipped"),
    (r"loss", "no measure of progress"),
    (r"tokens_per_s", "prompts and completions, all processes"),
    (r"step_time", "seconds"),
    (r"time/.*", "seconds a step"),
)


@dataclass(frozen=True)
class ChartGroup:
    """Charts under one heading."""

    heading: str
    is_open: bool
    charts: tuple[dict[str, Any], ...]
    """Place in `ChartSet.data`, metric, and a few words about it."""
    unchanged: tuple[tuple[str, str], ...]
    """Metrics that never changed, each with its value: nothing to draw."""


@dataclass(frozen=True)
class ChartSet:
    """All charts of a page."""

    reward: int | None
    """Place in the data of the chart that a page begins with; None if no reward was logged."""
    held_out: str | None
    """Metric of the held-out chart beside it: empty if of several, None if nothing was measured."""
    groups: tuple[ChartGroup, ...]
    data: dict[str, Any]
    """Runs, the steps that lines share, the lines, bands and marks of each chart, and the held-out rows."""
    most_points: int | None
    """Points of a line beyond which it was thinned; None where all are kept."""
    marks: str | None
    """How the held-out measurements in the charts came about, in words; None where there are none."""
    evaluations: str | None
    """The same of the evaluations meanwhile that stand beside what was trained on."""


class _Steps:
    """Lists of steps, each kept once: most metrics of a run are logged at the same steps."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []
        self._places: dict[tuple[int, ...], int] = {}

    def place(self, steps: tuple[int, ...]) -> int:
        if steps not in self._places:
            self._places[steps] = len(self.lists)
            self.lists.append(list(steps))
        return self._places[steps]


def build_charts(runs: Sequence[RunData]) -> ChartSet:
    """Chooses and orders the charts of one run, or of several over each other."""
    names = sorted({name for run in runs for name in run.history.series if _is_shown(name, runs)})
    repeated = {name for name in names if _repeats_reward(name, runs)}
    steps, most = _Steps(), MOST_POINTS // len(runs)
    first = [name for name in names if name == "reward"]
    charts = [_build(name, runs, steps, most) for name in first]
    names = [name for name in names if name not in first]
    metric, rows = _held_out_rows(runs)
    groups = []
    for heading, pattern in _HEADINGS:
        members = [name for name in names if re.fullmatch(pattern, name)]
        names = [name for name in names if name not in members]
        members = sorted({*members} - repeated, key=_order)
        still = {name: value for name in members if (value := _constant(name, runs)) is not None}
        members = [name for name in members if name not in still]
        placed = [
            {"place": len(charts) + i, "metric": name, "note": _note(name)}
            for i, name in enumerate(members)
        ]
        charts += [_build(name, runs, steps, most) for name in members]
        unchanged = tuple((name, _say_constant(name, value)) for name, value in still.items())
        if members or unchanged:
            groups.append(ChartGroup(heading, heading in _OPEN, tuple(placed), unchanged))
    data: dict[str, Any] = {
        "runs": [run.name for run in runs],
        "held_out": [run.gain.sampling for run in runs],
        "evaluated": [_evaluation_sampling(run) for run in runs],
        "steps": steps.lists,
        "charts": charts,
        "held_out_rows": rows,
    }
    longest = max((len(each) for run in runs for each in run.history.series.values()), default=0)
    return ChartSet(
        0 if first else None,
        metric if rows else None,
        tuple(groups),
        data,
        most_points=most if longest > most else None,
        marks=_join(data["held_out"]) if any(each["marks"] for each in charts) else None,
        evaluations=(
            _join(data["evaluated"]) if any(each["evaluated"] for each in charts) else None
        ),
    )


def _join(found: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(filter(None, found)))


def _evaluation_sampling(run: RunData) -> str:
    return f"at temperature {run.recipe.generation.temperature:g}"


def _repeats_reward(name: str, runs: Sequence[RunData]) -> bool:
    """Whether a metric is that of the only reward, of weight 1, and the total says the same."""
    found = re.fullmatch(r"(eval_)?rewards/.+/(mean|std)", name)
    if not found:
        return False
    total = (found[1] or "") + {"mean": "reward", "std": "reward_std"}[found[2]]
    return all(
        [each.weight for each in run.recipe.rewards] == [1]
        and _agree(run.values(name), run.values(total))
        for run in runs
    )


def _agree(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(map(_is_close, one, other))


def _is_close(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=1e-5, abs_tol=1e-7)


def _constant(name: str, runs: Sequence[RunData]) -> float | None:
    """The value of a metric that has no other and that nothing stands beside; else None."""
    values = [value for run in runs for value in run.values(name)]
    lone = len(values) < 2 * len(runs)
    values += [mark["value"] for run in runs for mark in _marks(0, run, name)]
    banded = any([*_bands(run, name)] for run in runs)
    return None if lone or banded or min(values) < max(values) else values[0]


def _order(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """By name, `part_2` before `part_10`; single rewards after their sum."""
    parts = re.split(r"(\d+)", name)
    return name.startswith("rewards/"), [
        (int(each), "") if each.isdecimal() else (0, each) for each in parts
    ]


def _is_shown(name: str, runs: Sequence[RunData]) -> bool:
    return name not in _NOT_SHOWN and any(run.values(name) for run in runs)


def _note(name: str) -> str:
    logged = name.removeprefix("eval_")
    return next((note for pattern, note in _NOTES if re.fullmatch(pattern, logged)), "")


def _build(name: str, runs: Sequence[RunData], steps: _Steps, most: int) -> dict[str, Any]:
    lines = [
        _line(index, known, steps, most)
        for index, run in enumerate(runs)
        if (known := _read_points(run, name))
    ]
    # Shown again beside what is trained on, where both are there.
    meanwhile = [
        _line(index, points, steps, most)
        for index, run in enumerate(runs)
        if name == "reward" and (points := run.history.series.get("eval_reward"))
    ]
    return {
        "metric": name,
        "lines": lines,
        "evaluated": meanwhile,
        "bands": list(_bands(runs[0], name)),
        "marks": [mark for index, run in enumerate(runs) for mark in _marks(index, run, name)],
        "range": _range(name, runs),
    }


def _say_constant(name: str, value: float) -> str:
    return "none" if _TERMINATED.fullmatch(name) and not value else f"{value:.4g}"


def _range(name: str, runs: Sequence[RunData]) -> str:
    """What the axis of values holds: all `shares` from 0 to 1, at least `zero`, or what is `free`."""
    if not _SHARES.fullmatch(name):
        return "free"
    return (
        "shares"
        if max(max(run.values(name), default=0.0) for run in runs) > _SMALL_SHARE
        else "zero"
    )


def _read_points(run: RunData, name: str) -> Sequence[Point]:
    """A metric's records, with gaps where a 0 stands for nothing that could be measured."""
    points = run.history.series.get(name, [])
    if not _TERMINATED.fullmatch(name):
        return points
    return [(step, value or None) for step, value in points]


def _line(run: int, points: Sequence[Point], steps: _Steps, most: int) -> dict[str, Any]:
    kept = thin(points, most)
    return {
        "run": run,
        "steps": steps.place(tuple(step for step, _ in kept)),
        "values": [None if value is None else float(f"{value:.6g}") for _, value in kept],
    }


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Few enough points to draw: of each stretch the least and the greatest, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    width = -(-len(points) // (most // 2))
    kept: list[Point] = []
    for start in range(0, len(points), width):
        known = [point for point in points[start : start + width] if point[1] is not None]
        ends = {min(known, key=_value), max(known, key=_value)} if known else {points[start]}
        kept += sorted(ends)
    return kept


def _value(point: Point) -> float:
    return point[1] or 0.0


def _bands(run: RunData, name: str) -> Iterator[dict[str, float]]:
    expect = run.recipe.expect
    if expect and any(each.metric == name for each in expect.metrics):
        for band in bands_of(run.folder, name):
            # As wide as can be seen, where it stands for a single record.
            left = min(band.first_step, band.last_step - 1)
            yield {"from": left, "to": band.last_step, "low": band.low, "high": band.high}


def _marks(index: int, run: RunData, name: str) -> Iterator[dict[str, Any]]:
    """The held-out measurements, where they are of the metric in the chart."""
    measured = "reward" if name == "reward" else _measured_name(name)
    for when, found, step in (("before", run.gain.before, 0), ("after", run.gain.after, run.step)):
        metric = found.get(measured or "")
        if metric and metric.value is not None:
            yield {"run": index, "when": when, "step": step, **_ends(metric)}


def _held_out_rows(runs: Sequence[RunData]) -> tuple[str, list[dict[str, Any]]]:
    """Before and after with their intervals: of several runs one metric, of one run all on the same scale."""
    metric, ranked = rank_runs(runs)
    rows = [(runs[place].name, place, metric) for place in ranked]
    if len(runs) == 1:
        kinds = SHARES if metric.startswith(SHARES) else ("reward",)
        names = [row.name for row in list_measured(runs[0]) if row.name.startswith(kinds)]
        rows = [(name, 0, name) for name in names]
        metric = metric if len(names) == 1 else ""
    found = [
        {
            "label": label,
            "run": place,
            "ends": {
                when: _ends(each)
                for when in ("before", "after")
                if (each := getattr(runs[place].gain, when).get(name)) and each.value is not None
            },
        }
        for label, place, name in rows
    ]
    return metric, [row for row in found if row["ends"]]


def _ends(metric: Metric) -> dict[str, float | None]:
    """A measurement with its 95 % interval."""
    ends = {name: getattr(metric, name) for name in ("value", "low", "high")}
    return {name: None if end is None else float(f"{end:.6g}") for name, end in ends.items()}


def _measured_name(name: str) -> str | None:
    found = re.fullmatch(r"(rewards/.+)/mean", name)
    return found[1] if found else {"completions/mean_length": "completion_length"}.get(name)
