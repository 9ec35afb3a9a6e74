"""Rules on how long completions are."""

from statistics import fmean

from grpo_cli.analysis.diagnosis.fixes import slower
from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.analysis.diagnosis.rewards import JUDGES
from grpo_cli.analysis.diagnosis.rule import AXOLOTL, PROBE, Rule, RuleHit, sampled_only
from grpo_cli.analysis.diagnosis.trends import LIKELY, change_of, has_risen

_CLIPPED, _LENGTH = "completions/clipped_ratio", "completions/mean_length"
MANY_CLIPPED, MOST_CLIPPED = 0.5, 0.8
"""Shares of completions that are cut off."""
_FALLING = 0.05
"""A share that falls by so much from one half of the window to the other mends itself."""
GROWTH, NEAR_LIMIT = 2.0, 0.8
SHRINKAGE = 0.25
_BEGUN = 3
"""Records that the first length is the mean of: a length that is paid for changes within ten steps."""


def _look_for_truncation(history: History) -> RuleHit | None:
    shares = history.last(_CLIPPED, 10)
    if not shares or fmean(shares) <= MANY_CLIPPED:
        return None
    half = len(shares) // 2
    if half and fmean(shares[half:]) < fmean(shares[:half]) - _FALLING:
        return None
    limit = history.recipe.generation.max_completion_length
    masked = history.recipe.training.extras.get("mask_truncated_completions")
    left_out = "; they take no part in the loss (mask_truncated_completions)" if masked else ""
    # What judges no answers may well score a completion without its end.
    judged = bool(JUDGES & {entry.kind for entry in history.recipe.rewards})
    severe = judged and fmean(shares) > MOST_CLIPPED
    most = (
        f"{MANY_CLIPPED:.0%}; above {MOST_CLIPPED:.0%} an error"
        if severe
        else f"{MANY_CLIPPED:.0%}"
    )
    seen = (
        f"{fmean(shares):.0%} of the completions of the last 10 records were cut off at {limit} tokens "
        f"(at most {most}), and no fewer towards the end{left_out}"
    )
    fix = f"`generation.max_completion_length: {2 * limit}`, or a prompt that asks for shorter answers"
    if has_risen(history, LIKELY):
        return RuleHit("note", f"{seen}; the reward rises all the same", fix)
    return RuleHit("error" if severe else "warning", seen, fix)


def _look_for_explosion(history: History) -> RuleHit | None:
    limit = history.recipe.generation.max_completion_length
    change = change_of(history, _LENGTH, _BEGUN)
    if change is None or change.now < max(GROWTH * change.before, NEAR_LIMIT * limit):
        return None
    seen = (
        f"completions grew from {change.before:.0f} to {change.now:.0f} of {limit} tokens "
        f"(at most {GROWTH:g} times, or {NEAR_LIMIT:.0%} of the limit)"
    )
    kinds = {entry.kind for entry in history.recipe.rewards}
    fix = "a reward that pays for length must go"
    if "soft_overlong" not in kinds:
        fix = f"`rewards: [..., {{kind: soft_overlong}}]`, or {fix}"
    return RuleHit("warning", seen, fix)


def _look_for_collapse(history: History) -> RuleHit | None:
    length, reward = change_of(history, _LENGTH, _BEGUN), change_of(history, "reward", 10)
    if length is None or reward is None or length.now > SHRINKAGE * length.before:
        return None
    if reward.difference > 0:
        return None
    seen = (
        f"completions shrank from {length.before:.0f} to {length.now:.0f} tokens (at least "
        f"{SHRINKAGE:.0%}), and the reward went from {reward.before:.3g} to {reward.now:.3g}"
    )
    fix = f"{slower(history.recipe)}; look in `completions/` at what is paid for brevity"
    return RuleHit("warning", seen, fix)


RULES = (
    Rule(
        "truncation",
        "completions are cut off",
        (_CLIPPED,),
        10,
        10,
        f"a mean above {MANY_CLIPPED} that does not fall (an error above {MOST_CLIPPED} where a reward judges "
        "answers); a note where the reward rises",
        f"{MANY_CLIPPED} is {PROBE}; {MOST_CLIPPED}: {AXOLOTL}",
        "What stands behind the cut is never scored, and an answer most often stands at the end.",
        _look_for_truncation,
        sampled_only,
    ),
    Rule(
        "length_explosion",
        "completions grow to the limit",
        (_LENGTH,),
        10,
        20,
        f"{GROWTH:g} times the first {_BEGUN} records, and above {NEAR_LIMIT:g} of max_completion_length",
        f"growth to the limit: {AXOLOTL}; the two numbers are ours: longer reasoning below the limit is no fault",
        "Length that grows up to the limit is rewarded by itself, on purpose or not.",
        _look_for_explosion,
        sampled_only,
    ),
    Rule(
        "length_collapse",
        "completions shrink to nothing",
        (_LENGTH, "reward"),
        10,
        20,
        f"below {SHRINKAGE:g} of the first {_BEGUN} records, with a reward that has not risen",
        "ours: answers that get short and better are what many rewards want; short and no better is a loss",
        "The model stops early and gains nothing by it: it gives up answering.",
        _look_for_collapse,
        sampled_only,
    ),
)
