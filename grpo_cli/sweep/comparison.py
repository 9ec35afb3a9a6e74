"""The cells of a sweep against the best of them: means over seeds, differences paired by prompt and seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from grpo_cli.analysis.diagnosis.diagnosis import examine
from grpo_cli.analysis.diagnosis.history import metric_bounds, read_history
from grpo_cli.analysis.estimates import (
    ALL_EQUAL,
    FEWEST_CLUSTERS,
    CrossedMean,
    crossed_mean,
    say_too_few,
)
from grpo_cli.analysis.held_out import Measurement, find_primary, read_measurement, scored_alike
from grpo_cli.analysis.metrics import Metric, say_failures
from grpo_cli.runs.metrics import When, count_averaged
from grpo_cli.runs.run import Run
from grpo_cli.units import count_noun, format_value

TRAINING = "reward in training"
"""What is compared if nothing was measured on held-out prompts: the mean of each run's last records."""
_MANY_SEEDS = 10
"""More than anybody trains to tell two settings apart."""
Values = Mapping[str, float]


@dataclass(frozen=True)
class CellResult:
    """What the finished runs of one cell came to."""

    seeds: dict[int, float]
    """Seed → the mean over prompts."""
    mean: Metric
    """Over seeds, with the interval between them."""
    before: float | None = None
    """The mean over seeds before training; None if it was not measured."""
    warmup: float | None = None
    collapsed: int = 0
    """Runs whose answers became the same for all prompts."""
    failures: tuple[str, ...] = ()
    """How many answers timed out or failed in scoring, by run in which any did."""
    difference: Metric | None = None
    """The best cell less this one, paired by prompt and seed; None of the best one, and without a measurement."""
    seeds_needed: int | None = None
    """How many seeds would tell them apart, if they are not; None if seeds alone would not."""
    verdict: str = ""
    """The difference in a sentence, and what is wrong with the cell; empty of a best one that is not worse than it
    began."""

    @property
    def fault(self) -> str:
        """Why the cell is not good, however it compares with others; empty if nothing is wrong."""
        if self.collapsed:
            runs = f"{self.collapsed} of {count_noun(len(self.seeds), 'run')}"
            return f"{runs} ended with one answer to all held-out prompts"
        start, end = self.before if self.warmup is None else self.warmup, self.mean.value
        if start is None or end is None or end >= start:
            return ""
        when = "before training" if self.warmup is None else "after the warm-up"
        return f"{format_value(end)} is lower than {format_value(start)} {when}"


@dataclass(frozen=True)
class CellsComparison:
    """All cells with a finished run."""

    metric: str
    """Empty if no run has a number."""
    best: int | None
    cells: dict[int, CellResult]


def compare_cells(
    cells: Mapping[int, Mapping[int, Run]], labels: Mapping[int, str]
) -> CellsComparison:
    """Compare every cell with the one that has the highest mean; `cells`: cell → seed → its finished run."""
    runs = [run for each in cells.values() for run in each.values()]
    measured = {run: read_measurement(run) for run in runs}
    primary = [
        find_primary(each.values) for each in measured.values() if isinstance(each, Measurement)
    ]
    metric = max(filter(None, primary), key=primary.count, default=TRAINING)
    values = {
        cell: {
            seed: known
            for seed, run in each.items()
            if (known := _read(run, measured[run], metric))
        }
        for cell, each in cells.items()
    }
    values = {cell: each for cell, each in values.items() if each}
    means = {
        cell: _mean_over_seeds(each, metric, [cells[cell][seed] for seed in each])
        for cell, each in values.items()
    }
    if not means:
        return CellsComparison("", None, {})
    best = max(means, key=lambda cell: means[cell].mean.value or 0.0)
    recipes = {cell: next(iter(each.values())).recipe for cell, each in cells.items() if each}
    scored = "reward" if metric == TRAINING else metric
    results = {best: replace(means[best], verdict=_say_fault(labels[best], means[best]))}
    for cell in means.keys() - {best}:
        if scored_alike(scored, recipes[best], recipes[cell]):
            names = labels[best], labels[cell]
            bounds = metric_bounds(metric, recipes[best])
            results[cell] = _compare(values[best], values[cell], means[cell], metric, names, bounds)
            if means[best].fault or means[cell].fault:
                # Seeds do not tell which of two is better if one of them is not good.
                faults = [_say_fault(labels[cell], means[cell]), results[cell].verdict]
                verdict = "; ".join(filter(None, faults))
                results[cell] = replace(results[cell], seeds_needed=None, verdict=verdict)
        else:
            why = f"{labels[cell]}: its rewards are others, so {metric} cannot be compared"
            results[cell] = replace(means[cell], verdict=why)
    return CellsComparison(metric, best, results)


def _read(run: Run, measured: Measurement | str, metric: str) -> Values:
    if metric == TRAINING:
        rewards = run.values("reward")
        # As many of the last records as a summary of the run takes.
        return {"": fmean(rewards[-count_averaged(len(rewards)) :])} if rewards else {}
    if isinstance(measured, str):
        return {}
    return {measured.prompts[row]: value for row, value in measured.values.get(metric, {}).items()}


def _mean_over_seeds(values: Mapping[int, Values], metric: str, runs: Sequence[Run]) -> CellResult:
    seeds = {seed: fmean(each.values()) for seed, each in values.items()}
    crossed = crossed_mean([[value] for value in seeds.values()])
    mean = _as_metric(
        crossed, min(map(len, values.values())), metric_bounds(metric, runs[0].recipe)
    )
    if mean.reason == ALL_EQUAL:
        mean = replace(mean, reason="every seed gives the same value")
    before, warmup = (_mean_at(stage, metric, runs) for stage in ("before", "warmup"))
    collapsed = sum(examine(read_history(run)).collapse is not None for run in runs)
    failures = [
        f"{run.folder.path.name}: {said}" for run in runs if (said := say_failures(run.after))
    ]
    return CellResult(seeds, mean, before, warmup, collapsed, tuple(failures))


def _mean_at(stage: When, metric: str, runs: Sequence[Run]) -> float | None:
    """Return the mean over runs at an earlier stage; None if one of them was not measured there."""
    measured = (_read(run, read_measurement(run, stage), metric) for run in runs)
    means = [fmean(each.values()) for each in measured if each]
    return fmean(means) if metric != TRAINING and len(means) == len(runs) else None


def _say_fault(label: str, result: CellResult) -> str:
    return f"{label}: {result.fault}" if result.fault else ""


def _as_metric(mean: CrossedMean, prompts: int, bounds: tuple[float, float]) -> Metric:
    """Return a mean with its interval, which ends where values do."""
    interval = mean.interval()
    low, high = interval.low, interval.high
    if low is not None and high is not None:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    return Metric(mean.value, low, high, prompts, interval.reason)


def _compare(
    best: Mapping[int, Values],
    other: Mapping[int, Values],
    result: CellResult,
    metric: str,
    labels: tuple[str, str],
    bounds: tuple[float, float],
) -> CellResult:
    seeds = sorted(best.keys() & other.keys())
    common = [best[seed].keys() & other[seed].keys() for seed in seeds]
    prompts = sorted(set.intersection(*map(set, common))) if common else []
    if not prompts:
        why = "no prompt is the same" if seeds else "no seed was finished by both"
        return replace(result, verdict=f"{labels[1]}: not compared with {labels[0]}, since {why}")
    mean = crossed_mean(
        [[best[seed][prompt] - other[seed][prompt] for prompt in prompts] for seed in seeds]
    )
    width = bounds[1] - bounds[0]
    difference = _as_metric(mean, len(prompts), (-width, width))
    if metric != TRAINING and len(prompts) < FEWEST_CLUSTERS:
        few = say_too_few(len(prompts))
        difference = Metric(mean.value, None, None, len(prompts), few)
    needed = None if difference.direction or difference.reason else mean.seeds_needed()
    verdict = _say(difference, needed, mean, metric, labels)
    return replace(result, difference=difference, seeds_needed=needed, verdict=verdict)


def _say(
    difference: Metric, needed: int | None, mean: CrossedMean, metric: str, labels: tuple[str, str]
) -> str:
    best, other = labels
    value = format_value(difference.value or 0.0, "+")
    if difference.reason == ALL_EQUAL and not difference.value:
        return f"{best} and {other} are equal in {metric} for every prompt and seed"
    if difference.reason and not difference.direction:
        more = "; more seeds (--seeds) would tell" if mean.seeds < 2 else ""
        return (
            f"{best} and {other}: {value} in {metric}, no verdict, since {difference.reason}{more}"
        )
    if not (ends := difference.say_interval("+")):
        return f"{best} is better than {other}: {value} in {metric} for every prompt and seed"
    interval = f"95 % interval {ends}"
    if difference.direction > 0:
        return f"{best} is better than {other}: {value} in {metric} ({interval})"
    if difference.direction < 0:
        return f"{other} is better than {best} on the seeds that both finished: {value} in {metric} ({interval})"
    more = "more seeds alone would not tell: more held-out prompts, or there is no difference"
    if needed is not None:
        seeds = count_noun(needed - mean.seeds, "more seed")
        more = f"about {seeds} would tell, if the difference stays as large"
        if needed - mean.seeds > _MANY_SEEDS:
            more = f"take them as equal: it would need about {seeds} to tell"
    return f"{best} and {other}: no clear difference, {value} in {metric} ({interval}); {more}"
