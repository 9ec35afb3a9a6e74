"""Rules on whether the policy stays one that can learn: entropy, divergence, gradients, clipped ratios."""

from statistics import fmean, median

from grpo_cli.analysis.diagnosis.fixes import held, slower
from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.analysis.diagnosis.rule import AXOLOTL, Rule, RuleHit
from grpo_cli.analysis.diagnosis.signal import COLLAPSED
from grpo_cli.analysis.diagnosis.trends import LIKELY, change_of, has_risen, is_near_most
from grpo_cli.recipe.recipe import Recipe

MOST_ENTROPY, GROWTH = 1.0, 2.0
MOST_KL = 2.0
"""Nats a token from the reference model."""
MOST_GRADIENT, SPIKE, SPIKES = 10.0, 10.0, 3
"""A norm that is too large; how many times the median makes a spike; how many of a window are too many."""
MOST_CLIPPED = 0.3
_CLIPPED, _GRADIENT = "clip_ratio/region_mean", "grad_norm"
_FP16_SKIPS = 5
"""Steps in a row that the gradient scaler of fp16 may skip while it looks for its scale."""


def _look_for_entropy_collapse(history: History) -> RuleHit | None:
    recent = history.last("entropy", 10)
    if not recent or fmean(recent) >= COLLAPSED or is_near_most(history):
        return None
    # The first alone: a policy can be lost within a few steps.
    started = history.first("entropy", 1)
    seen = (
        f"entropy is {fmean(recent):.2g} over the last 10 records (at least {COLLAPSED}); "
        f"it began at {fmean(started or recent):.2g}"
    )
    recipe = history.recipe
    warmer = "" if recipe.generation.temperature >= 1 else ", `generation.temperature: 1.0`"
    fix = f"{slower(recipe)}, {held(recipe)}{warmer}; go back to an earlier checkpoint"
    return RuleHit("error", seen, fix)


def _look_for_entropy_explosion(history: History) -> RuleHit | None:
    entropy = change_of(history, "entropy", 10)
    if entropy is None or entropy.now < max(MOST_ENTROPY, GROWTH * entropy.before):
        return None
    if has_risen(history, LIKELY):
        return None
    seen = (
        f"entropy rose from {entropy.before:.2g} to {entropy.now:.2g} (at most {MOST_ENTROPY:g}), "
        "and the reward did not"
    )
    return RuleHit("error", seen, f"{slower(history.recipe)}, {held(history.recipe)}")


def _look_for_runaway(history: History) -> RuleHit | None:
    recent = history.last("kl", 10)
    if not recent or median(recent) <= MOST_KL:
        return None
    seen = f"the median KL of the last 10 records is {median(recent):.3g} (at most {MOST_KL:g})"
    return RuleHit("error", seen, f"{slower(history.recipe)}, or {held(history.recipe)}")


def _look_for_spikes(history: History) -> RuleHit | None:
    norms = [value for value in history.last(_GRADIENT, 20) if value > 0]
    large = [value for value in norms if value > MOST_GRADIENT]
    if len(large) >= SPIKES:
        seen = f"{len(large)} of the last 20 gradient norms are above {MOST_GRADIENT:g}"
    else:
        held = history.recipe.training.extras.get("max_grad_norm", 1.0) or 0.0
        usual = median(norms) if norms else 0.0
        large = [value for value in norms if value > max(SPIKE * usual, held)]
        if len(large) < SPIKES:
            return None
        seen = f"{len(large)} of the last 20 gradient norms are above {SPIKE:g} times their median {usual:.3g}"
    norm = history.recipe.training.extras.get("max_grad_norm", 1.0)
    clip = "" if norm else ", `training.max_grad_norm: 1.0`"
    seen += f" (fewer than {SPIKES} are usual); the largest is {max(large):.3g}"
    return RuleHit("warning", seen, f"{slower(history.recipe)}{clip}, or larger batches")


def _look_for_nan(history: History) -> RuleHit | None:
    fix = f"{slower(history.recipe)}, and look for extreme rewards in `completions/`"
    if history.lost_at is not None:
        return RuleHit("error", f"the loss of step {history.lost_at} is no number", fix)
    fp16 = history.recipe.training.extras.get("fp16")
    for metric in (_GRADIENT,) if fp16 else ("loss", _GRADIENT):
        newest = history.series.get(metric, [])[-_FP16_SKIPS if fp16 else -1 :]
        if newest and all(value is None for _, value in newest):
            what = "loss" if metric == "loss" else "gradient norm"
            return RuleHit("error", f"the {what} of step {newest[-1][0]} is no number", fix)
    return None


def _look_for_clipping(history: History) -> RuleHit | None:
    recent = history.last(_CLIPPED, 10)
    if not recent or fmean(recent) <= MOST_CLIPPED:
        return None
    training, generation = history.recipe.training, history.recipe.generation
    steps = generation.steps_per_generation or training.gradient_accumulation_steps
    if training.num_iterations > 1:
        fix = f"`training.num_iterations: {training.num_iterations // 2}` (it is {training.num_iterations})"
    elif steps > training.gradient_accumulation_steps:
        fix = f"`generation.steps_per_generation: {training.gradient_accumulation_steps}` (it is {steps})"
    else:
        fix = slower(history.recipe)
    seen = (
        f"{fmean(recent):.0%} of the tokens of the last 10 records had a clipped ratio "
        f"(at most {MOST_CLIPPED:.0%})"
    )
    return RuleHit("warning", seen, fix)


def _has_no_reference(recipe: Recipe) -> str | None:
    beta = recipe.training.extras.get("beta")
    return None if beta else "`training.beta` is 0, so no KL is computed"


def _has_other_clipping(recipe: Recipe) -> str | None:
    loss = recipe.training.extras.get("loss_type")
    return f"`loss_type: {loss}` clips otherwise" if loss in ("cispo", "vespo", "sapo") else None


_COLLAPSE = Rule(
    "entropy_collapse",
    "the model says one thing only",
    ("entropy",),
    10,
    10,
    f"a mean below {COLLAPSED}, with the reward not near its most",
    AXOLOTL,
    "A model that is sure of every token samples the same answer again, and finds no better one.",
    _look_for_entropy_collapse,
)
_EXPLOSION = Rule(
    "entropy_explosion",
    "the model says anything",
    ("entropy",),
    10,
    20,
    f"a mean above {MOST_ENTROPY:g} and {GROWTH:g} times the first 10 records, without a better reward",
    f"{MOST_ENTROPY:g}: {AXOLOTL}, and an author of DeepCoder (github.com/rllm-org/rllm/issues/116); "
    f"{GROWTH:g} times is ours: some models begin higher",
    "A policy whose entropy rises without end loses the language that it knew.",
    _look_for_entropy_explosion,
)
_RUNAWAY = Rule(
    "kl_runaway",
    "the model has left its start",
    ("kl",),
    10,
    10,
    f"a median above {MOST_KL:g}",
    f"{AXOLOTL}; the median is ours: one token can lift a mean",
    "Far from the model it started from, it loses what that knew.",
    _look_for_runaway,
    _has_no_reference,
)
_SPIKES = Rule(
    "gradient_spike",
    "gradients jump",
    (_GRADIENT,),
    20,
    20,
    f"{SPIKES} of 20 above {MOST_GRADIENT:g}, or above {SPIKE:g} times their median and max_grad_norm",
    f"above {MOST_GRADIENT:g} regularly: {AXOLOTL}; {SPIKE:g} times is ours: noise of a batch stays far below",
    "Steps of such gradients point anywhere, and clipping makes the others small beside them.",
    _look_for_spikes,
)
_NAN = Rule(
    "nan_loss",
    "the loss is no number",
    ("loss",),
    1,
    1,
    f"NaN or infinite; with fp16 {_FP16_SKIPS} gradients in a row",
    "by definition; fp16: ours: its scaler skips a few steps while it looks for its scale",
    "A step from a number that is none ruins every weight.",
    _look_for_nan,
)
_CLIPPING = Rule(
    "clip_share",
    "too many ratios are clipped",
    (_CLIPPED,),
    10,
    10,
    f"a mean above {MOST_CLIPPED}",
    AXOLOTL,
    "Tokens whose ratio is clipped teach nothing: the completions are too old for this policy.",
    _look_for_clipping,
    _has_other_clipping,
)
RULES = (_NAN, _COLLAPSE, _EXPLOSION, _RUNAWAY, _SPIKES, _CLIPPING)
