"""Runs compared with the bands of a recipe's `expect` block, metric by metric."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from grpo_cli.analysis.metrics import OF_ALL, flatten_summary
from grpo_cli.recipe.comparison import fingerprint_settings
from grpo_cli.recipe.expect import ExpectConfig, ExpectedMetric, MeasuredConfig
from grpo_cli.runs.metrics import STAGES, When
from grpo_cli.runs.run import Run

Outcome = Literal["inside", "outside", "not reached", "not measured", "not logged"]
ACCURACY = "accuracy/"
"""Prefix of held-out accuracies."""
_MEASURED = (ACCURACY, "rewards/", *OF_ALL)
"""Prefixes of held-out metrics."""
_ROUNDING = 1e-9
_PACKAGES = ("grpo-cli", "trl", "transformers", "torch", "accelerate", "datasets")
_DIGITS = 12
"""Digits of the data's fingerprint that are kept."""
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
    """None if there is none to compare."""
    detail: str = ""
    """More on the outcome, such as `20 of 40`."""

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """A run against an `expect` block."""

    run: str
    """`<name>/<timestamp>`."""
    verdicts: tuple[Verdict, ...]
    differs: Mapping[str, tuple[str, ...]]
    """`hardware`, `versions`, `settings` or `data` → how the run differs from those that were measured."""
    runs: int
    """How many runs the bands come from; 0 if the block does not say."""
    state: str = "completed"
    """How the run ended."""

    @property
    def inside(self) -> bool:
        """Whether the run was completed, and every metric is there and lies in its band."""
        done = self.state == "completed"
        return done and all(verdict.outcome == "inside" for verdict in self.verdicts)

    @property
    def mismatches(self) -> list[str]:
        """What differs from the runs that were measured, a sentence each."""
        return [f"{_MISMATCHES[name]} ({', '.join(how)})" for name, how in self.differs.items()]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {
            "run": self.run,
            "state": self.state,
            "inside": self.inside,
            "metrics": [verdict.as_json() for verdict in self.verdicts],
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
    machine, device = run.manifest.get("hardware") or {}, run.manifest.get("accelerator") or {}
    if not machine.get("cpus"):
        return None
    cores = f"{machine['cpus']} CPU cores ({machine.get('machine', 'unknown')})"
    memory = [f"{machine['memory_gib']:.0f} GiB"] if machine.get("memory_gib") else []
    accelerator = [str(device["device"])] if device.get("device") not in (None, "cpu") else []
    return ", ".join([*accelerator, cores, *memory])


def list_versions(run: Run) -> dict[str, str]:
    """Return the versions of the packages that decide what is trained."""
    lora, vllm = run.recipe.model.lora is not None, run.recipe.generation.backend == "vllm"
    names = [*_PACKAGES, *(["peft"] if lora else []), *(["vllm"] if vllm else [])]
    known = run.manifest.get("versions") or {}
    return {name: str(known[name]) for name in names if known.get(name)}


def data_fingerprint(run: Run) -> str | None:
    """Return the beginning of the data's fingerprint."""
    fingerprint = (run.manifest.get("data") or {}).get("fingerprint")
    return str(fingerprint)[:_DIGITS] if fingerprint else None
