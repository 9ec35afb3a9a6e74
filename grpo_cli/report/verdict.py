"""A run in one sentence: how far it came, whether it helped, and whether something is wrong.

A gain is claimed only if its interval excludes 0.
"""

from collections import Counter
from typing import NamedTuple

from grpo_cli.analysis.diagnosis.diagnosis import LEVELS
from grpo_cli.analysis.estimates import ALL_EQUAL
from grpo_cli.analysis.held_out import HeldOut, Tone, direction, find_tone
from grpo_cli.analysis.metrics import RANKING, Metric
from grpo_cli.report.summary import RunReport, Trend
from grpo_cli.units import count_noun, format_duration, format_value

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
    failures = [f"{name}: {said}" for name, said in run.scoring_failures().items()]
    collapse = run.diagnosis.collapse
    parts = [
        collapse.seen if collapse else "",
        gain,
        _tell_moved(run.held_out),
        *failures[:_MOST_MOVED],
        _tell_problems(run),
    ]
    result = "; ".join(part for part in parts if part)
    return Verdict(f"{_tell_progress(run)}{f': {result}' if result else ''}.", _tone(run))


def _tell_progress(run: RunReport) -> str:
    if run.known_settings is not None:
        return run.described
    status, time, state = run.status, format_duration(run.status.seconds), run.life.state
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    steps = f"{run.step:,}{total} {'step' if (run.total_steps or run.step) == 1 else 'steps'}"
    reason = f" ({status.reason_line.rstrip('.')})" if status.reason else ""
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


def _tell_gain(run: RunReport) -> str:
    """Return what training did to the held-out prompts; empty if it was not measured twice.

    Of a run with a warm-up that is what GRPO did since, and then how the model was before.
    """
    held_out, name = run.held_out, run.held_out.primary
    after, warmed = held_out.after.get(name), held_out.warmup.get(name)
    before = held_out.before.get(name)
    start = warmed or before
    if not start or not after or start.value is None or after.value is None:
        return ""
    metric = "accuracy" if name.startswith("accuracy/") else name
    what = f"held-out {'ranking of the scored answers' if name.endswith(RANKING) else metric}"
    change = (held_out.since_warmup if warmed else held_out.change).get(name)
    since = " after the warm-up" if warmed else ""
    values = f"from {format_value(start.value)}{since} to {format_value(after.value)}"
    more = ""
    if warmed and before:
        whole = held_out.change.get(name)
        gain = f" ({format_change(whole)} in all)" if whole else ""
        more = f"; before the warm-up it was {format_value(before.value)}{gain}"
    sampling = [f"sampled {run.sampling}"] if run.sampling else []
    if change is None or change.value is None or change.low is None or change.high is None:
        why = _tell_why((change or after).reason or "") or count_noun(after.prompts, "prompt")
        return f"{what} went {values} ({'; '.join([*sampling, why])}){more}"
    proof = ", ".join([format_change(change), count_noun(change.prompts, "prompt"), *sampling])
    if change.low <= 0 <= change.high:
        return f"no change of {what} is shown: {values} ({proof}){more}"
    return f"{what} {'rose' if change.value > 0 else 'fell'} {values} ({proof}){more}"


def _tell_why(reason: str) -> str:
    if reason == ALL_EQUAL:
        return "no interval: the change is the same for all prompts"
    return f"no interval: {reason}" if reason else ""


def _tell_moved(held_out: HeldOut) -> str:
    """Return the other rewards and accuracies that changed beyond doubt: a total may hide them."""
    moved = []
    for name, change in list(held_out.moved().items())[:_MOST_MOVED]:
        before, after = (stage[name].value or 0.0 for stage in (held_out.before, held_out.after))
        way = "rose" if change.direction > 0 else "fell"
        values = f"{format_value(before)} to {format_value(after)} ({format_change(change)})"
        kind, _, reward = name.partition("/")
        kind = "accuracy" if kind == "accuracy" else "reward"
        what = f"{kind} `{reward}`" if reward else name
        moved.append(f"held-out {what} {way} from {values}")
    return ", ".join(moved)


def format_change(change: Metric) -> str:
    """Return a difference with its interval, such as `+0.510, 95 % interval +0.400 to +0.620`."""
    interval = change.say_interval("+")
    return f"{format_value(change.value, '+')}{f', 95 % interval {interval}' if interval else ''}"


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
    values = f"from {format_value(trend.first)} to {format_value(trend.last)}{_tell_noise(trend)}"
    return f"{'training reward' if metric == 'reward' else name} went {values} ({over})"


def _tell_noise(trend: Trend) -> str:
    if not trend.difference:
        return ""
    difference = f", {format_value(trend.difference, '+')}"
    if trend.margin is None:
        return f"{difference}, of too few records to know their noise"
    noise = format_value(trend.margin)
    if trend.is_noise:
        return f"{difference}, which is within its noise (±{noise})"
    return f"{difference} with a noise of ±{noise}" if trend.margin else difference


def _tell_problems(run: RunReport) -> str:
    counts = Counter(each.level for each in run.diagnosis.symptoms)
    problems = [count_noun(counts[each], each) for each in LEVELS if counts[each]]
    verdicts = run.expected.verdicts if run.expected else ()
    outside = sum(each.outcome == "outside" for each in verdicts)
    if outside:
        problems.append(f"{outside} of {len(verdicts)} expected metrics outside the band")
    if problems:
        return " and ".join(filter(None, (", ".join(problems[:-1]), problems[-1])))
    # What ended a run, or what was lost, is in the sentence already.
    if run.life.state in _BROKEN or _lost(run) or not run.series:
        return ""
    return run.diagnosis.clean_verdict("" if run.is_over else " so far")


def _tone(run: RunReport) -> Tone:
    if run.life.state in _BROKEN or run.diagnosis.errors:
        return "bad"
    changes = run.held_out.stages.values()
    tone = find_tone(changes, collapsed=run.diagnosis.collapse is not None)
    return "plain" if tone == "good" and _lost(run) else tone


def _lost(run: RunReport) -> bool:
    """Return whether a held-out accuracy or reward that counts is lower than before, beyond doubt."""
    held_out = run.held_out
    if direction(held_out.change.get(held_out.primary)) < 0:
        return True
    fell = [name for name, change in held_out.moved().items() if change.direction < 0]
    return any(run.weights.get(name.removeprefix("rewards/"), 1.0) > 0 for name in fell)
