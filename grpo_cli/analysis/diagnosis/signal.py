"""Rules on whether completions of a group differ: without that there is nothing to learn from."""

from statistics import fmean

from grpo_cli.analysis.diagnosis.fixes import resampled, slower, try_rewards
from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.analysis.diagnosis.rule import AXOLOTL, Rule, RuleHit, sampled_only
from grpo_cli.analysis.diagnosis.trends import change_of, has_risen, is_near_most

_SILENT, _ALL = "frac_reward_zero_std", 0.999
_LEFT = "dynamic_sampling/frac_reward_zero_std"
"""The same after groups were replaced: of what is learned from."""
MOST_SILENT = 0.8
"""Share of groups without two different rewards."""
COLLAPSED = 0.01
"""Entropy in nats a token below which all completions are the same."""
MOST_REPEATED, NEARLY_ALL = 0.5, 0.95
FEW_TOKENS = 20
"""Answers shorter than this are often equal because there is one right way to say them."""


def _silent_share(history: History, metric: str = _SILENT) -> float | None:
    shares = history.last(metric, 10)
    return fmean(shares) if shares and fmean(shares) > MOST_SILENT else None


def _is_solved(history: History) -> bool:
    """Whether groups agree because they are right, or as right as they get."""
    if is_near_most(history):
        return True
    entropy = history.last("entropy", 10)
    # A policy that says one thing only agrees with itself, whatever it is worth.
    collapsed = bool(entropy) and fmean(entropy) < COLLAPSED
    return has_risen(history) and not collapsed


def _groups(history: History) -> str:
    extras = history.recipe.training.extras
    by_batch = extras.get("scale_rewards") == "batch"
    summed_last = extras.get("multi_objective_aggregation") == "normalize_then_sum"
    return "batches" if by_batch or summed_last else "groups"


def _look_for_no_signal(history: History) -> RuleHit | None:
    dynamic = history.recipe.generation.dynamic_sampling
    share = _silent_share(history, _SILENT if dynamic is None else _LEFT)
    if share is None or _is_solved(history):
        return None
    rewards = history.last("reward", 10) or [0.0]
    spread = history.last("reward_std", 10)
    seen = (
        f"{share:.0%} of the {'groups' if dynamic else _groups(history)} of the last 10 records had no two "
        f"different rewards "
        f"{'after replacing ' if dynamic else ''}(at most {MOST_SILENT:.0%}), with a mean reward of "
        f"{fmean(rewards):.3g}"
    )
    if spread and max(spread) < 1e-6 and max(rewards) - min(rewards) < 1e-6:
        fix = f"{try_rewards(history)} shows why the reward gives every answer the same"
    else:
        more = 2 * history.recipe.generation.num_generations
        offers = [f"`generation.num_generations: {more}`", *resampled(history, share)]
        fix = (
            f"{try_rewards(history)}; if right answers score there, easier prompts or "
            f"{' or '.join(offers)}"
        )
    return RuleHit("error" if share > _ALL else "warning", seen, fix)


def _look_for_all_solved(history: History) -> RuleHit | None:
    share, change = _silent_share(history), change_of(history, "reward")
    if share is None or change is None or not _is_solved(history):
        return None
    risen = has_risen(history)
    rose = f"rose from {change.before:.3g} to" if risen else "has been near its most,"
    seen = (
        f"{share:.0%} of the {_groups(history)} of the last 10 records agree (at most {MOST_SILENT:.0%}), "
        f"and the reward {rose} {change.now:.3g}"
    )
    if risen:
        done = f"`training.max_steps: {history.step}` would do; harder prompts to go on"
        return RuleHit("note", seen, done)
    return RuleHit("warning", seen, "harder prompts, or a reward that tells more answers apart")


def _look_for_repeats(history: History) -> RuleHit | None:
    share = fmean(history.last("completions/repeated_share", 10) or [0.0])
    lengths = history.last("completions/mean_length", 10)
    limit = MOST_REPEATED if lengths and fmean(lengths) >= FEW_TOKENS else NEARLY_ALL
    if share <= limit or is_near_most(history):
        return None
    generation = history.recipe.generation
    narrow = [
        f"`generation.{name}: {neutral}` (it is {value:g})"
        for name, value, neutral in (
            ("temperature", generation.temperature, "1.0"),
            ("top_p", generation.top_p, "1.0"),
        )
        if value < 1
    ]
    if generation.top_k:
        narrow.append(f"`generation.top_k: 0` (it is {generation.top_k})")
    seen = (
        f"{share:.0%} of the completions of the last 10 records equal another one of their group "
        f"(at most {limit:.0%})"
    )
    fix = ", ".join(narrow) or f"{slower(history.recipe)}, from an earlier checkpoint"
    return RuleHit("warning", seen, fix)


RULES = (
    Rule(
        "no_signal",
        "groups without a difference",
        (_SILENT, "reward"),
        10,
        10,
        f"a mean above {MOST_SILENT}, with the reward neither risen nor near its most",
        AXOLOTL,
        "Completions of a group that score the same teach nothing: their advantages are all 0.",
        _look_for_no_signal,
        sampled_only,
    ),
    Rule(
        "all_solved",
        "nothing left to learn",
        (_SILENT, "reward"),
        10,
        10,
        f"a mean above {MOST_SILENT}, with the reward risen or near its most",
        f"{AXOLOTL}; ours: a reward that rose, or lacks at most a tenth, tells success from failure",
        "What these prompts can teach has been learned, so more steps change little.",
        _look_for_all_solved,
        sampled_only,
    ),
    Rule(
        "repeated_answers",
        "the same answer again and again",
        ("completions/repeated_share", "reward"),
        10,
        10,
        f"a mean above {MOST_REPEATED} ({NEARLY_ALL} below {FEW_TOKENS} tokens), the reward not near its most",
        "ours: two texts of many tokens are hardly ever equal by chance; short answers often are",
        "Equal completions score the same, so a group of them has little to compare.",
        _look_for_repeats,
        sampled_only,
    ),
)
