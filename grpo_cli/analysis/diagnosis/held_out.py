"""Rules on what the model says to held-out prompts after training, beside what it said before."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from grpo_cli.analysis.diagnosis.answers import Answers
from grpo_cli.analysis.diagnosis.fixes import on_run, slower, try_rewards
from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.analysis.diagnosis.rewards import JUDGES, MAY_JUDGE, propose_less
from grpo_cli.analysis.diagnosis.rule import Rule, RuleHit, sampled_only
from grpo_cli.analysis.diagnosis.trends import NEAR, most_reward
from grpo_cli.analysis.estimates import ALL_EQUAL, FEWEST_CLUSTERS, difference_interval
from grpo_cli.recipe.rewards import RewardConfig

_ANSWERS = ("eval/before.jsonl", "eval/after.jsonl")
FEWEST_PROMPTS = 5
ALIKE, APART = 0.9, 0.5
"""Shares of the commonest answer: from where on a model says one thing only, and up to where it did not."""
LEAST_LOSS = 0.1
"""Of the size of a reward."""
_SHOWN = 30
"""Characters of an answer."""


@dataclass(frozen=True)
class _Fall:
    """A reward that held-out answers get less of than before."""

    name: str
    before: float
    now: float
    low: float
    high: float
    """95 % interval of the change."""
    matters: bool
    """Whether it may tell right answers from wrong ones, or is the total."""

    def __str__(self) -> str:
        interval = f"95% interval of the change {self.low:.3g} to {self.high:.3g}"
        return f"`{self.name}` fell from {self.before:.3g} to {self.now:.3g} ({interval})"


def _look_for_collapse(history: History) -> RuleHit | None:
    before, after = history.said_before, history.said_after
    if before is None or after is None or min(before.prompts, after.prompts) < FEWEST_PROMPTS:
        return None
    if after.share < ALIKE or before.share > APART or _is_right(history, after):
        return None
    text = after.commonest
    shown = f"{text[:_SHOWN]}…" if len(text) > _SHOWN else text
    told = f"are {shown!r}" if text else "are empty"
    seen = (
        f"{after.share:.0%} of the held-out answers to {after.prompts} prompts {told} (below {ALIKE:.0%}); "
        f"before training {before.share:.0%} were the same"
    )
    if _mean(after.totals) > _mean(before.totals):
        fix = (
            "the reward went up by it, so it must ask for what one answer to everything cannot give; "
            f"{try_rewards(history)} shows what it pays for"
        )
    else:
        fix = f"{slower(history.recipe)}, {_go_back(history)}"
    return RuleHit("warning", seen, fix)


def _is_right(history: History, after: Answers) -> bool:
    """Whether answers are alike because the right ones are."""
    shares = history.after.get("accuracy")
    known = shares.values() if isinstance(shares, Mapping) else ()
    if any(isinstance(share, int | float) and share >= 1 - NEAR for share in known):
        return True
    most = most_reward(history.recipe)
    weights = sum(abs(entry.weight) for entry in history.recipe.rewards)
    return most is not None and bool(after.totals) and _mean(after.totals) >= most - NEAR * weights


def _look_for_loss(history: History) -> RuleHit | None:
    before, after = history.said_before, history.said_after
    if before is None or after is None:
        return None
    falls = list(_find_falls(history, before, after))
    if not falls:
        return None
    rows = before.totals.keys() & after.totals.keys()
    gained = _mean(after.totals) > _mean(before.totals)
    seen = f"held out, on {len(rows)} prompts, {'; '.join(map(str, falls))}"
    paid = _find_gain(history, before, after) if gained else None
    if paid is None:
        fix = f"{slower(history.recipe)}, {_go_back(history)}"
    else:
        seen += f", while `{paid[1]}` made the total rise"
        fix = propose_less(*paid)
    # What shapes answers may give way to a total that rises.
    serious = not gained or any(each.matters for each in falls)
    return RuleHit("warning" if serious else "note", seen, fix)


def _find_falls(history: History, before: Answers, after: Answers) -> Iterator[_Fall]:
    for _, name, entry in _rewards(history, after):
        matters = entry.kind in JUDGES | MAY_JUDGE
        # A weight of 0 only watches, and of a negative one less is better.
        wanted = entry.weight > 0 or (entry.weight == 0 and entry.kind in JUDGES)
        if wanted and name in before.scores:
            found = _compare(name, before.scores[name], after.scores[name], matters)
            if found is not None:
                yield found
    if len(after.scores) > 1:
        found = _compare("reward", before.totals, after.totals, True)
        if found is not None:
            yield found


def _compare(
    name: str, before: Mapping[int, float], after: Mapping[int, float], matters: bool
) -> _Fall | None:
    """The fall of one reward, where it is beyond its noise."""
    rows = sorted(before.keys() & after.keys())
    if len(rows) < FEWEST_CLUSTERS:
        return None
    first, second = [before[row] for row in rows], [after[row] for row in rows]
    then, now = fmean(first), fmean(second)
    if then - now <= LEAST_LOSS * max(abs(then), abs(now)):
        return None
    found = difference_interval(first, second)
    # All fell by as much: there is nothing to doubt, and no interval.
    low, high = (now - then,) * 2 if found.reason == ALL_EQUAL else (found.low, found.high)
    if low is None or high is None or high >= 0:
        return None
    return _Fall(name, then, now, low, high, matters)


def _find_gain(
    history: History, before: Answers, after: Answers
) -> tuple[int, str, RewardConfig] | None:
    """The reward that brought the total most of its rise."""
    gains = [
        (entry.weight * (_mean(after.scores[name]) - _mean(before.scores[name])), place)
        for place, name, entry in _rewards(history, after)
        if name in before.scores
    ]
    gain, best = max(gains, default=(0.0, 0))
    rewards = {place: (place, name, entry) for place, name, entry in _rewards(history, after)}
    return rewards[best] if gain > 0 else None


def _rewards(history: History, after: Answers) -> Iterator[tuple[int, str, RewardConfig]]:
    """Each reward's place in the recipe, its name and its entry; nothing where they are another recipe's."""
    if len(after.scores) == len(history.recipe.rewards):
        for place, (name, entry) in enumerate(
            zip(after.scores, history.recipe.rewards, strict=True)
        ):
            yield place, name, entry


def _go_back(history: History) -> str:
    if not history.checkpoints:
        return "or fewer steps"
    first = min(history.checkpoints)
    return (
        f"or an earlier checkpoint: {on_run(history, 'eval', f'--checkpoint {first}')} measures it"
    )


def _mean(values: Mapping[int, float]) -> float:
    return fmean(values.values()) if values else 0.0


def _find_lack(history: History) -> str | None:
    both = history.said_before is not None and history.said_after is not None
    return None if both else "held-out answers of before and after are not there"


RULES = (
    Rule(
        "held_out_collapse",
        "one answer to every held-out prompt",
        _ANSWERS,
        0,
        0,
        f"{ALIKE:.0%} of the answers to {FEWEST_PROMPTS} prompts or more are the same text or empty, at most "
        f"{APART:.0%} were before, and they are not right",
        "ours: different prompts have different answers, unless nearly all of them are right",
        "A model that says the same to everything has unlearned its task, whatever the reward says.",
        _look_for_collapse,
        sampled_only,
        _find_lack,
    ),
    Rule(
        "held_out_loss",
        "held-out answers got worse",
        _ANSWERS,
        0,
        0,
        f"a reward fell by {LEAST_LOSS:.0%}, and by its paired 95% interval; from {FEWEST_CLUSTERS} prompts on",
        "ours: prompts are compared with themselves, as in every measurement; a smaller fall is how two "
        "measurements differ",
        "What training was for, or what the model could do before, is lost on prompts it has not seen.",
        _look_for_loss,
        sampled_only,
        _find_lack,
    ),
)
