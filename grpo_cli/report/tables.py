"""The tables of a page: held-out numbers, rewards, time, and what a run was made of."""

import json
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_cli.analysis.held_out import SHARES, direction, sort_names
from grpo_cli.analysis.metrics import Metric, group_reasons, say_metric
from grpo_cli.batch.plan import BatchPlan, batch_inputs, plan_batch
from grpo_cli.recipe.comparison import flatten, list_choices
from grpo_cli.report.summary import RunReport, Trend
from grpo_cli.runs.metrics import PHASES, Series
from grpo_cli.units import format_duration, format_value

_RATE = "training.learning_rate"
_SCORES = ("accuracy/", "reward")
"""Prefixes of metrics of which several may say the same."""
_REST, _MEASURING, _OTHER = "rest of the step", "measuring", "start-up, saving and the rest"
_ORDER = (*PHASES, _REST, _MEASURING, _OTHER)


def list_measured(run: RunReport) -> list[dict[str, Any]]:
    """Return a row for every held-out metric before and after, with intervals; equal ones share a row."""
    held_out, rows = run.held_out, []
    columns = (
        held_out.before,
        held_out.after,
        held_out.change,
        held_out.warmup,
        held_out.since_warmup,
    )
    for name, *same in group_equal(held_out.names, *columns, *held_out.values.values()):
        before, after, change, warmup, since = (column.get(name) for column in columns)
        known = change or after or before
        rows.append(
            {
                "name": name,
                "same": same,
                "before": say_metric(before),
                "after": say_metric(after),
                "change": say_metric(change, "+"),
                "tone": tone_of(name, change),
                "prompts": known.prompts if known else 0,
                # Of a run without a warm-up there are no such columns.
                "warmup": say_metric(warmup) if held_out.warmup else None,
                "since_warmup": say_metric(since, "+") if held_out.warmup else None,
            }
        )
    return rows


def group_equal(names: Iterable[str], *columns: Mapping[str, Any]) -> list[list[str]]:
    """Return metrics, the most telling first; scores that are equal in every column are together."""
    groups: dict[Any, list[str]] = {}
    for name in sort_names(names):
        values = [column.get(name) for column in columns]
        key = repr(values) if name.startswith(_SCORES) else name
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def rank_runs(runs: Sequence[RunReport]) -> tuple[str, list[int]]:
    """Return the held-out metric that most runs have, and the places of the runs, the best first.

    Without a measurement, the metric is empty and the training reward decides.
    """
    primary = [run.held_out.primary for run in runs if run.held_out.primary]
    metric = max(primary, key=primary.count, default="")

    def score(place: int) -> tuple[bool, float]:
        after, trend = runs[place].held_out.after.get(metric), runs[place].trend("reward")
        value = after.value if after else trend.last if trend and not metric else None
        return value is not None, value or 0.0

    return metric, sorted(range(len(runs)), key=score, reverse=True)


def gather_notes(metrics: Mapping[str, Metric], names: Iterable[str]) -> dict[str, list[str]]:
    """Return each reason why there is no interval, with the metrics that have none."""
    return group_reasons((name, metrics[name].reason) for name in names if name in metrics)


def tone_of(name: str, change: Metric | None) -> str:
    """Return whether a difference is good or bad; empty if it is open, or neither way is better."""
    if not name.startswith((*SHARES, "reward", "likelihood_gap")):
        return ""
    return {1: "good", 0: "", -1: "bad"}[direction(change)]


def list_rewards(run: RunReport) -> list[dict[str, Any]]:
    """Return a row for each of the recipe's rewards, with what became of it."""
    rows, is_own = [], run.known_settings is None
    for name, config in zip(run.weights, run.recipe.rewards, strict=True):
        stds, errors, seconds = (
            run.values(f"rewards/{name}/{part}") for part in ("std", "error_share", "seconds")
        )
        # The spread is over the last tenth.
        means = (
            fmean(each) if each else None
            for each in (stds[-max(len(stds) // 10, 1) :], errors, seconds)
        )
        rows.append(
            {
                "name": name,
                "kind": config.kind if is_own else "–",
                "weight": config.weight if is_own else None,
                "trend": run.trend(f"rewards/{name}/mean"),
                **dict(zip(("spread", "error_share", "seconds"), means, strict=True)),
            }
        )
    return rows


def list_phases(run: RunReport) -> list[dict[str, Any]]:
    """Return a row for the time of each phase over the whole run; nothing if it was not logged."""
    seconds_of = {phase: _total(run, f"time/{phase}") for phase in PHASES}
    if not any(seconds_of.values()):
        return []
    seconds_of[_REST] = max(_total(run, "step_time") - sum(seconds_of.values()), 0.0)
    measured = [run.before, run.measured("warmup"), run.after]
    measured += [each for steps in run.during.values() for each in steps.values()]
    seconds_of[_MEASURING] = sum(run.values("eval_runtime"))
    seconds_of[_MEASURING] += sum(each.get("seconds") or 0.0 for each in measured)
    # The status knows of the last attempt alone: phases may be longer than it.
    whole = max(run.status.seconds, sum(seconds_of.values()))
    seconds_of[_OTHER] = whole - sum(seconds_of.values())
    return [
        {
            "name": name,
            # For its colour.
            "place": _ORDER.index(name),
            "seconds": seconds,
            "share": seconds / whole,
            "time": format_duration(seconds),
        }
        for name, seconds in seconds_of.items()
        if seconds > 0
    ]


def _total(run: RunReport, metric: str) -> float:
    """Return the seconds over all steps: each record is the mean of the steps since the one before."""
    total, before = 0.0, 0
    series = run.series.get(metric, Series())
    for step, value in zip(series.steps, series.values, strict=True):
        if step > before and value == value:
            total += (step - before) * value
        before = step
    return total


_LONGEST_VALUE, _LONGEST_FACT = 400, 30
_TOLD_ELSEWHERE = ("expect.", "name", "description")
_FILLED_IN = frozenset({"launch.num_processes"})
"""Settings that are `auto` by default, and that a launch replaces by what they came to."""
_SECRET = frozenset({"environment", "env"})
"""Parts of a manifest that are never shown."""


def show(value: Any, longest: int = _LONGEST_VALUE) -> str:
    """Return a plain value as YAML would have it, on one line; of long ones the middle is left out."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # A number that may be a share, such as `save_steps: 4`.
    text = value if isinstance(value, str) and value else ""
    text = text or json.dumps(value, ensure_ascii=False, default=str)
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def list_facts(run: RunReport) -> list[tuple[str, str]]:
    """Return what one wants to know first, beside the verdict."""
    recipe, held_out, trend = run.recipe, run.held_out, run.trend("reward")
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    facts = {"steps": f"{run.step:,}{total}", "time": format_duration(run.status.seconds)}
    if trend and recipe.is_sampled:
        facts["training reward"] = show_trend(trend)
    name = held_out.primary
    stages = (held_out.before, *filter(None, [held_out.warmup]), held_out.after)
    measured = [each.get(name) for each in stages]
    if any(measured):
        known = [each.value if each else None for each in measured]
        values = map(format_value, known)
        sampling = f", {run.sampling}" if run.sampling else ""
        facts[f"held-out {name}{sampling}"] = " → ".join(values)
    facts["learning rate"] = f"{recipe.training.learning_rate:g}"
    facts["model"] = _show_path(recipe.model.path)
    facts["final model"] = run.chosen
    facts |= {name: _show_path(told) for name, told in recipe.stages.items()}
    if recipe.training.mode == "async":
        facts["training"] = "asynchronous (experimental)"
    facts["dropped"] = run.dropped
    facts["device"] = str(run.manifest["accelerator"].get("device", ""))
    facts["seed"] = str(recipe.seed)
    facts["started"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.status.started_at))
    if run.known_settings is not None:
        rate = ["learning rate"] if _RATE in run.known_settings else []
        told = {"steps", "training reward", *rate}
        facts = {name: value for name, value in facts.items() if name in told}
    return [(name, value) for name, value in facts.items() if value]


def show_trend(trend: Trend) -> str:
    """Return where a metric began and ended, such as `0.100 → 0.700`, and whether that may be noise."""
    noise = " (no more than noise)" if trend.is_noise else ""
    if trend.difference and trend.error is None:
        noise = " (noise not known)"
    return f"{format_value(trend.first)} → {format_value(trend.last)}{noise}"


def _show_path(path: str) -> str:
    """Return a long path by its last two parts; ids of a hub and short paths as they are."""
    parts = re.split(r"[/\\]", path)
    return path if len(path) <= _LONGEST_FACT or len(parts) < 3 else f"…/{'/'.join(parts[-2:])}"


def share_facts(facts: Sequence[Sequence[tuple[str, str]]]) -> dict[str, str]:
    """Return the facts that several runs share: a column of them tells nothing."""
    first, *others = map(dict, facts)
    return {
        name: value
        for name, value in first.items()
        if all(each.get(name) == value for each in others)
    }


def list_settings(run: RunReport) -> list[tuple[str, str, str]]:
    """Return path, value and default of each setting that is not as by default, or has no default."""
    return [
        (each.path, show(each.value), show(each.default) if each.has_default else "–")
        for each in list_choices(run.recipe)
        if (run.known_settings is None or each.path in run.known_settings)
        and each.path not in _FILLED_IN
        and not each.path.startswith(_TOLD_ELSEWHERE)
    ]


def list_overrides(attempts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the `--set` texts that apply in each attempt; a resume from `resolved.json` keeps those before it."""
    applied: list[list[str]] = []
    for manifest in attempts:
        command = manifest["argv"]
        texts = [command[at + 1] for at, each in enumerate(command[:-1]) if each == "--set"]
        texts += [each.removeprefix("--set=") for each in command if each.startswith("--set=")]
        if applied and Path(str(manifest.get("recipe"))).name == "resolved.json":
            texts = [*applied[-1], *texts]
        # The last value of a setting applies.
        applied.append([*{each.partition("=")[0]: each for each in texts}.values()])
    return applied


def say_overrides(run: RunReport) -> str:
    """Return the `--set` texts that apply, and those of earlier attempts if they differ."""
    shown = [" · ".join(texts) or "nothing" for texts in list_overrides(run.attempt_manifests)]
    last = len(shown)
    earlier = [f"attempt {at}: {each}" for at, each in enumerate(shown, 1) if each != shown[-1]]
    if not earlier:
        return "" if shown[-1] == "nothing" else shown[-1]
    return f"{shown[-1]} (attempt {last}; {'; '.join(earlier)})"


def plan_run_batch(run: RunReport) -> BatchPlan | None:
    """Return the batch arithmetic of the launch; None if the number of processes is not known."""
    processes, data = run.plan.get("num_processes"), run.manifest["data"]
    if processes is None or not run.recipe.is_sampled:
        return None
    rows = data.get("train_rows"), data.get("eval_rows")
    return plan_batch(batch_inputs(run.recipe, processes, *rows))


def list_manifest(run: RunReport) -> list[tuple[str, str]]:
    """Return the manifest, line by line; a log of another tool has none."""
    if run.known_settings is not None:
        return []
    manifest, commands = run.manifest, [each["argv"] for each in run.attempt_manifests]
    facts = {key: each for key, each in manifest.items() if key not in {*_SECRET, "argv"}}
    facts |= {"attempts": run.folder.attempts, "resumed": run.folder.read_resumption() or None}
    rows = [
        (f"command of attempt {at}" if len(commands) > 1 else "command", _show_command(*command))
        for at, command in enumerate(commands, 1)
        if command
    ]
    return rows + [
        (path, show(each)) for path, each in flatten(facts) if path and each not in (None, {})
    ]


def _show_command(program: str, *arguments: str) -> str:
    # Started with `python -m grpo_cli`, it bears the name of the module's file.
    own = Path(program).name in ("__main__.py", "grpo", "grpo.exe")
    return shlex.join(["grpo" if own else program, *arguments])
