"""Rules on whether training is stable: loss, learning rate, entropy, divergence, gradients, clipped ratios."""

from itertools import takewhile
from math import isinf
from statistics import median

from grpo_cli.analysis.diagnosis.history import LIKELY, History, near_best
from grpo_cli.analysis.diagnosis.rule import (
    AXOLOTL,
    PROBE,
    RATE,
    Rule,
    always,
    more_kl,
    slower,
    usual_rates,
)
from grpo_cli.analysis.diagnosis.signal import (
    COLLAPSED,
    MANY_CLIPPED,
    MOST_SILENT,
    is_solved,
    no_signal,
    repeated_answers,
)
from grpo_cli.issues import Issue
from grpo_cli.recipe.model import FULL, LORA
from grpo_cli.recipe.recipe import Recipe

_MOST_ENTROPY, _GROWTH = 1.0, 2.0
_MOST_KL = 2.0
"""Nats a token from the reference model."""
_MOST_GRADIENT, _SPIKE, _SPIKES = 10.0, 10.0, 3
"""A norm that is too large; how many times the median makes a spike; how many of a window are too many."""
_MOST_CLIPPED = 0.3
_HEAT = "generation.temperature"
_CLIPPED, _GRADIENT = "clip_ratio/region_mean", "grad_norm"
_FP16_SKIPS = 5
"""Steps in a row that the gradient scaler of fp16 may skip while it looks for its scale."""
_STILL = 0.05
"""Share by which entropy may change in a model that does not learn."""
_HOPELESS = 1000
"""How many times below the least rate nothing can be learned."""
_BEGUN = 5
"""Records in which a signal shows that is lost later."""
_WARM_UP = 200
"""Records in which the highest learning rate is looked for: any warm-up has ended by then."""


@Rule(
    "the loss is NaN or infinite",
    ("loss",),
    window=1,
    min_records=1,
    threshold=f"NaN or infinite; with fp16 {_FP16_SKIPS} gradients in a row",
    source="by definition; fp16: ours: its scaler skips a few steps while it finds its scale",
    skip_reason=always,
)
def nan_loss(history: History) -> Issue | None:
    """A step from a loss that is NaN or infinite ruins every weight."""
    fix = f"{slower(history)}, and look for extreme rewards in {history.advice.completions}"
    if history.lost_at is not None:
        return Issue(f"the loss of step {history.lost_at} is NaN or infinite", fix)
    fp16 = history.recipe.setting("fp16")
    for metric in (_GRADIENT,) if fp16 else ("loss", _GRADIENT):
        newest = history.points(metric)[-_FP16_SKIPS if fp16 else -1 :]
        if newest and all(value is None for _, value in newest):
            name = "loss" if metric == "loss" else "gradient norm"
            lost = [*takewhile(lambda point: point[1] is None, reversed(history.points(metric)))]
            seen = f"the {name} of step {newest[-1][0]} is NaN or infinite"
            if len(lost) > 1:
                seen = f"the {name} has been NaN or infinite since step {lost[-1][0]}"
            return Issue(seen, fix)
    return None


def _taught(recipe: Recipe) -> str | None:
    return None if recipe.learns_from_rewards else "entropy follows that of the teacher"


@Rule(
    "all completions become the same",
    ("entropy",),
    threshold=f"a mean below {COLLAPSED}, with the reward not near its highest",
    source=AXOLOTL,
    skip_reason=_taught,
)
def entropy_collapse(history: History) -> Issue | None:
    """A model that is sure of every token samples the same answer again, and finds no better one."""
    entropy, recipe = history.mean("entropy"), history.recipe
    if entropy is None or entropy >= COLLAPSED or (history.is_near_best() and not _is_cut(history)):
        return None
    # The first record alone: a policy can be lost within a few steps.
    started = (history.first("entropy", 1) or [entropy])[0]
    seen = (
        f"entropy is {entropy:.2g} over the last 10 records (at least {COLLAPSED}); it began at "
        f"{started:.2g}"
    )
    warm = recipe.generation.temperature >= 1 or _HEAT in history.advice.unknown
    warmer = "" if warm else f", {history.advice.edit(_HEAT, '1.0')}"
    return Issue(
        seen, f"{slower(history)}, {more_kl(history)}{warmer}; go back to an earlier checkpoint"
    )


def _is_cut(history: History) -> bool:
    """Return whether completions no longer end: a reward whose highest value is unknown is not near it then."""
    clipped = history.change("completions/clipped_ratio")
    rose = clipped is not None and clipped.before < MANY_CLIPPED < clipped.now
    return isinf(near_best(history.recipe)) and rose


@Rule(
    "completions become random",
    ("entropy",),
    min_records=20,
    threshold=f"a mean above {_MOST_ENTROPY:g} and {_GROWTH:g} times the first 10 records, without a better "
    "reward",
    source=f"{_MOST_ENTROPY:g}: {AXOLOTL}, and an author of DeepCoder (github.com/rllm-org/rllm/issues/116); "
    f"{_GROWTH:g} times is ours: some models start higher",
    skip_reason=_taught,
)
def entropy_explosion(history: History) -> Issue | None:
    """A policy whose entropy rises without end loses the language that it knew."""
    entropy = history.change("entropy", 10)
    if entropy is None:
        return None
    most = max(_MOST_ENTROPY, _GROWTH * entropy.before)
    if entropy.now < most or history.has_risen(LIKELY):
        return None
    seen = (
        f"entropy rose from {entropy.before:.2g} to {entropy.now:.2g} (at most {most:.2g}), "
        "and the reward did not rise"
    )
    return Issue(seen, f"{slower(history)}, {more_kl(history)}")


def _has_no_kl(recipe: Recipe) -> str | None:
    if recipe.teacher is not None:
        return "the KL is that to the teacher"
    return None if recipe.kl_weight else "no KL is computed with `training.beta: 0`"


@Rule(
    "the model is far from where it started",
    ("kl",),
    threshold=f"a median above {_MOST_KL:g}; a note if the reward rises",
    source=f"{AXOLOTL}; the median is ours: one token can raise a mean",
    skip_reason=_has_no_kl,
)
def kl_runaway(history: History) -> Issue | None:
    """Far from the model it started from, it loses what that knew."""
    recent = history.last("kl")
    if not recent or median(recent) <= _MOST_KL:
        return None
    seen = f"the median KL of the last 10 records is {median(recent):.3g} (at most {_MOST_KL:g})"
    fix = f"{slower(history)}, or {more_kl(history)}"
    if history.has_risen() and is_solved(history):
        return Issue(f"{seen}; the reward rises all the same", fix, level="note")
    return Issue(seen, fix)


@Rule(
    "gradients spike",
    (_GRADIENT,),
    window=20,
    min_records=20,
    threshold=f"{_SPIKES} of 20 above {_MOST_GRADIENT:g}, or above {_SPIKE:g} times their median and "
    "max_grad_norm",
    source=f"above {_MOST_GRADIENT:g} regularly: {AXOLOTL}; {_SPIKE:g} times is ours: batch noise stays "
    "far below",
    skip_reason=always,
)
def gradient_spike(history: History) -> Issue | None:
    """Such gradients point anywhere, and clipping makes the others small beside them."""
    norms = [norm for norm in history.last(_GRADIENT, 20) if norm > 0]
    clip = history.recipe.setting("max_grad_norm") or 0.0
    large, limit = [norm for norm in norms if norm > _MOST_GRADIENT], f"{_MOST_GRADIENT:g}"
    if norms and len(large) < _SPIKES:
        usual = median(norms)
        large = [norm for norm in norms if norm > max(_SPIKE * usual, clip)]
        limit = f"{_SPIKE:g} times their median {usual:.3g}"
    if len(large) < _SPIKES:
        return None
    seen = (
        f"{len(large)} of the last 20 gradient norms are above {limit} (fewer than {_SPIKES} are usual); the "
        f"largest is {max(large):.3g}"
    )
    clipped = "" if clip > 0 else f", {history.advice.edit('training.max_grad_norm', '1.0')}"
    return Issue(seen, f"{slower(history)}{clipped}, or larger batches", level="warning")


def _clips_otherwise(recipe: Recipe) -> str | None:
    loss = recipe.setting("loss_type")
    return f"`loss_type: {loss}` clips otherwise" if loss in ("cispo", "vespo", "sapo") else None


@Rule(
    "too many ratios are clipped",
    (_CLIPPED,),
    threshold=f"a mean above {_MOST_CLIPPED}",
    source=AXOLOTL,
    skip_reason=_clips_otherwise,
)
def clip_share(history: History) -> Issue | None:
    """Tokens whose ratio is clipped teach nothing: the completions are too old for this policy."""
    share, recipe = history.mean(_CLIPPED), history.recipe
    if share is None or share <= _MOST_CLIPPED:
        return None
    iterations = recipe.training.num_iterations
    accumulation = recipe.training.gradient_accumulation_steps
    steps = recipe.generation.steps_per_generation or accumulation
    if iterations > 1:
        edit = history.advice.edit("training.num_iterations", iterations // 2)
        fix = f"{edit} (it is {iterations})"
    elif steps > accumulation:
        edit = history.advice.edit("generation.steps_per_generation", accumulation)
        fix = f"{edit} (it is {steps})"
    else:
        fix = slower(history)
    seen = (
        f"{share:.0%} of the tokens of the last 10 records had a clipped ratio "
        f"(at most {_MOST_CLIPPED:.0%})"
    )
    return Issue(seen, fix, level="warning")


_SIGNS = (
    *(entropy_collapse, entropy_explosion, gradient_spike, kl_runaway, nan_loss),
    *(no_signal, repeated_answers),
)
"""What a learning rate that is too high leads to."""


def _highest_rate(history: History) -> float | None:
    return max(history.first("learning_rate", _WARM_UP), default=None)


@Rule(
    "the learning rate is too high",
    ("learning_rate",),
    threshold=f"above {LORA.most:g} with LoRA ({FULL.most:g} without), and one of "
    f"{', '.join(sign.name for sign in _SIGNS)} shows",
    source=f"{PROBE}, which is ours: published runs stay far below; a high rate without other symptoms is not "
    "a problem",
    skip_reason=always,
)
def too_high_learning_rate(history: History) -> Issue | None:
    """Steps this large lose the language that the model knew, and cause the other problems listed here."""
    recipe, peak = history.recipe, _highest_rate(history)
    most, unsure = usual_rates(history).most, "model.lora" in history.advice.unknown
    if peak is None or peak <= most:
        return None
    signs = [symptom for sign in _SIGNS if (symptom := sign.apply(history))]
    # What never had a signal did not lose it.
    silent = min(history.first("frac_reward_zero_std", _BEGUN), default=0.0) > MOST_SILENT
    signs = [sign for sign in signs if not (silent and sign.rule == no_signal.name)]
    if not signs:
        return None
    seen = (
        f"the highest learning rate is {peak:.2g} (at most {most:g} "
        f"{'with' if recipe.model.lora or unsure else 'without'} LoRA), and it shows: "
        f"{', '.join(sign.rule for sign in signs)}"
    )
    fix = (
        f"{slower(history)} (it is {recipe.training.learning_rate:g}), from the start; "
        f"{more_kl(history)} also limits how far the model moves"
    )
    bad = any(sign.level == "error" for sign in signs)
    return Issue(seen, fix, level="error" if bad else "warning")


@Rule(
    "the learning rate is too low",
    ("learning_rate", "reward"),
    min_records=20,
    threshold=f"never above {LORA.least:g} with LoRA ({FULL.least:g} without), reward and entropy unchanged",
    source=f"LoRA: {PROBE}, half of what TRL's guide takes (github.com/huggingface/trl/pull/4207); "
    "without: ours, a tenth of TRL's default",
)
def too_low_learning_rate(history: History) -> Issue | None:
    """Every step costs its time and changes nothing that can be seen."""
    rates, peak = usual_rates(history), _highest_rate(history)
    reward = history.change("reward", 10)
    if peak is None or peak >= rates.least:
        return None
    # What moves with next to no rate is noise, unless it is the reward.
    if _has_moved(history) and (peak > rates.least / _HOPELESS or history.has_risen()):
        return None
    rewards = f"reward {reward.before:.3g} then and {reward.now:.3g} now" if reward else "no reward"
    seen = (
        f"the highest learning rate is {peak:.2g} (at least {rates.least:g}), and nothing has changed: "
        f"{rewards}"
    )
    rate = history.recipe.training.learning_rate
    fix = f"{history.advice.edit(RATE, f'{rates.usual:g}')} (it is {rate:g})"
    return Issue(seen, fix, level="warning" if peak else "error")


def _has_moved(history: History) -> bool:
    """Return whether reward or entropy have changed, or equal rewards keep them from it."""
    silent = history.mean("frac_reward_zero_std")
    reward, entropy = history.change("reward", 10), history.change("entropy", 10)
    if silent is not None and silent > MOST_SILENT:
        return True
    if entropy and abs(entropy.difference) > _STILL * abs(entropy.before):
        return True
    return reward is not None and (reward.rises() or reward.falls())
