"""Rules on the learning rate: too low to move anything, or so high that what else is wrong comes of it."""

from statistics import fmean

from grpo_cli.analysis.diagnosis import signal, stability
from grpo_cli.analysis.diagnosis.fixes import held, slower
from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.analysis.diagnosis.rule import PROBE, Rule, RuleHit, sampled_only
from grpo_cli.analysis.diagnosis.signal import MOST_SILENT
from grpo_cli.analysis.diagnosis.trends import NOW, change_of
from grpo_cli.recipe.rates import FULL, LORA, rates_of

_STILL = 0.05
"""Share by which entropy may change in a model that stands still."""
_FIRST = 200
"""Records that the highest rate is looked for in: any warm-up has ended by then."""
_OF_HIGH = frozenset(
    {"nan_loss", "entropy_collapse", "entropy_explosion", "kl_runaway", "gradient_spike"}
    | {"repeated_answers"}
)
_SIGNS = tuple(rule for rule in (*stability.RULES, *signal.RULES) if rule.name in _OF_HIGH)
"""What a rate that is too high ends in."""


def _highest(history: History) -> float | None:
    return max(history.first("learning_rate", _FIRST), default=None)


def _look_for_low_rate(history: History) -> RuleHit | None:
    rates, peak = rates_of(history.recipe), _highest(history)
    if peak is None or peak >= rates.least or _has_moved(history):
        return None
    reward = change_of(history, "reward", 10)
    told = f"reward {reward.before:.3g} then and {reward.now:.3g} now" if reward else "no reward"
    seen = f"the highest learning rate is {peak:.2g} (at least {rates.least:g}), and nothing has moved: {told}"
    return RuleHit(
        "error" if peak == 0 else "warning",
        seen,
        f"`training.learning_rate: {rates.usual:g}` (it is {history.recipe.training.learning_rate:g})",
    )


def _has_moved(history: History) -> bool:
    """Whether reward or entropy have changed, or something else keeps them from it."""
    silent = history.last("frac_reward_zero_std", NOW)
    reward, entropy = (change_of(history, name, 10) for name in ("reward", "entropy"))
    if silent and fmean(silent) > MOST_SILENT:
        return True
    if entropy and abs(entropy.difference) > _STILL * abs(entropy.before):
        return True
    return reward is not None and (reward.exceeds() or reward.reversed().exceeds())


def _look_for_high_rate(history: History) -> RuleHit | None:
    recipe, peak = history.recipe, _highest(history)
    most = rates_of(recipe).most
    if peak is None or peak <= most:
        return None
    signs = [found for rule in _SIGNS if (found := rule.apply(history))]
    if not signs:
        return None
    way = "without" if recipe.model.lora is None else "with"
    names = ", ".join(sign.rule for sign in signs)
    seen = f"the highest learning rate is {peak:.2g} (at most {most:g} {way} LoRA), and it shows: {names}"
    bad = any(sign.level == "error" for sign in signs)
    given = f"{slower(recipe)} (it is {recipe.training.learning_rate:g})"
    fix = f"{given}, from the start; {held(recipe)} holds it too"
    return RuleHit("error" if bad else "warning", seen, fix)


RULES = (
    Rule(
        "too_high_learning_rate",
        "steps too large to learn by",
        ("learning_rate",),
        10,
        10,
        f"above {LORA.most:g} with LoRA ({FULL.most:g} without), and one of {', '.join(sorted(_OF_HIGH))} shows",
        f"{PROBE}, which is ours: published runs stay far below; a high rate at which nothing else is wrong is "
        "no fault",
        "Steps this large leave the language that the model knew, and what else is told here comes of it.",
        _look_for_high_rate,
    ),
    Rule(
        "too_low_learning_rate",
        "nothing moves",
        ("learning_rate", "reward"),
        10,
        30,
        f"never above {LORA.least:g} with LoRA ({FULL.least:g} without), reward and entropy unchanged",
        f"LoRA: {PROBE}, half of what TRL's guide takes (github.com/huggingface/trl/pull/4207); "
        "without: ours, a tenth of TRL's default",
        "Every step costs its time and changes nothing that can be seen.",
        _look_for_low_rate,
        sampled_only,
    ),
)
