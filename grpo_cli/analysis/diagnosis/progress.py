"""Rules on whether a run gets anywhere, where it was best, and whether that holds elsewhere."""

from collections.abc import Mapping
from itertools import pairwise
from math import sqrt
from statistics import fmean

from grpo_cli.analysis.diagnosis.fixes import on_run, slower
from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.analysis.diagnosis.rule import Rule, RuleHit, sampled_only
from grpo_cli.analysis.diagnosis.trends import NOW, SURE, Change, change_of, compare

_SURE_OF_BEST = 6.0
"""Standard errors: the best of many windows lies above its own mean by chance already."""
_EVALUATIONS = 4
"""Evaluations before which nothing is said of them."""
LEAST_GAP = 0.15
"""Of the size of the rewards."""
LEAST_LOSS = 0.1
"""Of the reward at the beginning, or of its spread there."""
LEAST_FALL = 0.3
"""Of what was gained."""


def _look_for_early_peak(history: History) -> RuleHit | None:
    peak, started = history.peak("reward"), history.first("reward", NOW)
    if peak is None or len(history.up_to("reward", peak.step, NOW)) < NOW:
        return None
    gain = compare(started, peak.values)
    fall = compare(peak.values, history.last("reward", NOW))
    if gain is None or fall is None or not gain.exceeds():
        return None
    if not fall.reversed().exceeds(LEAST_FALL * gain.difference, _SURE_OF_BEST):
        return None
    seen = (
        f"the reward was best around step {peak.step} ({peak.mean:.3g}, from {gain.before:.3g}) and is "
        f"{fall.now:.3g} now, by more than {LEAST_FALL:.0%} of the gain lower"
    )
    return RuleHit("warning", seen, _keep(history, peak.step))


def _look_for_fall(history: History) -> RuleHit | None:
    change, peak = change_of(history, "reward", NOW), history.peak("reward")
    if change is None or peak is None or history.count("reward") < 2 * NOW:
        return None
    least = LEAST_LOSS * max(abs(change.before), *history.first("reward_std", 1), 0.0)
    if not change.reversed().exceeds(least) or _look_for_early_peak(history):
        return None
    seen = (
        f"the reward began at {change.before:.3g} and is {change.now:.3g} now (the first and the last {NOW} "
        f"records; at most {least:.2g} lower)"
    )
    return RuleHit("warning", seen, _keep(history, peak.step))


def _keep(history: History, step: int) -> str:
    rate = slower(history.recipe)
    if history.checkpoints is None:
        return f"{on_run(history, 'diagnose')} names the checkpoint to keep; next time {rate}"
    if not history.checkpoints:
        return f"no checkpoint is left; `training.max_steps: {step}`, or {rate}"
    nearest = min(history.checkpoints, key=lambda each: (abs(each - step), each))
    return (
        f"keep checkpoint {nearest}: {on_run(history, 'eval', f'--checkpoint {nearest}')}, "
        f"{on_run(history, 'export', f'--checkpoint {nearest} --to DIR')}; next time {rate}"
    )


def _look_for_gap(history: History) -> RuleHit | None:
    trained, held = change_of(history, "reward"), _held_out(history)
    if trained is None or held is None:
        return None
    least = max(LEAST_GAP * max(abs(trained.now), abs(trained.before)), SURE * held.error)
    gained = trained.difference - held.difference
    if not trained.exceeds() or min(gained, trained.now - held.now) <= least:
        return None
    seen = (
        f"the reward in training went from {trained.before:.3g} to {trained.now:.3g}, held out from "
        f"{held.before:.3g} to {held.now:.3g} (gaps up to {least:.2g} are usual)"
    )
    fix = (
        "more rows, fewer epochs (`training.num_train_epochs: 1`), or a narrower reward; "
        "read the best completions in `completions/`"
    )
    return RuleHit("warning", seen, fix)


def _held_out(history: History) -> Change | None:
    """How the reward of held-out prompts has changed: by evaluations, else by the measurements."""
    first, recent = history.first("eval_reward", 1), history.last("eval_reward", _EVALUATIONS)
    if first and len(recent) == _EVALUATIONS:
        # Of how many prompts is not logged: what one evaluation differs from the next is their noise.
        jump = max(abs(after - before) for before, after in pairwise(recent))
        return Change(first[0], fmean(recent[-2:]), jump / SURE)
    prompts = history.before.get("prompts")
    error = _error_of(history, prompts if isinstance(prompts, int) else 0)
    before, after = _reward_in(history.before), _reward_in(history.after)
    if before is None or after is None or error is None:
        return None
    return Change(before, after, error)


def _error_of(history: History, prompts: int) -> float | None:
    """The standard error of a mean over so many prompts, with the spread that training shows."""
    spread = history.last("reward_std", NOW) + history.first("reward_std", NOW)
    return max(spread) / sqrt(prompts) if spread and prompts > 0 else None


def _reward_in(measurement: Mapping[str, object]) -> float | None:
    value = measurement.get("reward")
    return float(value) if isinstance(value, int | float) else None


RULES = (
    Rule(
        "early_peak",
        "it was better before",
        ("reward",),
        10,
        30,
        f"{LEAST_FALL:.0%} of the gain lost again since the best 10 records, by {_SURE_OF_BEST:g} standard errors",
        "ours: less than that, after a real gain, is how rewards swing",
        "The last weights are not the best ones of this run.",
        _look_for_early_peak,
        sampled_only,
    ),
    Rule(
        "falling_reward",
        "it gets worse",
        ("reward",),
        10,
        20,
        f"lower than it began by {LEAST_LOSS:.0%} of itself or of its spread, and by 4 standard errors",
        "ours: training is to raise the reward, and single records swing by less",
        "The weights are worse at what is rewarded than those the run began with.",
        _look_for_fall,
        sampled_only,
    ),
    Rule(
        "held_out_gap",
        "what is learned does not hold elsewhere",
        ("reward",),
        10,
        10,
        f"training ahead of held-out prompts, in value and in gain, by {LEAST_GAP:.0%} and 4 standard errors",
        "ours: held-out answers are greedy or few, so smaller gaps have other reasons",
        "Rows are learned by heart, or the reward is gamed in ways that other prompts do not allow.",
        _look_for_gap,
        sampled_only,
    ),
)
