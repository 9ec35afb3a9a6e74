"""Rules on whether a run improves, where it was best, and whether that holds on held-out prompts."""

from collections.abc import Mapping
from itertools import pairwise
from math import sqrt
from statistics import fmean

from grpo_cli.analysis.diagnosis import rewards, signal, stability
from grpo_cli.analysis.diagnosis.history import (
    ALIKE,
    FEWEST_PROMPTS,
    LIKELY,
    NOW,
    SURE,
    Answers,
    Change,
    History,
    change_between,
    describe_collapse,
    judges,
    slope_in_errors,
)
from grpo_cli.analysis.diagnosis.rewards import MAY_JUDGE, less_weight
from grpo_cli.analysis.diagnosis.rule import Rule, faster, on_run, slower, try_rewards
from grpo_cli.analysis.estimates import FEWEST_CLUSTERS
from grpo_cli.analysis.metrics import Metric, compare
from grpo_cli.issues import Issue

_SURE_OF_BEST = 6.0
"""Standard errors: the best of many windows lies above its own mean by chance already."""
_EVALUATIONS = 4
"""Evaluations that a gap needs."""
_LEAST_GAP = 0.15
"""Of the size of the rewards."""
_LEAST_LOSS = 0.1
"""Of the reward at the beginning, or of its spread there."""
_LEAST_FALL = 0.3
"""Of what was gained."""
_FLAT_STEPS = 40
"""Steps in which a reward should rise; a record may be of several."""
_SLOW = 1.5
"""Standard errors of a rise that is slow rather than none."""
_SLOW_RECORDS = 100
"""Records in which even a slow rise shows."""
_ANSWERS = ("eval/before.jsonl", "eval/after.jsonl")


@Rule(
    "the reward was higher before",
    ("reward",),
    min_records=30,
    threshold=f"{_LEAST_FALL:.0%} of the gain lost again since the best 10 records, by {_SURE_OF_BEST:g} "
    "standard errors",
    source="ours: smaller drops after a real gain are normal fluctuation",
)
def early_peak(history: History) -> Issue | None:
    """The last weights are not the best ones of this run."""
    peak = history.peak("reward")
    if peak is None or len(history.up_to("reward", peak.step, NOW)) < NOW:
        return None
    gain = change_between(history.first("reward", NOW), peak.values)
    fall = change_between(peak.values, history.last("reward"))
    if gain is None or fall is None or not gain.rises():
        return None
    if not fall.falls(_LEAST_FALL * gain.difference, _SURE_OF_BEST):
        return None
    seen = (
        f"the reward was best around step {peak.step} ({gain.now:.3g}, from {gain.before:.3g}) and is "
        f"{fall.now:.3g} now, by more than {_LEAST_FALL:.0%} of the gain lower"
    )
    return Issue(seen, _keep(history, peak.step), level="warning")


@Rule(
    "the reward falls",
    ("reward",),
    min_records=20,
    threshold=f"lower than it began by {_LEAST_LOSS:.0%} of itself or of its spread, and by 4 standard errors",
    source="ours: training should raise the reward, and single records fluctuate less",
)
def falling_reward(history: History) -> Issue | None:
    """The model gets less reward than the one that the run began with."""
    change, peak = history.change("reward", NOW), history.peak("reward")
    if change is None or peak is None:
        return None
    least = _LEAST_LOSS * max(abs(change.before), *history.first("reward_std", 1), 0.0)
    if not change.falls(least) or early_peak.apply(history):
        return None
    seen = (
        f"the reward began at {change.before:.3g} and is {change.now:.3g} now (the first and the last {NOW} "
        f"records; at most {least:.2g} lower)"
    )
    return Issue(seen, _keep(history, peak.step), level="warning")


_REASONS = (
    *(falling_reward, signal.no_signal, rewards.absent_reward),
    *(stability.too_low_learning_rate, stability.entropy_collapse),
    *(stability.entropy_explosion, stability.kl_runaway, stability.nan_loss),
)
"""Rules that tell why a reward does not rise."""


@Rule(
    "the reward does not rise",
    ("reward",),
    min_records=20,
    threshold=f"a slope of {LIKELY:g} standard errors or less over {_FLAT_STEPS} steps or more, the reward not "
    "near its highest, and no other rule tells why",
    source=f"ours: {LIKELY:g} standard errors are little, and runs that learn show it in fewer records",
)
def flat_reward(history: History) -> Issue | None:
    """So many steps should show that something is learned, if anything is."""
    points, peak = history.points("reward"), history.peak("reward")
    change, slope = (
        history.change("reward", NOW),
        slope_in_errors(history.last("reward", len(points))),
    )
    if change is None or peak is None or points[-1][0] - points[0][0] < _FLAT_STEPS - 1:
        return None
    best = change_between(history.first("reward", NOW), peak.values)
    learned = history.has_risen() or history.is_near_best() or (best is not None and best.rises())
    if slope > LIKELY or learned or any(rule.apply(history) for rule in _REASONS):
        return None
    seen = (
        f"the reward began at {change.before:.3g} and is {change.now:.3g} now (the first and the last {NOW} of "
        f"{len(points)} records); its slope is {slope:.1f} standard errors (above {LIKELY:g} is a rise)"
    )
    fix = (
        f"{try_rewards(history)} shows whether right answers score more than wrong ones; if they do, easier "
        f"prompts, or {faster(history)}"
    )
    # Of a slow rise, more records may tell.
    slow = slope > _SLOW and len(points) < _SLOW_RECORDS
    return Issue(seen, fix, level="note" if slow else "warning")


def _keep(history: History, step: int) -> str:
    rate = slower(history)
    if not history.advice.is_own:
        return f"keep the checkpoint nearest to step {step}; next time {rate}"
    if history.checkpoints is None:
        return f"{on_run(history, 'diagnose')} names the checkpoint to keep; next time {rate}"
    if not history.checkpoints:
        return f"no checkpoint is left; `training.max_steps: {step}`, or {rate}"
    nearest = min(history.checkpoints, key=lambda each: (abs(each - step), each))
    return (
        f"keep checkpoint {nearest}: {on_run(history, 'eval', f'--checkpoint {nearest}')}, "
        f"{on_run(history, 'export', f'--checkpoint {nearest} --to DIR')}; next time {rate}"
    )


@Rule(
    "held-out prompts gain less than training",
    ("reward",),
    threshold=f"training ahead of held-out prompts, in value and in gain, by {_LEAST_GAP:.0%} and 4 standard "
    "errors",
    source="ours: held-out answers are greedy or few, so smaller gaps have other causes",
)
def held_out_gap(history: History) -> Issue | None:
    """Rows are learned by heart, or the reward is gamed in ways that other prompts do not allow."""
    trained, held_out = history.change("reward"), _held_out(history)
    if trained is None or held_out is None:
        return None
    least = max(_LEAST_GAP * max(abs(trained.now), abs(trained.before)), SURE * held_out.error)
    gap = min(trained.difference - held_out.difference, trained.now - held_out.now)
    if not trained.rises() or gap <= least:
        return None
    seen = (
        f"the reward in training went from {trained.before:.3g} to {trained.now:.3g}, held out from "
        f"{held_out.before:.3g} to {held_out.now:.3g} (gaps up to {least:.2g} are usual)"
    )
    fix = (
        f"more rows, fewer epochs ({history.advice.edit('training.num_train_epochs', 1, '')}), or a narrower "
        f"reward; {history.advice.read_best}"
    )
    return Issue(seen, fix, level="warning")


def _held_out(history: History) -> Change | None:
    """Return how the reward of held-out prompts has changed: by evaluations, else by the measurements."""
    first, recent = history.first("eval_reward", 1), history.last("eval_reward", _EVALUATIONS)
    if first and len(recent) == _EVALUATIONS:
        # The number of prompts is not logged: the difference between evaluations shows their noise.
        jump = max(abs(after - before) for before, after in pairwise(recent))
        return Change(first[0], fmean(recent[-2:]), jump / SURE)
    before, after = (history.metrics.measured.get(when, {}) for when in ("before", "after"))
    spread = history.last("reward_std") + history.first("reward_std", NOW)
    prompts = before.get("prompts")
    if None in (before.get("reward"), after.get("reward")) or not spread or not prompts:
        return None
    return Change(before["reward"], after["reward"], max(spread) / sqrt(prompts))


@Rule(
    "one answer to every held-out prompt",
    _ANSWERS,
    window=0,
    min_records=0,
    threshold=f"{ALIKE:.0%} of the answers to {FEWEST_PROMPTS} prompts or more are the same text or empty, fewer "
    "were before training or after the warm-up, and they are not right",
    source="ours: different prompts have different answers, unless nearly all of them are right",
)
def held_out_collapse(history: History) -> Issue | None:
    """A model that gives the same answer to everything has unlearned its task, whatever the reward is."""
    before, warmed, after = (history.answers_before, history.answers_warmed, history.answers_after)
    seen = describe_collapse(history.recipe, after, warmed, before)
    if seen is None or before is None or after is None:
        return None
    if warmed and warmed.share >= ALIKE:
        seen += f", after the warm-up {warmed.share:.0%}"
        fix = "a shorter warm-up (`warmup.max_steps`), or one with answers that differ more"
        return Issue(seen, fix)
    if after.mean() <= (warmed or before).mean():
        return Issue(seen, _go_back(history))
    fix = (
        f"the reward rose with it, so change the reward: {try_rewards(history)} shows what it rewards, and it "
        "must ask for what one answer to everything cannot give"
    )
    return Issue(seen, fix)


@Rule(
    "held-out answers got worse",
    _ANSWERS,
    window=0,
    min_records=0,
    threshold=f"a reward fell by {_LEAST_LOSS:.0%}, and by its paired 95% interval; from {FEWEST_CLUSTERS} "
    "prompts on",
    source="ours: the comparison is paired by prompt, as in every evaluation; smaller drops are normal between "
    "two measurements",
)
def held_out_loss(history: History) -> Issue | None:
    """On prompts it has not seen, the model loses what training was for, or what it could do before."""
    before, after = history.answers_before, history.answers_after
    if before is None or after is None:
        return None
    # What the warm-up gained, GRPO may have lost.
    stages = (("the warm-up", history.answers_warmed), ("training began", before))
    found = (_find_loss(history, name, stage, after) for name, stage in stages if stage)
    return next(filter(None, found), None)


def _find_loss(history: History, since: str, before: Answers, after: Answers) -> Issue | None:
    changes = compare(before.values, after.values)
    serious, falls, gains = False, [], []
    for place, name, entry in history.rewards():
        metric = f"rewards/{name}"
        # A weight of 0 only watches, and of a negative one less is better.
        counts = entry.weight > 0 or (entry.weight == 0 and judges(entry))
        if counts and (fall := _describe_fall(name, metric, before, after, changes)):
            falls.append(fall)
            serious |= judges(entry) or entry.kind in MAY_JUDGE
        gain = entry.weight * (after.mean(metric) - before.mean(metric))
        gains.append((gain, place, name, entry))
    if len(gains) > 1 and (fall := _describe_fall("reward", "reward", before, after, changes)):
        falls.append(fall)
        serious = True
    if not falls:
        return None
    on = f"on {changes['reward'].prompts} prompts" if "reward" in changes else "held out"
    seen = f"since {since}, held out, {on}, {'; '.join(falls)}"
    gained = after.mean() > before.mean()
    gain, place, name, entry = max(gains, key=lambda each: each[0])
    if gained and gain > 0:
        seen += f", while `{name}` made the total rise"
        fix = less_weight(history, place, name, entry)
    else:
        fix = _go_back(history)
    # What shapes answers may give way to a total that rises.
    return Issue(seen, fix, level="warning" if serious or not gained else "note")


def _describe_fall(
    name: str, metric: str, before: Answers, after: Answers, changes: Mapping[str, Metric]
) -> str | None:
    """Return the fall of a reward in words; None unless it is beyond its noise."""
    then, now, change = before.mean(metric), after.mean(metric), changes.get(metric)
    if change is None or change.direction >= 0:
        return None
    if then - now <= _LEAST_LOSS * max(abs(then), abs(now)):
        return None
    # If all fell by as much, there is no doubt, and no interval.
    low, high = (now - then if end is None else end for end in (change.low, change.high))
    interval = f"95% interval of the change {low:.3g} to {high:.3g}"
    return f"`{name}` fell from {then:.3g} to {now:.3g} ({interval})"


def _go_back(history: History) -> str:
    warmed, after = history.answers_warmed, history.answers_after
    if warmed and after and warmed.mean() <= after.mean():
        return "a shorter warm-up (`warmup.max_steps`) or a lower `warmup.learning_rate`: it was lost there"
    last = max((step for step, _ in history.points("reward")), default=0)
    earlier = [step for step in history.checkpoints or () if step < last]
    # The best checkpoint is what was measured.
    if not earlier or history.recipe.loads_best:
        return f"{slower(history)}, or fewer steps"
    command = on_run(history, "eval", f"--checkpoint {min(earlier)}")
    return f"{slower(history)}, or an earlier checkpoint: {command} measures it"
