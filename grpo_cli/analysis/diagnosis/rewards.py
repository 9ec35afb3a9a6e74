"""Rules on the rewards beside each other: whether each has a say, and whether they pull apart."""

from math import isinf

from grpo_cli.analysis.diagnosis.history import (
    History,
    change_between,
    judges,
    score_bounds,
)
from grpo_cli.analysis.diagnosis.rule import Rule, try_rewards
from grpo_cli.issues import Issue
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig

MAY_JUDGE = frozenset({"python", "model", "judge"})
"""Kinds that may tell right answers from wrong ones."""
_MOST_SHARE, _SCALE, _UNIT = 0.9, 10.0, 1.5
"""Of the spread of the total; how many times another's scores; how large scores from 0 to 1 get."""
_LEAST_FALL, _LEAST_RISE = 0.2, 0.1
"""Of a reward's best, and of the size of its scores."""
_CONSTANT, _FLAT = 20, 1e-6
"""Records in which a reward must be constant; scores closer than that are the same."""
_ABSENT = 10
"""Records in which a reward must give no score."""
_MOST_FAILED, _NEARLY_ALL = 0.05, 0.5
"""Shares of the completions that a reward fails on."""
_SLOW = 0.5
"""Share of a step's time."""


def _single(recipe: Recipe) -> str | None:
    return "there is one reward" if len(recipe.rewards) < 2 else None


def _normalized(recipe: Recipe) -> str | None:
    if recipe.setting("multi_objective_aggregation") == "normalize_then_sum":
        return "`multi_objective_aggregation: normalize_then_sum` gives rewards one scale"
    return _single(recipe)


def _scored_data(recipe: Recipe) -> str | None:
    why = "scored data contains its rewards" if recipe.teacher is None else "there are no rewards"
    return None if recipe.rewards else why


@Rule(
    "one reward rises at the cost of right answers",
    ("rewards/NAME/mean",),
    min_records=30,
    threshold=f"the answer's fell by {_LEAST_FALL:.0%} of its best and another rose by {_LEAST_RISE:.0%}, "
    "each by 4 standard errors",
    source="ours: the pattern is from github.com/huggingface/open-r1/issues/255; the numbers exclude noise",
    skip_reason=_single,
)
def rewards_apart(history: History) -> Issue | None:
    """The model is rewarded for form and stops being right: the reward is being gamed."""
    rewards = [each for each in history.rewards() if each[2].weight > 0]
    judging = {entry.kind for _, _, entry in rewards if judges(entry)} or MAY_JUDGE
    for _, answer, entry in rewards:
        peak = history.peak(f"rewards/{answer}/mean") if entry.kind in judging else None
        fall = change_between(peak.values, history.last(f"rewards/{answer}/mean")) if peak else None
        if peak is None or fall is None or not fall.falls(_LEAST_FALL * abs(fall.before)):
            continue
        for place, other, other_entry in rewards:
            beside = f"rewards/{other}/mean"
            rise = change_between(history.up_to(beside, peak.step, 10), history.last(beside))
            if other == answer or judges(other_entry) or rise is None:
                continue
            if rise.rises(_LEAST_RISE * max(abs(rise.before), abs(rise.now))):
                seen = (
                    f"`{answer}` fell from its best {fall.before:.3g} to {fall.now:.3g} (by more than "
                    f"{_LEAST_FALL:.0%}), while `{other}` rose from {rise.before:.3g} to {rise.now:.3g}"
                )
                return Issue(seen, less_weight(history, place, other, other_entry))
    return None


def less_weight(history: History, place: int, name: str, entry: RewardConfig) -> str:
    """Return the fix for a reward that rises at the cost of what matters."""
    edit = f"a lower weight of `{name}`"
    if history.advice.is_own:
        edit = f"`rewards.{place}.weight: {entry.weight / 5:.2g}` (it is {entry.weight:g})"
    return f"{edit}, or narrow `{name}` to what only right answers have; {history.advice.read_best}"


@Rule(
    "one reward dominates the others",
    ("rewards/NAME/std",),
    threshold=f"above {_MOST_SHARE:.0%} of the weighted spread, with scores beyond 0 to 1 and {_SCALE:g} times "
    "another's",
    source="ours: such different scales override the weights; a weight that is small on purpose is not a problem",
    skip_reason=_normalized,
)
def reward_swamped(history: History) -> Issue | None:
    """Advantages follow the spread of the total, so the smaller rewards have no effect."""
    voices = []
    for place, name, entry in history.rewards():
        spread, level = (history.mean(f"rewards/{name}/{what}") for what in ("std", "mean"))
        if entry.weight and spread and level is not None:
            bounded = max(map(abs, score_bounds(entry))) <= 1
            # A reward that is rarely given has small scores today and large ones later.
            size = max(spread + abs(level), 1.0 if bounded else 0.0)
            voices.append((abs(entry.weight) * spread, size, place, name, entry.weight))
    if len(voices) < 2:
        return None
    (loud, size, place, name, weight), *others = sorted(voices, reverse=True)
    _, other_size, _, other, _ = max(others, key=lambda each: each[1])
    share, times = loud / sum(each[0] for each in voices), size / other_size
    if share <= _MOST_SHARE or times <= _SCALE or size <= _UNIT:
        return None
    seen = (
        f"`{name}` makes {share:.0%} of the spread of the total (at most {_MOST_SHARE:.0%}): its "
        f"scores are {times:.0f} times as large as those of `{other}`"
    )
    fix = f"`rewards.{place}.weight: {weight / times:.2g}` (it is {weight:g})"
    if not history.advice.is_own:
        fix = f"divide the weight of `{name}` by {times:.0f}"
    return Issue(seen, fix, level="warning")


@Rule(
    "a reward gives every answer the same score",
    ("rewards/NAME/mean", "rewards/NAME/std"),
    window=_CONSTANT,
    min_records=_CONSTANT,
    threshold="the same score for every completion; a note if it is its highest from the start",
    source="by definition: such a reward adds the same to every completion; the number of records is ours",
    skip_reason=_single,
)
def constant_reward(history: History) -> Issue | None:
    """A reward that gives every answer the same has no part in what is learned."""
    for place, name, entry in history.rewards():
        means = history.last(f"rewards/{name}/mean", _CONSTANT)
        spreads = history.last(f"rewards/{name}/std", _CONSTANT)
        if not entry.weight or min(len(means), len(spreads)) < _CONSTANT:
            continue
        if max(spreads) > _FLAT or max(means) - min(means) > _FLAT:
            continue
        top, value = score_bounds(entry)[1], means[-1]
        # Of one that is not known, the best it has been.
        best = max(history.metrics.values(f"rewards/{name}/mean")) if isinf(top) else top
        at_top = value >= top - _FLAT
        varied = any(std and std > _FLAT for _, std in history.points(f"rewards/{name}/std"))
        if (at_top and top == 0) or (value >= best - _FLAT and varied):
            # A penalty that nothing deserves, or a form that was learned, is as it should be.
            continue
        seen = (
            f"`{name}` gave every completion of the last {_CONSTANT} records the same score, {value:.3g} "
            "(at least two different ones)"
        )
        fix = (
            f"{try_rewards(history)} shows what `{name}` gives to answers of several kinds; "
            f"correct it, or remove {f'`rewards.{place}`' if history.advice.is_own else 'it'}"
        )
        return Issue(seen, fix, level="note" if at_top else "warning")
    return None


@Rule(
    "a reward gives no scores",
    ("rewards/NAME/mean",),
    threshold="no score at all; an error if no other reward gives one",
    source="by definition: TRL leaves a reward that is None out of the sum; the number of records is ours",
    skip_reason=_scored_data,
)
def absent_reward(history: History) -> Issue | None:
    """A reward that applies to no completion has no part in what is learned."""
    absent = [
        (place, name)
        for place, name, _ in history.rewards()
        if history.count(metric := f"rewards/{name}/mean") >= _ABSENT
        and not history.last(metric, _ABSENT)
    ]
    if not absent:
        return None
    place, name = absent[0]
    seen = f"`{name}` gave no score to any completion of the last {_ABSENT} records"
    fix = (
        f"{try_rewards(history)} shows what `{name}` gives; correct it, the columns that it reads"
        + (f", or the `rewards.{place}.when` that excludes these rows" * history.advice.is_own)
    )
    if len(absent) < len(history.recipe.rewards):
        return Issue(seen, fix, level="warning")
    others = ", nor did any other reward" if len(absent) > 1 else ""
    return Issue(f"{seen}{others}: nothing is learned", fix)


@Rule(
    "a reward fails",
    ("rewards/NAME/error_share",),
    threshold=f"a mean above {_MOST_FAILED:.0%} of the completions; an error above {_NEARLY_ALL:.0%}",
    source="ours: a few hostile answers make a reward fail; more is a fault of the reward or its limit",
    skip_reason=_scored_data,
)
def reward_failures(history: History) -> Issue | None:
    """A completion whose scoring fails gets a score that says nothing about it."""
    shares = [
        (history.mean(f"rewards/{name}/error_share") or 0.0, place, name, entry)
        for place, name, entry in history.rewards()
    ]
    share, place, name, entry = max(shares, key=lambda each: each[0], default=(0.0, 0, "", None))
    if entry is None or share <= _MOST_FAILED:
        return None
    seen = (
        f"`{name}` failed on {share:.0%} of the completions of the last 10 records "
        f"(at most {_MOST_FAILED:.0%})"
    )
    if name in history.failed:
        count, reason = history.failed[name]
        seen += f", on {count:,} so far; the first: {reason}"
    fix = (
        f"{try_rewards(history)} shows what `{name}` gives; correct it, or give it more time with "
        f"`rewards.{place}.timeout_s`"
    )
    return Issue(seen, fix, level="error" if share > _NEARLY_ALL else "warning")


@Rule(
    "scoring takes most of the time",
    ("rewards/NAME/seconds", "step_time"),
    threshold=f"above {_SLOW:.0%} of the time of a step",
    source="ours: above half, a faster reward saves more than any other change",
    skip_reason=_scored_data,
)
def slow_reward(history: History) -> Issue | None:
    """The devices wait while completions are scored."""
    metrics = history.metrics
    # The first records of the run and of its newest attempt: they start processes, load models and compile.
    first = {each["step"] for at in (0, metrics.attempt) for each in metrics.steps[at : at + 1]}
    steps = [step for step, _ in history.points("step_time")[-12:] if step not in first][-10:]

    def add_up(metric: str) -> float:
        points = history.points(metric)[-12:]
        return sum(value or 0.0 for step, value in points if step in steps)

    spent = [
        (add_up(f"rewards/{name}/seconds"), name, place) for place, name, _ in history.rewards()
    ]
    most, name, place = max(spent, default=(0.0, "", 0))
    # Seconds of rewards are those of a batch, which may last several steps, and what a reward takes while
    # something else is done costs nothing: `time/scoring` is what a step waits.
    if most and history.count("time/scoring"):
        most *= add_up("time/scoring") / sum(seconds for seconds, *_ in spent)
    total = add_up("step_time")
    if total <= 0 or most <= _SLOW * total:
        return None
    seen = (
        f"scoring with `{name}` took {most / total:.0%} of the time of the last 10 records "
        f"(at most {_SLOW:.0%}), {most / len(steps):.2g} s a step"
    )
    return Issue(seen, _speed_up(history.recipe, place), level="note")


def _speed_up(recipe: Recipe, place: int) -> str:
    entry, parts = recipe.rewards[place], recipe.generation.sampling_parts
    if entry.kind in ("judge", "code") or entry.timeout_s is not None:
        # These wait for something outside of the trainer's process.
        return (
            f"`generation.sampling_parts: {2 * parts}`, which scores one part of a batch while the next is "
            f"sampled; or `rewards.{place}.when`, so that it scores only the rows that need it"
        )
    return (
        f"`rewards.{place}.timeout_s: 10`: completions are then scored one by one in a pool of processes, "
        "several at a time; or a faster reward"
    )
