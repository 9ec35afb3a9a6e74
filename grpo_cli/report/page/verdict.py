"""A run in one sentence: how far it came, whether it helped, and whether something is wrong.

Owns the words. A gain is claimed only where its interval leaves no doubt.
"""

from dataclasses import dataclass
from typing import Literal

from grpo_cli.estimates import ALL_EQUAL
from grpo_cli.measure.metrics import Metric
from grpo_cli.measure.ranking import RANKING
from grpo_cli.report.page.gains import Gain
from grpo_cli.report.page.material import Material
from grpo_cli.units import format_duration

Tone = Literal["good", "bad", "plain"]
_BROKEN = ("failed", "interrupted")


@dataclass(frozen=True)
class Verdict:
    """The sentence, and how it is meant."""

    text: str
    tone: Tone


def judge(run: Material) -> Verdict:
    """The verdict on a run."""
    parts = [_tell_gain(run.gain) or _tell_reward(run), _tell_problems(run)]
    told = "; ".join(part for part in parts if part)
    return Verdict(f"{_tell_way(run)}{f': {told}' if told else ''}.", _tone(run))


def _tell_way(run: Material) -> str:
    """How far it came."""
    status, time = run.status, format_duration(run.seconds)
    steps = (
        f"{run.step:,} of {run.total_steps:,} steps" if run.total_steps else f"{run.step:,} steps"
    )
    reason = f" ({' '.join(status.reason.split()).rstrip('.')})" if status.reason else ""
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


def _tell_gain(gain: Gain) -> str:
    """What training did to the held-out prompts; empty where it was not measured twice."""
    name = gain.primary or ""
    before, after = gain.before.get(name), gain.after.get(name)
    if not before or not after or before.value is None or after.value is None:
        return ""
    what, change = f"held-out {name_metric(name)}", gain.change.get(name)
    values = f"from {before.value:.3f} to {after.value:.3f}"
    if change is None or change.value is None or change.low is None or change.high is None:
        why = (change or after).reason or ""
        why = "the change is the same for all prompts" if why == ALL_EQUAL else why
        return (
            f"{what} went {values} ({f'no interval: {why}' if why else f'{after.prompts} prompts'})"
        )
    proof = f"({format_change(change)}, {change.prompts:,} prompts)"
    if change.low <= 0 <= change.high:
        return f"no change of {what} is shown: {values} {proof}"
    return f"{what} {'rose' if change.value > 0 else 'fell'} {values} {proof}"


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


def _tell_reward(run: Material) -> str:
    change = run.reward_change()
    if change is None or not run.recipe.is_sampled:
        return ""
    first, last, width = change
    over = (
        f"means of the first and last {width:,} records" if width > 1 else "first and last record"
    )
    lacking = ", not measured on held-out prompts"
    lacking += " afterwards" if run.gain.before else ""
    lacking = "" if run.gain.after or not run.is_over else lacking
    return f"training reward went from {first:.3f} to {last:.3f} ({over}{lacking})"


def _tell_problems(run: Material) -> str:
    counts = {
        level: sum(each.level == level for each in run.symptoms) for level in ("error", "warning")
    }
    told = [
        f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count
    ]
    verdicts = run.expected.verdicts if run.expected else ()
    outside = sum(each.outcome == "outside" for each in verdicts)
    if outside:
        told.append(f"{outside} of {len(verdicts)} expected metrics outside the band")
    if told:
        return " and ".join(told)
    if run.state in _BROKEN:
        # What ended it is told already.
        return ""
    so_far = "" if run.is_over else " so far"
    return f"no problems found{so_far}" if run.history.series else ""


def _tone(run: Material) -> Tone:
    if run.state in _BROKEN or any(each.level == "error" for each in run.symptoms):
        return "bad"
    change = run.gain.change.get(run.gain.primary or "")
    if change and change.low is not None and change.high is not None:
        return "good" if change.low > 0 else "bad" if change.high < 0 else "plain"
    return "plain"
