"""The tables of a page as plain values: rewards, time by phase, chosen settings, the batch, the manifest.

Owns what stands in them; `assets/page.html.jinja` sets them. Values are for people: texts, not numbers.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo_cli.batch import BatchPlan, plan_batch
from grpo_cli.errors import GrpoError
from grpo_cli.measure.metrics import Metric
from grpo_cli.preflight.arithmetic import batch_inputs
from grpo_cli.recipe.choices import list_choices
from grpo_cli.recipe.comparison import flatten
from grpo_cli.report.material import Material
from grpo_cli.rewards.building import name_rewards
from grpo_cli.runs.series import PHASES
from grpo_cli.units import format_duration

_LONGEST = 400
_TOLD_ELSEWHERE = ("expect", "name", "description")
_SECRET = frozenset({"environment", "env"})
"""Parts of a manifest that are never shown."""


@dataclass(frozen=True)
class RewardRow:
    """One reward function."""

    name: str
    kind: str
    weight: float
    first: float | None
    """Mean over the first tenth of the records."""
    last: float | None
    spread: float | None
    """Mean standard deviation over the last tenth."""
    error_share: float | None
    seconds: float | None
    """Mean time of scoring."""


@dataclass(frozen=True)
class PhaseRow:
    """What one phase took."""

    name: str
    seconds: float
    share: float
    """Of all phases."""
    time: str


@dataclass(frozen=True)
class SettingRow:
    """One setting."""

    path: str
    value: str
    default: str
    """In words, where there is none."""


@dataclass(frozen=True)
class MeasuredRow:
    """One held-out metric."""

    name: str
    before: str
    after: str
    change: str
    tone: str
    """`good` or `bad` where the change is beyond doubt and it is known which way is better."""
    prompts: int
    note: str


def list_facts(run: Material) -> list[tuple[str, str]]:
    """What one wants to know first, beside the verdict."""
    manifest, change = run.manifest, run.reward_change()
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    found = {"steps": f"{run.step:,}{total}", "time": format_duration(run.seconds)}
    if change and run.recipe.is_sampled:
        found["training reward"] = f"{change[0]:.3f} → {change[1]:.3f}"
    name = run.gain.primary or ""
    measured = [each.get(name) for each in (run.gain.before, run.gain.after)]
    if any(measured):
        values = (
            "–" if each is None or each.value is None else f"{each.value:.3f}" for each in measured
        )
        found[f"held-out {name}"] = " → ".join(values)
    found["model"] = run.recipe.model.path
    found["device"] = _device(manifest)
    found["seed"] = str(run.recipe.seed)
    found["started"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.status.started_at))
    return [(name, value) for name, value in found.items() if value]


def _device(manifest: Mapping[str, Any]) -> str:
    seen, machine = manifest.get("accelerator"), manifest.get("hardware")
    if not isinstance(seen, dict) or not isinstance(machine, dict):
        return ""
    cores = f"{machine.get('cpus')} CPU cores"
    return cores if seen.get("device") == "cpu" else f"{seen.get('device')}, {cores}"


def list_rewards(run: Material) -> list[RewardRow]:
    """The recipe's rewards with what became of them."""
    try:
        names = name_rewards(run.recipe.rewards)
    except GrpoError:
        return []
    return [
        _reward_row(run, name, config.kind, config.weight)
        for name, config in zip(names, run.recipe.rewards, strict=True)
    ]


def _reward_row(run: Material, name: str, kind: str, weight: float) -> RewardRow:
    means, stds = (run.values(f"rewards/{name}/{part}") for part in ("mean", "std"))
    width = max(len(means) // 10, 1)
    errors, seconds = (run.values(f"rewards/{name}/{part}") for part in ("error_share", "seconds"))
    return RewardRow(
        name,
        kind,
        weight,
        _mean(means[:width]),
        _mean(means[-width:]),
        _mean(stds[-width:]),
        _mean(errors),
        _mean(seconds),
    )


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def list_phases(run: Material) -> list[PhaseRow]:
    """The time of each phase over the whole run; nothing where it was not logged."""
    totals = {phase: _total(run, f"time/{phase}") for phase in PHASES}
    if not any(totals.values()):
        return []
    other = _total(run, "step_time") - sum(totals.values())
    named = {f"measuring {when}": seconds for when, seconds in run.gain.seconds.items()}
    rest = {"rest of the step": other} if other > 0 else {}
    found = {**totals, **rest, **named}
    whole = sum(found.values())
    return [
        PhaseRow(name, seconds, seconds / whole, format_duration(seconds))
        for name, seconds in found.items()
        if seconds > 0
    ]


def _total(run: Material, metric: str) -> float:
    """Seconds over all steps: each record is the mean of the steps since the one before."""
    total, before = 0.0, 0
    for step, value in run.history.series.get(metric, ()):
        total += max(step - before, 0) * (value or 0.0)
        before = step
    return total


def list_settings(run: Material) -> list[SettingRow]:
    """What the recipe says, where it is not as by default."""
    return [
        SettingRow(
            each.path,
            show(each.value),
            show(each.default) if each.has_default else "–",
        )
        for each in list_choices(run.recipe)
        if each.path.partition(".")[0].partition("[")[0] not in _TOLD_ELSEWHERE
    ]


def show(value: Any) -> str:
    """A plain value as YAML would have it, on one line, and not without end."""
    text = (
        value
        if isinstance(value, str) and value
        else json.dumps(value, ensure_ascii=False, default=str)
    )
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def read_batch(run: Material) -> BatchPlan | None:
    """The batch arithmetic of the launch; None where it is not known on how many processes."""
    processes = run.plan.get("num_processes")
    data = run.manifest.get("data")
    rows = data if isinstance(data, dict) else {}
    if not isinstance(processes, int) or processes < 1 or not run.recipe.is_sampled:
        return None
    prompts, held_out = (
        rows.get(name) if isinstance(rows.get(name), int) else None
        for name in ("train_rows", "eval_rows")
    )
    return plan_batch(batch_inputs(run.recipe, processes, prompts, held_out))


def list_origin(run: Material) -> list[tuple[str, str]]:
    """The manifest, line by line."""
    found = {name: value for name, value in run.manifest.items() if name not in _SECRET}
    rows = [(path, show(value)) for path, value in flatten(found) if value is not None]
    rows += [("attempts", str(run.folder.attempts))]
    resumed = flatten(run.folder.read_resumption())
    return rows + [(f"resumed.{path}", show(value)) for path, value in resumed if path]


def list_measured(run: Material) -> list[MeasuredRow]:
    """Every held-out metric before and after, with intervals."""
    return [_measured_row(run, name) for name in run.gain.names]


def _measured_row(run: Material, name: str) -> MeasuredRow:
    before, after = run.gain.before.get(name), run.gain.after.get(name)
    change = run.gain.change.get(name)
    told = change or after or before
    return MeasuredRow(
        name,
        format_metric(before),
        format_metric(after),
        format_metric(change, "+.3f") if change else "–",
        tone_of(name, change),
        told.prompts if told else 0,
        (told.reason or "") if told and told.low is None else "",
    )


def tone_of(name: str, change: Metric | None) -> str:
    """Whether a difference is good or bad; empty where that is open, or nobody can say which way is better."""
    if change is None or change.low is None or change.high is None:
        return ""
    if not name.startswith(("accuracy/", "reward", "pass@", "maj@", "likelihood_gap")):
        return ""
    return "good" if change.low > 0 else "bad" if change.high < 0 else ""


def format_metric(metric: Metric | None, form: str = ".3f") -> str:
    """A mean with its interval, such as `0.810 (0.722 to 0.875)`."""
    if metric is None or metric.value is None:
        return "–"
    digits = form if abs(metric.value) < 100 else form.replace(".3", ".1")
    interval = "" if metric.low is None else f" ({metric.low:{digits}} to {metric.high:{digits}})"
    return f"{metric.value:{digits}}{interval}".replace("-", "−")


def phase_series(run: Material) -> dict[str, Any]:
    """Seconds of each phase by step, in stretches few enough to draw as bars."""
    known: dict[str, Mapping[int, float]] = {
        phase: {step: value for step, value in points if value is not None}
        for phase in PHASES
        if (points := run.history.series.get(f"time/{phase}"))
    }
    steps = sorted({step for values in known.values() for step in values})
    stretches = list(_cut(steps, 120))
    return {
        "steps": [stretch[-1] for stretch in stretches],
        "phases": {
            phase: [round(fmean(values.get(step, 0.0) for step in each), 4) for each in stretches]
            for phase, values in known.items()
        },
    }


def _cut(steps: list[int], most: int) -> Iterator[list[int]]:
    width = -(-len(steps) // most) or 1
    for start in range(0, len(steps), width):
        yield steps[start : start + width]
