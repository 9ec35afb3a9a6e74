"""Rules on the sources of a mixture: whether each teaches something, and whether one is unlearned."""

from grpo_cli.analysis.diagnosis.history import NOW, History, near_best, rewards_of
from grpo_cli.analysis.diagnosis.rule import rewarded_only, rule
from grpo_cli.issues import Issue
from grpo_cli.recipe.recipe import Recipe

_REWARD, _SILENT = "sources/NAME/reward", "sources/NAME/frac_reward_zero_std"
_STARVED, _FED = 0.95, 0.8
"""Shares of groups without signal."""
_LEAST_FALL = 0.1
"""Of the reward that a source began with."""


def _mixed(recipe: Recipe) -> str | None:
    alone = None if len(recipe.dataset.shares) > 1 else "there is one source of prompts"
    return rewarded_only(recipe) or alone


def _place(recipe: Recipe, source: str) -> str:
    return f"dataset.sources.{list(recipe.dataset.shares).index(source)}"


@rule(
    "a source has no signal while others have",
    (_SILENT, _REWARD),
    min_records=20,
    threshold=f"a mean above {_STARVED} for a source, and below {_FED} for another; a note if its reward is near "
    "its highest",
    source="ours: the threshold of no_signal for what others must have; a source of its own is small, and noisier",
    skip=_mixed,
)
def source_starves(history: History) -> Issue | None:
    """A source whose groups all score the same takes its share of the prompts and teaches nothing."""
    recipe = history.recipe
    shares = {
        source: share
        for source in recipe.dataset.shares
        if len(history.last(_SILENT.replace("NAME", source), NOW)) == NOW
        and (share := history.mean(_SILENT.replace("NAME", source))) is not None
    }
    starved = [source for source in shares if shares[source] > _STARVED]
    if not starved or min(shares.values()) >= _FED:
        return None
    source = max(starved, key=lambda each: shares[each])
    reward = history.mean(_REWARD.replace("NAME", source)) or 0.0
    seen = (
        f"{shares[source]:.0%} of the groups of `{source}` in its last {NOW} records had no two different rewards "
        f"(at most {_STARVED:.0%}; the least of a source is {min(shares.values()):.0%}), with a mean reward of "
        f"{reward:.3g}"
    )
    place = _place(recipe, source)
    if reward >= near_best(rewards_of(recipe, source)):
        return Issue(seen, f"a lower `{place}.ratio`: it is solved; or harder rows", level="note")
    fix = f"easier rows, a reward that tells its answers apart, or a lower `{place}.ratio`"
    return Issue(seen, fix, level="warning")


@rule(
    "a source is unlearned while the whole improves",
    (_REWARD, "reward"),
    min_records=20,
    threshold=f"a source's reward lower than it began by {_LEAST_FALL:.0%} of itself and by 4 standard errors, "
    "and the whole not lower",
    source="ours: the threshold of falling_reward, source by source",
    skip=_mixed,
)
def source_forgets(history: History) -> Issue | None:
    """What the other sources teach costs what the model could do on this one."""
    whole = history.change("reward", NOW)
    if whole is None or whole.falls():
        return None
    for source, share in history.recipe.dataset.shares.items():
        metric = _REWARD.replace("NAME", source)
        change = history.change(metric, NOW)
        if change is None or len(history.points(metric)) < 2 * NOW:
            continue
        if change.falls(_LEAST_FALL * abs(change.before)):
            seen = (
                f"the reward of `{source}` began at {change.before:.3g} and is {change.now:.3g} now (its first "
                f"and its last {NOW} records), while that of all sources went from {whole.before:.3g} to "
                f"{whole.now:.3g}"
            )
            fix = f"a higher `{_place(history.recipe, source)}.ratio` (it has {share:.0%} of the prompts)"
            return Issue(seen, fix, level="warning")
    return None
