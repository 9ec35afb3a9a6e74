"""A run in one sentence: how far it came, whether it helped, and whether something is wrong.

A gain is claimed only if its interval excludes 0.
"""

from typing import Literal, NamedTuple

from grpo_cli.analysis.estimates import ALL_EQUAL
from grpo_cli.analysis.held_out import HeldOut, direction
from grpo_cli.analysis.metrics import RANKING, Metric
from grpo_cli.report.summary import RunReport, Trend
from grpo_cli.units import count_noun, format_duration

Tone = Literal["good", "bad", "plain"]
_BROKEN = ("failed", "interrupted")
_MOST_MOVED = 4
"""Rewards in one sentence; all stand in the table of held-out numbers."""


class Verdict(NamedTuple):
    """The sentence, and how it is meant."""

    text: str
    tone: Tone


def judge(run: RunReport) -> Verdict:
    """Return the verdict on a run."""
    gain = _tell_gain(run) or _tell_reward(run)
    parts = [gain, _tell_moved(run.held_out), _tell_problems(run)]
    result = "; ".join(part for part in parts if part)
    return Verdict(f"{_tell_progress(run)}{f': {result}' if result else ''}.", _tone(run))


def _tell_progress(run: RunReport) -> str:
    status, time, state = run.status, format_duration(run.status.seconds), run.life.state
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    steps = f"{run.step:,}{total} steps"
    reason = f" ({first_line(status.reason).rstrip('.')})" if status.reason else ""
    phase = "" if status.phase == "training" else f", {status.phase}"
    if state == "completed":
        return f"Completed {steps} in {time}{reason}"
    if state == "running":
        return f"Not finished when this page was written: {steps} after {time}{phase}"
    if state == "pending":
        return "Not started when this page was written"
    if state == "interrupted":
        return f"Interrupted, with no process left, after {steps} in {time}{phase}"
    return f"{state.capitalize()} after {steps} in {time}{reason}"


def first_line(reason: str) -> str:
    """Return the first line of a reason that is not empty; a traceback is too much for a sentence."""
    return next((" ".join(line.split()) for line in reason.splitlines() if line.strip()), "")


def _tell_gain(run: RunReport) -> str:
    """Return what training did to the held-out prompts; empty if it was not measured twice."""
    held_out, name = run.held_out, run.held_out.primary
    before, after = held_out.before.get(name), held_out.after.get(name)
    if not before or not after or before.value is None or after.value is None:
        return ""
    what, change = f"held-out {_name_metric(name)}", held_out.change.get(name)
    warmed = held_out.warmup.get(name)
    between = (
        f" ({warmed.value:.3f} after the warm-up)" if warmed and warmed.value is not None else ""
    )
    values = f"from {before.value:.3f}{between} to {after.value:.3f}"
    sampling = [f"sampled {run.sampling}"] if run.sampling else []
    if change is None or change.value is None or change.low is None or change.high is None:
        why = _tell_why((change or after).reason or "") or f"{after.prompts} prompts"
        return f"{what} went {values} ({'; '.join([*sampling, why])})"
    proof = ", ".join([format_change(change), f"{change.prompts:,} prompts", *sampling])
    gained = held_out.since_warmup.get(name)
    since = f"; of that, {format_change(gained)} since the warm-up" if gained else ""
    if change.low <= 0 <= change.high:
        return f"no change of {what} is shown: {values} ({proof}){since}"
    return f"{what} {'rose' if change.value > 0 else 'fell'} {values} ({proof}){since}"


def _tell_why(reason: str) -> str:
    if reason == ALL_EQUAL:
        return "no interval: the change is the same for all prompts"
    plain = reason.replace(" (", ": ").replace(")", "")
    return plain if "interval" in plain or not plain else f"no interval: {plain}"


def _tell_moved(held_out: HeldOut) -> str:
    """Return the other rewards and accuracies that changed beyond doubt: a total may hide them."""
    moved = []
    for name, change in list(held_out.moved().items())[:_MOST_MOVED]:
        before, after = (stage[name].value or 0.0 for stage in (held_out.before, held_out.after))
        way = "rose" if direction(change) > 0 else "fell"
        values = f"{before:.3f} to {after:.3f} ({format_change(change)})".replace("-", "−")
        kind, _, reward = name.partition("/")
        kind = "accuracy" if kind == "accuracy" else "reward"
        moved.append(
            f"held-out {kind} `{reward}` {way} from {values}"
            if reward
            else f"held-out {name} {way} from {values}"
        )
    return ", ".join(moved)


def _name_metric(name: str) -> str:
    if name == f"accuracy/{RANKING}":
        return "ranking of the scored answers"
    return "accuracy" if name.startswith("accuracy/") else name


def format_change(change: Metric) -> str:
    """Return a difference with its interval, such as `+0.510, 95 % interval +0.400 to +0.620`."""
    if change.value is None:
        return "–"
    interval = (
        "" if change.low is None else f", 95 % interval {change.low:+.3f} to {change.high:+.3f}"
    )
    return f"{change.value:+.3f}{interval}".replace("-", "−")


def _tell_reward(run: RunReport) -> str:
    metric, name = run.learned
    trend = run.trend(metric)
    if trend is None or not run.recipe.is_sampled:
        return ""
    over = "first and last record"
    if trend.width > 1:
        over = f"means of the first and last {trend.width:,} records"
    if run.is_over and not run.held_out.after:
        over += ", not measured on held-out prompts"
        over += " afterwards" if run.held_out.before else ""
    values = f"from {trend.first:.3f} to {trend.last:.3f}{_tell_noise(trend)}".replace("-", "−")
    return f"{'training reward' if metric == 'reward' else name} went {values} ({over})"


def _tell_noise(trend: Trend) -> str:
    if not trend.difference:
        return ""
    difference = f", {trend.difference:+.3f}"
    if trend.margin is None:
        return f"{difference}, of too few records to know their noise"
    if trend.is_noise:
        return f"{difference}, which is no more than its noise (±{trend.margin:.3f})"
    return f"{difference} with a noise of ±{trend.margin:.3f}" if trend.margin else difference


def _tell_problems(run: RunReport) -> str:
    problems = []
    for level in ("error", "warning", "note"):
        count = sum(each.level == level for each in run.diagnosis.symptoms)
        if count:
            problems.append(count_noun(count, level))
    verdicts = run.expected.verdicts if run.expected else ()
    outside = sum(each.outcome == "outside" for each in verdicts)
    if outside:
        problems.append(f"{outside} of {len(verdicts)} expected metrics outside the band")
    if problems:
        return " and ".join(filter(None, (", ".join(problems[:-1]), problems[-1])))
    # What ended a run, or what was lost, is in the sentence already.
    if run.life.state in _BROKEN or _lost(run) or not run.series:
        return ""
    verdict = run.diagnosis.clean_verdict
    return verdict if run.is_over else verdict.replace(" (", " so far (", 1)


def _tone(run: RunReport) -> Tone:
    if run.life.state in _BROKEN or run.diagnosis.errors:
        return "bad"
    way = direction(run.held_out.change.get(run.held_out.primary))
    if way > 0 and not _lost(run):
        return "good"
    return "bad" if way < 0 else "plain"


def _lost(run: RunReport) -> bool:
    """Return whether a held-out accuracy or reward that counts is lower than before, beyond doubt."""
    held_out = run.held_out
    if direction(held_out.change.get(held_out.primary)) < 0:
        return True
    fell = [name for name, change in held_out.moved().items() if direction(change) < 0]
    return any(run.weights.get(name.removeprefix("rewards/"), 1.0) > 0 for name in fell)
