"""Rules on the rewards beside each other: whose word counts, and whether they pull apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import fmean, median

from grpo_cli.analysis.diagnosis.fixes import overlapped, try_rewards
from grpo_cli.analysis.diagnosis.history import History, Point
from grpo_cli.analysis.diagnosis.rule import Rule, RuleHit
from grpo_cli.analysis.diagnosis.trends import NOW, Change, compare, is_bounded, top_score
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig

JUDGES = frozenset({"math", "exact", "choice", "contains", "code", "reasoning_gym"})
"""Kinds that tell right answers from wrong ones."""
MAY_JUDGE = frozenset({"python", "model", "judge"})
"""Kinds that may."""
MOST_SHARE, SCALE, UNIT = 0.9, 10.0, 1.5
"""Of the spread of the total; how many times another's scores; how large scores from 0 to 1 get."""
LEAST_FALL, LEAST_RISE = 0.2, 0.1
"""Of a reward's best, and of the size of its scores."""
CONSTANT, _FLAT = 20, 1e-6
"""Records in which a reward must say nothing; below what two scores are the same."""
ABSENT = 10
"""Records in which a reward must not be there."""
SLOW = 0.5
"""Share of a step's time."""


@dataclass(frozen=True, order=True)
class _Voice:
    """What one reward has to say in the total."""

    spread: float
    """Weighted."""
    size: float
    """Of its scores, before its weight."""
    place: int
    name: str
    weight: float


def _voices(history: History) -> Iterator[_Voice]:
    for place, name, entry in history.rewards():
        spreads, levels = (history.last(f"rewards/{name}/{what}", 10) for what in ("std", "mean"))
        if entry.weight and spreads and levels and fmean(spreads) > 0:
            # One that is hardly ever given has small scores today and large ones later.
            size = max(fmean(spreads) + abs(fmean(levels)), 1.0 if is_bounded(entry) else 0.0)
            yield _Voice(abs(entry.weight) * fmean(spreads), size, place, name, entry.weight)


def _look_for_swamping(history: History) -> RuleHit | None:
    voices = sorted(_voices(history), reverse=True)
    if len(voices) < 2:
        return None
    loud, other = voices[0], max(voices[1:], key=lambda each: each.size)
    share = loud.spread / sum(each.spread for each in voices)
    times = loud.size / other.size
    if share <= MOST_SHARE or times <= SCALE or loud.size <= UNIT:
        return None
    seen = (
        f"`{loud.name}` makes {share:.0%} of the spread of the total (at most {MOST_SHARE:.0%}): its "
        f"scores are {times:.0f} times as large as those of `{other.name}`"
    )
    fix = f"`rewards.{loud.place}.weight: {loud.weight / times:.2g}` (it is {loud.weight:g})"
    return RuleHit("warning", seen, fix)


def _look_for_parting(history: History) -> RuleHit | None:
    rewards = [each for each in history.rewards() if each[2].weight > 0]
    kinds = {entry.kind for _, _, entry in rewards}
    judging = JUDGES if kinds & JUDGES else MAY_JUDGE
    for (_, answer, entry), (place, other, other_entry) in permutations(rewards, 2):
        if entry.kind in judging and other_entry.kind not in JUDGES:
            found = _compare_since_peak(history, answer, other)
            if found is not None:
                fall, rise = found
                seen = (
                    f"`{answer}` fell from its best {fall.before:.3g} to {fall.now:.3g} (by more than "
                    f"{LEAST_FALL:.0%}), while `{other}` rose from {rise.before:.3g} to {rise.now:.3g}"
                )
                return RuleHit("error", seen, propose_less(place, other, other_entry))
    return None


def propose_less(place: int, name: str, entry: RewardConfig) -> str:
    """The fix where a reward is paid at the cost of what matters."""
    return (
        f"`rewards.{place}.weight: {entry.weight / 5:.2g}` (it is {entry.weight:g}), or narrow `{name}` to "
        "what only right answers have; read the best completions in `completions/`"
    )


def _compare_since_peak(history: History, answer: str, other: str) -> tuple[Change, Change] | None:
    """How two rewards have changed since the first was best, where it fell and the other rose."""
    metric, beside = f"rewards/{answer}/mean", f"rewards/{other}/mean"
    peak = history.peak(metric)
    if peak is None:
        return None
    fall = compare(peak.values, history.last(metric, NOW))
    rise = compare(history.up_to(beside, peak.step, NOW), history.last(beside, NOW))
    if fall is None or rise is None:
        return None
    fell = fall.reversed().exceeds(LEAST_FALL * abs(peak.mean))
    rose = rise.exceeds(LEAST_RISE * max(abs(rise.before), abs(rise.now)))
    return (fall, rise) if fell and rose else None


def _look_for_constancy(history: History) -> RuleHit | None:
    for place, name, entry in history.rewards():
        points = history.series.get(f"rewards/{name}/std", [])
        means = history.last(f"rewards/{name}/mean", CONSTANT)
        spreads = history.last(f"rewards/{name}/std", CONSTANT)
        if not entry.weight or min(len(means), len(spreads)) < CONSTANT:
            continue
        if max(spreads) > _FLAT or max(means) - min(means) > _FLAT:
            continue
        top, value = top_score(entry), means[-1]
        at_top = top is not None and value >= top - _FLAT
        varied = any(spread is not None and spread > _FLAT for _, spread in points)
        if at_top and (top == 0 or varied):
            # A penalty that nothing deserves, or a form that was learned, is as it should be.
            continue
        seen = (
            f"`{name}` gave every completion of the last {CONSTANT} records the same score, {value:.3g} "
            "(at least two different ones)"
        )
        fix = (
            f"{try_rewards(history)} shows what `{name}` gives to answers of several kinds; "
            f"correct it, or take `rewards.{place}` away"
        )
        return RuleHit("note" if at_top else "warning", seen, fix)
    return None


def _look_for_absence(history: History) -> RuleHit | None:
    absent = [
        (place, name)
        for place, name, _ in history.rewards()
        if not history.last(f"rewards/{name}/mean", ABSENT)
        and history.count(f"rewards/{name}/mean") >= ABSENT
    ]
    if not absent:
        return None
    place, name = absent[0]
    seen = f"`{name}` gave no score to any completion of the last {ABSENT} records"
    fix = (
        f"{try_rewards(history)} shows what `{name}` gives; correct it, the columns that it reads, or the "
        f"`rewards.{place}.when` that keeps it out"
    )
    if len(absent) == len(history.recipe.rewards):
        others = ", nor did any other reward" if len(absent) > 1 else ""
        return RuleHit("error", f"{seen}{others}: nothing is learned", fix)
    return RuleHit("warning", seen, fix)


def _look_for_slowness(history: History) -> RuleHit | None:
    steps = history.series.get("step_time", [])[-10:]
    seconds = _usual_sum(steps)
    spent = {
        (name, place): _usual_sum(
            [
                point
                for point in history.series.get(f"rewards/{name}/seconds", [])[-10:]
                if point[0] >= steps[0][0]
            ]
        )
        for place, name, _ in history.rewards()
    }
    (name, place), most = max(spent.items(), key=lambda each: each[1], default=(("", 0), 0.0))
    # What a reward takes beside something else costs nothing.
    waited = history.series.get("time/scoring", [])[-10:]
    most = min(most, _usual_sum(waited)) if waited else most
    if seconds <= 0 or most / seconds <= SLOW:
        return None
    entry = history.recipe.rewards[place]
    seen = (
        f"scoring with `{name}` took {most / seconds:.0%} of the time of the last 10 records "
        f"(at most {SLOW:.0%}), {most / len(steps):.2g} s a step"
    )
    path = f"rewards.{place}"
    if (beside := overlapped(history.recipe, place)) is not None:
        return RuleHit(
            "note",
            seen,
            f"{beside}, which scores one part of a batch while the next is sampled; or `{path}.when`, so that "
            "it scores the rows that need it alone",
        )
    if entry.timeout_s is None:
        return RuleHit(
            "note",
            seen,
            f"`{path}.timeout_s: 10`: completions are then scored one by one in a pool of processes, several at "
            "a time; or a faster reward",
        )
    return RuleHit("note", seen, f"`{path}.when`, so that it scores the rows that need it alone")


def _usual_sum(points: Sequence[Point]) -> float:
    """The sum of some times if all were usual: the first ones start processes, load models and compile."""
    known = [value for _, value in points if value is not None]
    return median(known) * len(known) if known else 0.0


def _is_single(recipe: Recipe) -> str | None:
    return "there is one reward" if len(recipe.rewards) < 2 else None


def _is_normalized(recipe: Recipe) -> str | None:
    if recipe.training.extras.get("multi_objective_aggregation") == "normalize_then_sum":
        return "`multi_objective_aggregation: normalize_then_sum` gives rewards one scale"
    return _is_single(recipe)


def _has_none(recipe: Recipe) -> str | None:
    return None if recipe.rewards else "scored data brings its rewards along"


RULES = (
    Rule(
        "rewards_apart",
        "one reward rises at the cost of the answer's",
        ("rewards/NAME/mean",),
        10,
        30,
        f"the answer's fell by {LEAST_FALL:.0%} of its best and another rose by {LEAST_RISE:.0%}, "
        "each by 4 standard errors",
        "ours: the pattern is that of github.com/huggingface/open-r1/issues/255; the numbers keep noise out",
        "The model is paid for form and gives up on being right: the reward is being gamed.",
        _look_for_parting,
        _is_single,
    ),
    Rule(
        "reward_swamped",
        "one reward drowns the others",
        ("rewards/NAME/std",),
        10,
        10,
        f"above {MOST_SHARE:.0%} of the weighted spread, with scores beyond 0 to 1 and {SCALE:g} times another's",
        "ours: scales that far apart undo any weights; a weight that is small on purpose is no fault",
        "Advantages follow the spread of the total, so the smaller rewards are not heard.",
        _look_for_swamping,
        _is_normalized,
    ),
    Rule(
        "constant_reward",
        "one of the rewards says nothing",
        ("rewards/NAME/mean", "rewards/NAME/std"),
        CONSTANT,
        CONSTANT,
        "the same score for every completion; a note where it is its highest from the start",
        "by definition: such a reward adds the same to all; the records are ours",
        "A reward that gives every answer the same has no part in what is learned.",
        _look_for_constancy,
        _is_single,
    ),
    Rule(
        "absent_reward",
        "a reward gives no scores",
        ("rewards/NAME/mean",),
        ABSENT,
        ABSENT,
        "no score at all; an error where no other reward gives one",
        "by definition: TRL leaves a reward that is None out of the sum; the records are ours",
        "The reward says of each completion that it does not apply.",
        _look_for_absence,
        _has_none,
    ),
    Rule(
        "slow_reward",
        "scoring takes most of the time",
        ("rewards/NAME/seconds", "step_time"),
        10,
        10,
        f"above {SLOW:.0%} of the time of a step",
        "ours: from half on, a faster reward saves more than anything else can",
        "The devices wait while completions are scored.",
        _look_for_slowness,
        _has_none,
    ),
)
