"""A recipe's `expect` block: the bands that one more normal run lies in, written from runs and compared with them.

Bands of several runs are the 95 % prediction interval of one more run, from the spread between their values. Those
of one run are only a guess from its own noise, since other seeds differ more: the spread of logged records within
the window, and the number of prompts of a held-out accuracy.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from grpo_cli.analysis.estimates import predict_mean, predict_share
from grpo_cli.analysis.metrics import GAP, OF_ALL, flatten_summary
from grpo_cli.errors import UsageError, nearest
from grpo_cli.recipe.comparison import fingerprint_settings, list_training_differences
from grpo_cli.recipe.expect import ExpectConfig, ExpectedMetric, MeasuredConfig
from grpo_cli.runs.metrics import STAGES, When
from grpo_cli.runs.run import Run

Outcome = Literal["inside", "outside", "not reached", "not measured", "not logged"]
ACCURACY = "accuracy/"
_MEASURED = (ACCURACY, "rewards/", *OF_ALL)
_ROUNDING = 1e-9
_PACKAGES = ("grpo-cli", "trl", "transformers", "torch", "accelerate", "datasets")
_FINGERPRINT_DIGITS = 12
_MISMATCHES = {
    "hardware": "measured on other hardware",
    "versions": "measured with other versions",
    "settings": "measured with other settings",
    "data": "measured on other data",
}


@dataclass(frozen=True)
class Verdict:
    """One metric of a run against its band."""

    metric: str
    step: int
    low: float
    high: float
    outcome: Outcome
    value: float | None = None
    detail: str = ""
    """More on the outcome, such as `20 of 40`."""


@dataclass(frozen=True)
class Comparison:
    """A run against an `expect` block."""

    run: str
    verdicts: tuple[Verdict, ...]
    differs: Mapping[str, tuple[str, ...]]
    """`hardware`, `versions`, `settings` or `data` → how the run differs from those that were measured."""
    runs: int
    """How many runs the bands come from; 0 if the block does not say."""
    state: str = "completed"

    @property
    def inside(self) -> bool:
        """True if the run was completed, and every metric is there and lies in its band."""
        done = self.state == "completed"
        return done and all(verdict.outcome == "inside" for verdict in self.verdicts)

    @property
    def mismatches(self) -> list[str]:
        """The differences from the measured runs, in sentences; versions only if a metric is outside its band."""
        outside = any(verdict.outcome == "outside" for verdict in self.verdicts)
        return [
            f"{_MISMATCHES[name]} ({', '.join(how)})"
            for name, how in self.differs.items()
            if name != "versions" or outside
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {
            "run": self.run,
            "state": self.state,
            "inside": self.inside,
            "metrics": [asdict(verdict) for verdict in self.verdicts],
            "differs": {name: list(how) for name, how in self.differs.items()},
            "measured_runs": self.runs,
        }


def compare_run(run: Run, expect: ExpectConfig) -> Comparison:
    """Compare a run with a block; raises `UsageError` if its status or recipe cannot be read."""
    measured = expect.measured
    return Comparison(
        run.name,
        tuple(_judge(each, run) for each in expect.metrics),
        find_differences(measured, run) if measured else {},
        len(measured.runs) if measured else 0,
        run.status.state,
    )


def compare_with_own(run: Run) -> Comparison | None:
    """Compare a run with its own recipe's block; None if it has none, or this is another machine's part."""
    if run.folder.shares_checkpoints or not run.folder.resolved.is_file() or not run.recipe.expect:
        return None
    return compare_run(run, run.recipe.expect)


def bands_of(run: Run, metric: str) -> list[dict[str, float]]:
    """Return the bands that a run's own recipe expects of a logged metric, each from and to a step."""
    expect = run.recipe.expect
    bands: list[dict[str, float]] = []
    for each in expect.metrics if expect else ():
        if each.metric == metric:
            records = run.metrics.window(metric, each.step, each.window)
            # A run that did not get there has its last records elsewhere.
            first = records[0][0] if records and run.step >= each.step else each.step
            low, high = each.band
            bands.append({"from": first, "to": each.step, "low": low, "high": high})
    return bands


def stage_at(run: Run, step: int) -> When:
    """Return which held-out measurement belongs to a step: GRPO begins with step 0."""
    start: When = "warmup" if run.recipe.warmup else "before"
    return "after" if step else start


def held_out(run: Run, when: When = "after") -> dict[str, float | None]:
    """Return every metric of a held-out measurement."""
    values = flatten_summary(run.measured(when))
    # The name is that of the logged reward.
    values.pop("reward", None)
    return values


def _judge(expected: ExpectedMetric, run: Run) -> Verdict:
    metric, step, (low, high) = expected.metric, expected.step, expected.band

    def verdict(outcome: Outcome, value: float | None = None, detail: str = "") -> Verdict:
        return Verdict(metric, step, low, high, outcome, value, detail)

    if metric == "reward" and not run.recipe.learns_from_rewards:
        return verdict("not measured", detail="no reward has a weight")
    if run.step < step:
        return verdict("not reached", detail=f"{run.step} of {step}")
    when = stage_at(run, step)
    measured, detail = held_out(run, when), "" if step else STAGES[when]
    value = measured.get(metric)
    if metric in run.series:
        records = [value for _, value in run.metrics.window(metric, step, expected.window)]
        known = [value for value in records if value is not None]
        if not records:
            return verdict("not logged", detail=f"no record up to step {step}")
        if len(known) < len(records):
            return verdict("not logged", detail="it was NaN or infinite")
        if len(records) < expected.window:
            detail = f"{len(records)} of {expected.window} records"
        value = fmean(known)
    elif metric not in measured:
        unmeasured = metric.startswith(_MEASURED) and not measured
        return verdict("not measured" if unmeasured else "not logged")
    elif value is None:
        return verdict("not measured", detail="it applied to no prompt")
    elif run.step > step > 0:
        return verdict("not measured", detail=f"the run went on to step {run.step}")
    inside = low - _ROUNDING <= value <= high + _ROUNDING
    return verdict("inside" if inside else "outside", value, detail)


def find_differences(measured: MeasuredConfig, run: Run) -> dict[str, tuple[str, ...]]:
    """Return how a run's conditions differ from those measured; what either does not say is left out."""
    here, data = describe_hardware(run), data_fingerprint(run)
    versions, settings = list_versions(run), fingerprint_settings(run.recipe)
    differs = {
        "versions": tuple(
            f"{name} {' or '.join(then)}, here {versions[name]}"
            for name, then in measured.versions.items()
            if name in versions and versions[name] not in then
        )
    }
    if measured.hardware and here and here not in measured.hardware:
        differs["hardware"] = (f"{' or '.join(measured.hardware)}; here {here}",)
    if measured.settings:
        names = dict.fromkeys([*measured.settings, *settings])
        differs["settings"] = tuple(
            name for name in names if measured.settings.get(name) != settings.get(name)
        )
    if measured.data and data and measured.data != data:
        differs["data"] = (f"fingerprint {measured.data}, here {data}",)
    return {name: differs[name] for name in _MISMATCHES if differs.get(name)}


def describe_hardware(run: Run) -> str | None:
    """Return such as `2 CPU cores (x86_64), 24 GiB`, after the accelerator if there is one."""
    machine, device = run.manifest["hardware"], run.manifest["accelerator"]
    if not machine.get("cpus"):
        return None
    cores = f"{machine['cpus']} CPU cores ({machine.get('machine', 'unknown')})"
    memory = [f"{machine['memory_gib']:.0f} GiB"] if machine.get("memory_gib") else []
    accelerator = [device["device"]] if device.get("device") not in (None, "cpu") else []
    return ", ".join([*accelerator, cores, *memory])


def list_versions(run: Run) -> dict[str, str]:
    """Return the versions of the packages that decide what is trained."""
    lora, vllm = run.recipe.model.lora is not None, run.recipe.generation.backend == "vllm"
    names = [*_PACKAGES, *(["peft"] if lora else []), *(["vllm"] if vllm else [])]
    known = run.manifest["versions"]
    return {name: known[name] for name in names if known.get(name)}


def data_fingerprint(run: Run) -> str | None:
    """Return the beginning of the data's fingerprint."""
    fingerprint = run.manifest["data"].get("fingerprint")
    return fingerprint[:_FINGERPRINT_DIGITS] if fingerprint else None


Band = tuple[float, float]
ONE_RUN = (
    "the bands come from one run: they guess at its own noise and leave out what another seed changes. "
    "Train with other seeds (--set seed=1) and give all the runs"
)
_SHARE = 10
"""A tenth of the records is the window, as in summaries of a run."""
_DIGITS = 2
"""Digits of a band's width that are kept, beside the first."""


@dataclass(frozen=True)
class Written:
    """A block, and what a person should know of it."""

    expect: ExpectConfig
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the block as plain values, for `--json`."""
        return {"expect": self.expect.model_dump(mode="json"), "notes": list(self.notes)}


def expect_from_runs(
    paths: Sequence[Path],
    metrics: Sequence[str] = (),
    step: int | None = None,
    window: int | None = None,
) -> Written:
    """Return the block that finished runs of one recipe, of different seeds, come to.

    Args:
        paths: Run folders.
        metrics: None for `reward` (`kl` if only a teacher is learned from) and every held-out accuracy.
        step: The step at which logged metrics are read; None is the last.
        window: Records that a logged metric is the mean of; None is a tenth of them.
    """
    runs = [Run(path) for path in paths]
    for run in runs:
        if run.recipe and run.status.state != "completed":
            done = f"{run.step} of {run.status.total_steps or '?'} steps"
            raise UsageError(
                f"{run.folder.path} is {run.status.state} ({done}), and a band needs finished runs",
                run.resume_command(),
            )
    _check_alike(runs)
    last = _last_step(runs, step)
    names = list(dict.fromkeys(metrics)) or _default_metrics(runs[0], at_end={last} == _ends(runs))
    notes, expected = [ONE_RUN] * (len(runs) == 1), []
    warmed = [held_out(run, "warmup") for run in runs]
    for name, at in [(name, at) for name in names for at in (0, last)]:
        if at == 0 and any(values.get(name) is None for values in warmed):
            continue
        called = name if at else f"{name} {STAGES['warmup']}"
        band, width = _find_band(name, runs, at, window)
        if name.startswith(ACCURACY):
            band = max(band[0], 0.0), min(band[1], 1.0)
        if band[0] == band[1]:
            notes.append(
                f"every run gave the same {called}, so its band has no width. Widen it by hand"
            )
        expected.append(ExpectedMetric(metric=name, step=at, band=widen(band), window=width))
    return Written(
        ExpectConfig(metrics=tuple(expected), measured=_describe_conditions(runs)), tuple(notes)
    )


def _check_alike(runs: Sequence[Run]) -> None:
    seeds: dict[int, str] = {}
    for run in runs:
        if changed := list_training_differences(runs[0].recipe, run.recipe):
            raise UsageError(
                f"{runs[0].name} and {run.name} are not the same training",
                "give runs that differ in their seed alone",
                details=[f"  {each}" for each in changed],
            )
        seed = run.recipe.seed
        if seed in seeds:
            raise UsageError(
                f"{seeds[seed]} and {run.name} have the same seed {seed}, so they do not show how much "
                "seeds differ",
                "leave one out, or train it with --set seed=…",
            )
        seeds[seed] = run.name


def _ends(runs: Sequence[Run]) -> set[int]:
    return {run.step for run in runs}


def _last_step(runs: Sequence[Run], step: int | None) -> int:
    shortest = min(_ends(runs))
    if step is None and len(_ends(runs)) > 1:
        reached = ", ".join(f"{run.name} {run.step}" for run in runs)
        raise UsageError(
            f"the runs ended at different steps ({reached})", f"--step {shortest}, or less"
        )
    if step is not None and step > shortest:
        raise UsageError(f"--step {step}: a run ended at {shortest}", f"--step {shortest}, or less")
    return shortest if step is None else step


def _default_metrics(run: Run, *, at_end: bool) -> list[str]:
    measured = held_out(run) if at_end else {}
    accuracies = [name for name in measured if name.startswith(ACCURACY)]
    # The rewards of scored data are those of the data, whatever is learned.
    if GAP in measured:
        return [*accuracies, GAP]
    return ["reward" if run.recipe.learns_from_rewards else "kl", *accuracies]


def _find_band(metric: str, runs: Sequence[Run], step: int, window: int | None) -> tuple[Band, int]:
    for run in runs:
        if metric not in run.series and held_out(run).get(metric) is None:
            raise _unknown(metric, run)
    if metric in runs[0].series:
        return _band_of_series(metric, runs, step, window)
    if step and _ends(runs) != {step}:
        raise UsageError(
            f"`{metric}` was measured at the end of each run, not at step {step}",
            "leave --step out, or the metric",
        )
    return _band_of_held_out(metric, runs, stage_at(runs[0], step)), 1


def _band_of_series(
    metric: str, runs: Sequence[Run], step: int, width: int | None
) -> tuple[Band, int]:
    if width is None:
        counts = [sum(place <= step for place, _ in run.series.get(metric, ())) for run in runs]
        width = max(min(counts) // _SHARE, 1)
    windows = []
    for run in runs:
        records = run.metrics.window(metric, step, width)
        known = [value for _, value in records if value is not None]
        if len(known) < width:
            raise UsageError(
                f"{run.name} has {len(known)} numbers of `{metric}` among the {width} records wanted up to "
                f"step {step}",
                "another --step or --window",
            )
        windows.append(known)
    if len(windows) > 1:
        return predict_mean([fmean(records) for records in windows]), width
    if width < 2:
        raise UsageError(
            f"one record of `{metric}` in one run says nothing about its noise",
            "a window of several records (--window 4), or give runs of other seeds too",
        )
    return predict_mean(windows[0], future=width), width


def _band_of_held_out(metric: str, runs: Sequence[Run], when: When) -> Band:
    means = [value for run in runs if (value := held_out(run, when)[metric]) is not None]
    if metric.startswith(ACCURACY):
        prompts = min(_count_prompts(run.measured(when), metric) for run in runs)
        low, high = predict_share(fmean(means), prompts)
        if len(means) == 1:
            return low, high
        # Never narrower than the number of prompts allows.
        least, most = predict_mean(means)
        return min(low, least), max(high, most)
    if len(means) > 1:
        return predict_mean(means)
    raise UsageError(
        f"one run alone does not say how `{metric}` varies",
        "give runs of other seeds too, or leave it out with --metric",
    )


def _count_prompts(measured: Mapping[str, Any], metric: str) -> int:
    """Return of how many prompts a metric is the mean: a reward may apply to some of them alone."""
    own = measured.get("metrics", {}).get(metric, measured)
    return int(own.get("prompts") or 1)


def widen(band: Band) -> Band:
    """Return a band with few digits, rounded outwards; one without width as it is."""
    low, high = band
    if high <= low:
        return low, high
    digits = max(_DIGITS - math.floor(math.log10(high - low)), 0)
    scale = 10**digits
    return math.floor(low * scale) / scale, math.ceil(high * scale) / scale


def _unknown(metric: str, run: Run) -> UsageError:
    names = [*dict.fromkeys([*run.series, *held_out(run)])]
    close = nearest(metric, names)
    fix = f"--metric {close}" if close else f"one of {', '.join(names) or '(none: no metrics)'}"
    return UsageError(f"{run.name} has no metric `{metric}`", fix)


def _describe_conditions(runs: Sequence[Run]) -> MeasuredConfig:
    versions: dict[str, dict[str, None]] = defaultdict(dict)
    for run in runs:
        for name, version in list_versions(run).items():
            versions[name][version] = None
    data = {data_fingerprint(run) for run in runs}
    began = max(run.status.started_at for run in runs)
    return MeasuredConfig(
        runs=tuple(run.name for run in runs),
        seeds=tuple(run.recipe.seed for run in runs),
        hardware=tuple(dict.fromkeys(filter(None, map(describe_hardware, runs)))),
        versions={name: tuple(each) for name, each in versions.items()},
        date=date.isoformat(datetime.fromtimestamp(began)),
        settings=fingerprint_settings(runs[0].recipe),
        data=data.pop() if len(data) == 1 else None,
    )
