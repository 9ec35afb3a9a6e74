"""From finished runs to the `expect` block of their recipe.

Owns which runs may be put together and which metrics are taken. The bands are `bands.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.analysis.expectations.bands import band_of_held_out, band_of_series
from grpo_cli.analysis.expectations.conditions import describe_conditions
from grpo_cli.analysis.expectations.run_metrics import ACCURACY, GAP, RunMetrics, read_evidence
from grpo_cli.errors import UsageError, nearest
from grpo_cli.recipe.expect import ExpectConfig, ExpectedMetric
from grpo_cli.recipe.fingerprint import list_training_differences
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder

ONE_RUN = (
    "the bands come from one run: they guess at its own noise and leave out what another seed changes. "
    "Train with other seeds (--set seed=1) and give all the runs"
)
"""What is said of a block made from one run."""
_SHARE = 10
"""A tenth of the records is the window, as where a run is summed up."""


@dataclass(frozen=True)
class Written:
    """A block, and what a person should know of it."""

    expect: ExpectConfig
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The block as plain values, for `--json`."""
        return {"expect": self.expect.model_dump(mode="json"), "notes": list(self.notes)}


def expect_from_runs(
    paths: Sequence[Path],
    metrics: Sequence[str] = (),
    step: int | None = None,
    window: int | None = None,
) -> Written:
    """The block that finished runs of one recipe come to.

    Args:
        paths: Run folders, of different seeds.
        metrics: Names; none for `reward` and every held-out accuracy.
        step: The step at which logged metrics are read; None is the last.
        window: Records that a logged metric is the mean of; None is a tenth of them.

    Raises:
        UsageError: The runs do not belong together, one is not finished, or lacks a metric.
    """
    runs = [_read_run(path) for path in paths]
    _check_alike(runs)
    evidence = [each for each, _ in runs]
    last = _last_step(evidence, step)
    wanted = list(dict.fromkeys(metrics)) or _default_metrics(
        evidence, at_end=step in (None, *_ends(evidence))
    )
    found = tuple(_expect_metric(name, evidence, last, window) for name in wanted)
    flat = [each.metric for each in found if each.band[0] == each.band[1]]
    notes = [ONE_RUN] * (len(runs) == 1)
    notes += [
        f"every run gave the same {name}, so its band has no width. Widen it by hand"
        for name in flat
    ]
    return Written(ExpectConfig(metrics=found, measured=describe_conditions(runs)), tuple(notes))


def _read_run(path: Path) -> tuple[RunMetrics, Recipe]:
    run = RunFolder(path.absolute())
    recipe, evidence = run.read_recipe(), read_evidence(run)
    state = evidence.status.state
    if state != "completed":
        how_far = f"{evidence.step} of {evidence.status.total_steps or '?'} steps"
        raise UsageError(
            f"{path} is {state} ({how_far}), and a band needs finished runs. "
            f"Fix: grpo train {run.resolved} --resume-from {run.path}"
        )
    return evidence, recipe


def _check_alike(runs: Sequence[tuple[RunMetrics, Recipe]]) -> None:
    first, recipe = runs[0]
    seeds: dict[int, str] = {}
    for other, its_recipe in runs:
        if changed := list_training_differences(recipe, its_recipe):
            told = "\n".join(f"  {each}" for each in changed)
            raise UsageError(
                f"{first.name} and {other.name} are not the same training:\n{told}\n"
                "Fix: give runs that differ in their seed alone"
            )
        if its_recipe.seed in seeds:
            raise UsageError(
                f"{seeds[its_recipe.seed]} and {other.name} have the same seed {its_recipe.seed}, so they "
                "say nothing about others. Fix: leave one out, or train it with --set seed=…"
            )
        seeds[its_recipe.seed] = other.name


def _ends(runs: Sequence[RunMetrics]) -> set[int]:
    """The last step, where all runs agree on it."""
    ends = {run.step for run in runs}
    return ends if len(ends) == 1 else set()


def _last_step(runs: Sequence[RunMetrics], step: int | None) -> int:
    shortest = min(run.step for run in runs)
    if step is None and not _ends(runs):
        reached = ", ".join(f"{run.name} {run.step}" for run in runs)
        raise UsageError(
            f"the runs ended at different steps ({reached}). Fix: --step {shortest}, or less"
        )
    if step is not None and step > shortest:
        raise UsageError(
            f"--step {step}: a run ended at {shortest}. Fix: --step {shortest}, or less"
        )
    return shortest if step is None else step


def _default_metrics(runs: Sequence[RunMetrics], *, at_end: bool) -> list[str]:
    held_out = runs[0].held_out() if at_end else {}
    if GAP in held_out:
        # The rewards of scored data are those of the data, whatever is learned.
        return [*(name for name in held_out if name.startswith(ACCURACY)), GAP]
    return ["reward", *(name for name in held_out if name.startswith(ACCURACY))]


def _expect_metric(
    metric: str, runs: Sequence[RunMetrics], step: int, window: int | None
) -> ExpectedMetric:
    for run in runs:
        if not run.series(metric) and run.held_out().get(metric) is None:
            raise _unknown(metric, run)
    if not runs[0].series(metric):
        return _expect_held_out(metric, runs, step)
    width = window or _default_window(metric, runs, step)
    windows = []
    for run in runs:
        records = [value for _, value in run.window(metric, step, width)]
        known = [value for value in records if value is not None]
        if not known or len(known) < len(records) or len(records) < width:
            raise UsageError(
                f"{run.name} has {len(known)} numbers of `{metric}` among the {width} records wanted up to "
                f"step {step}. Fix: another --step or --window"
            )
        windows.append(known)
    return ExpectedMetric(
        metric=metric, step=step, band=band_of_series(metric, windows), window=width
    )


def _default_window(metric: str, runs: Sequence[RunMetrics], step: int) -> int:
    counts = [sum(place <= step for place, _ in run.series(metric)) for run in runs]
    return max(min(counts) // _SHARE, 1)


def _expect_held_out(metric: str, runs: Sequence[RunMetrics], step: int) -> ExpectedMetric:
    if _ends(runs) != {step}:
        raise UsageError(
            f"`{metric}` was measured at the end of each run, not at step {step}. "
            "Fix: leave --step out, or the metric"
        )
    # Each is there: `_expect_metric` has looked.
    values = [value for run in runs if (value := run.held_out()[metric]) is not None]
    return ExpectedMetric(metric=metric, step=step, band=band_of_held_out(metric, values, runs))


def _unknown(metric: str, run: RunMetrics) -> UsageError:
    names = run.names()
    close = nearest(metric, names)
    fix = f"--metric {close}" if close else f"one of {', '.join(names) or '(none: no metrics)'}"
    return UsageError(f"{run.name} has no metric `{metric}`. Fix: {fix}")
