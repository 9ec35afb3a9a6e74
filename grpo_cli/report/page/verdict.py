"""A run in one sentence: how far it came, whether it helped, and whether something is wrong.

Owns the words. A gain is claimed only where its interval leaves no doubt.
"""

from dataclasses import dataclass
from math import isinf
from typing import Literal

from grpo_cli.analysis.estimates import ALL_EQUAL
from grpo_cli.analysis.metrics import Metric
from grpo_cli.analysis.ranking import RANKING
from grpo_cli.report.page.groups import read_weights
from grpo_cli.report.page.held_out import Gain, direction
from grpo_cli.report.page.run_data import Course, RunData
from grpo_cli.units import format_duration

Tone = Literal["good", "bad", "plain"]
_BROKEN = ("failed", "interrupted")
_MOST_MOVED = 4
"""Rewards that one sentence holds; all stand in the table of held-out numbers."""


@dataclass(frozen=True)
class Verdict:
    """The sentence, and how it is meant."""

    text: str
    tone: Tone


def judge(run: RunData) -> Verdict:
    """The verdict on a run."""
    parts = [_tell_gain(run.gain) or _tell_reward(run), _tell_moved(run.gain), _tell_problems(run)]
    told = "; ".join(part for part in parts if part)
    return Verdict(f"{_tell_way(run)}{f': {told}' if told else ''}.", _tone(run))


def _tell_way(run: RunData) -> str:
    """How far it came."""
    status, time = run.status, format_duration(run.seconds)
    steps = (
        f"{run.step:,} of {run.total_steps:,} steps" if run.total_steps else f"{run.step:,} steps"
    )
    reason = f" ({first_line(status.reason).rstrip('.')})" if status.reason else ""
    phase = "" if status.phase == "training" else f", {status.phase}"
    if run.state == "completed":
        return f"Completed {steps} in {time}{reason}"
    if run.state == "running":
        return f"Not finished when this page was written: {steps} after {time}{phase}"
    if run.state == "pending":
        return "Not started when this page was written"
    if run.state == "interrupted":
        return f"Broken off without a word after {steps} in {time}{phase}"
    return f"{run.state.capitalize()} after {steps} in {time}{reason}"


def first_line(reason: str) -> str:
    """What a reason begins with: the rest of it, such as a traceback, is too much for a sentence."""
    return next((" ".join(line.split()) for line in reason.splitlines() if line.strip()), "")


def _tell_gain(gain: Gain) -> str:
    """What training did to the held-out prompts; empty where it was not measured twice."""
    name = gain.primary or ""
    before, after = gain.before.get(name), gain.after.get(name)
    if not before or not after or before.value is None or after.value is None:
        return ""
    what, change = f"held-out {name_metric(name)}", gain.change.get(name)
    values = f"from {before.value:.3f} to {after.value:.3f}"
    if change is None or change.value is None or change.low is None or change.high is None:
        why = _tell_why((change or after).reason or "") or f"{after.prompts} prompts"
        return f"{what} went {values} ({'; '.join(filter(None, (_tell_sampling(gain), why)))})"
    prompts = f"{change.prompts:,} prompts"
    proof = f"({', '.join(filter(None, (format_change(change), prompts, _tell_sampling(gain))))})"
    if change.low <= 0 <= change.high:
        return f"no change of {what} is shown: {values} {proof}"
    return f"{what} {'rose' if change.value > 0 else 'fell'} {values} {proof}"


def _tell_sampling(gain: Gain) -> str:
    return f"sampled {gain.sampling}" if gain.sampling else ""


def _tell_why(reason: str) -> str:
    """Why there is no interval, to stand in brackets."""
    if reason == ALL_EQUAL:
        return "no interval: the change is the same for all prompts"
    plain = reason.replace(" (", ": ").replace(")", "")
    return plain if "interval" in plain or not plain else f"no interval: {plain}"


def _tell_moved(gain: Gain) -> str:
    """The other rewards and accuracies that changed beyond doubt: a total may hide them."""
    told = []
    for name, change in list(gain.moved().items())[:_MOST_MOVED]:
        before, after = (found[name].value or 0.0 for found in (gain.before, gain.after))
        way = "rose" if direction(change) > 0 else "fell"
        values = f"{before:.3f} to {after:.3f} ({format_change(change)})".replace("-", "−")
        told.append(f"held-out {name_part(name)} {way} from {values}")
    return ", ".join(told)


def name_part(name: str) -> str:
    """A reward's or accuracy's name in a sentence that tells of several."""
    kind, _, own = name.partition("/")
    return f"{'accuracy' if kind == 'accuracy' else 'reward'} `{own}`" if own else name


def name_metric(name: str) -> str:
    """A metric's name in a sentence."""
    if name == f"accuracy/{RANKING}":
        return "ranking of the scored answers"
    return "accuracy" if name.startswith("accuracy/") else name


def format_change(change: Metric) -> str:
    """A difference with its interval, such as `+0.510, 95 % interval +0.400 to +0.620`."""
    if change.value is None:
        return "–"
    interval = (
        "" if change.low is None else f", 95 % interval {change.low:+.3f} to {change.high:+.3f}"
    )
    return f"{change.value:+.3f}{interval}".replace("-", "−")


def _tell_reward(run: RunData) -> str:
    course = run.course("reward")
    if course is None or not run.recipe.is_sampled:
        return ""
    change, width = course.change, course.width
    over = (
        f"means of the first and last {width:,} records" if width > 1 else "first and last record"
    )
    lacking = ", not measured on held-out prompts"
    lacking += " afterwards" if run.gain.before else ""
    lacking = "" if run.gain.after or not run.is_over else lacking
    values = f"from {change.before:.3f} to {change.now:.3f}{_tell_noise(course)}".replace("-", "−")
    return f"training reward went {values} ({over}{lacking})"


def _tell_noise(course: Course) -> str:
    if not course.change.difference:
        return ""
    found = f", {course.change.difference:+.3f}"
    if isinf(course.margin):
        return f"{found}, of too few records to know their noise"
    if course.is_noise:
        return f"{found}, which is no more than its noise (±{course.margin:.3f})"
    return f"{found} with a noise of ±{course.margin:.3f}" if course.margin else found


def _tell_problems(run: RunData) -> str:
    counts = {
        level: sum(each.level == level for each in run.symptoms)
        for level in ("error", "warning", "note")
    }
    told = [
        f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count
    ]
    verdicts = run.expected.verdicts if run.expected else ()
    outside = sum(each.outcome == "outside" for each in verdicts)
    if outside:
        told.append(f"{outside} of {len(verdicts)} expected metrics outside the band")
    if told:
        return f"{', '.join(told[:-1])} and {told[-1]}" if len(told) > 1 else told[0]
    if run.state in _BROKEN or _lost(run):
        # What ended it, or what was lost, is told already.
        return ""
    so_far = "" if run.is_over else " so far"
    return f"no problems found{so_far}" if run.history.series else ""


def _tone(run: RunData) -> Tone:
    if run.state in _BROKEN or any(each.level == "error" for each in run.symptoms):
        return "bad"
    way = direction(run.gain.change.get(run.gain.primary or ""))
    if way > 0 and not _lost(run):
        return "good"
    return "bad" if way < 0 else "plain"


def _lost(run: RunData) -> bool:
    """Whether a held-out accuracy or reward that counts is lower than before, beyond doubt."""
    gain, weights = run.gain, read_weights(run.recipe)
    fell = [name for name, change in gain.moved().items() if direction(change) < 0]
    if direction(gain.change.get(gain.primary or "")) < 0:
        return True
    return any(weights.get(name.removeprefix("rewards/"), 1.0) > 0 for name in fell)
