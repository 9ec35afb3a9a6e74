"""Rules on the sampler: whether it is the model that learns, and what it costs."""

from statistics import fmean

from grpo_cli.analysis.diagnosis.history import History
from grpo_cli.analysis.diagnosis.rule import AXOLOTL, Rule, RuleHit, sampled_only
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.series import PHASES

_DIFFERENCE, _SAMPLING = "sampling/sampling_logp_difference/mean", "time/sampling"
USUAL_DIFFERENCE, MOST_DIFFERENCE = 0.1, 1.0
"""Nats a token between the log-probabilities of vLLM and of the trainer."""
MOST_SAMPLING = 0.9
"""Share of a step's time."""


def _look_for_mismatch(history: History) -> RuleHit | None:
    recent = history.last(_DIFFERENCE, 10)
    if not recent or fmean(recent) <= USUAL_DIFFERENCE:
        return None
    generation = history.recipe.generation
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": None}
    off = [name for name, value in neutral.items() if getattr(generation, name) not in (value, 0.0)]
    fix = ", ".join(
        f"`generation.{name}: {'null' if neutral[name] is None else neutral[name]}` "
        f"(it is {getattr(generation, name):g})"
        for name in off
    )
    server = generation.vllm.mode == "server" and not generation.vllm.is_managed
    fix = fix or (
        "start the server with what `grpo serve RECIPE --dry-run` prints"
        if server
        else "`model.dtype: float32`, which tells whether rounding is the cause"
    )
    seen = (
        f"vLLM's log-probabilities are {fmean(recent):.2g} from the trainer's over the last 10 records "
        f"(below {USUAL_DIFFERENCE} is usual, at most {MOST_DIFFERENCE:g})"
    )
    return RuleHit("error" if fmean(recent) > MOST_DIFFERENCE else "warning", seen, fix)


def _look_for_starvation(history: History) -> RuleHit | None:
    spent = {phase: fmean(history.last(f"time/{phase}", 10) or [0.0]) for phase in PHASES}
    total = sum(spent.values())
    share = spent["sampling"] / total if total > 0 else 0.0
    if share <= MOST_SAMPLING:
        return None
    seen = (
        f"sampling took {share:.0%} of the time of the last 10 records (at most {MOST_SAMPLING:.0%}), "
        f"learning {spent['learning'] / total:.0%}"
    )
    generation, training = history.recipe.generation, history.recipe.training
    if generation.backend != "vllm":
        return RuleHit("note", seen, "`generation.backend: vllm`")
    if generation.vllm.mode == "colocate":
        return RuleHit("note", seen, "`generation.vllm.mode: server` on devices of its own")
    more = training.num_iterations + 1
    return RuleHit("note", seen, f"`training.num_iterations: {more}`, which uses each sample again")


def _is_not_vllm(recipe: Recipe) -> str | None:
    if recipe.generation.backend != "vllm":
        return "the trainer samples by itself"
    corrected = recipe.generation.vllm.extras.get("importance_sampling_correction", True)
    return None if corrected else "`vllm.importance_sampling_correction` is off"


RULES = (
    Rule(
        "sampling_mismatch",
        "vLLM and the trainer disagree",
        (_DIFFERENCE,),
        10,
        10,
        f"a mean above {USUAL_DIFFERENCE} (an error above {MOST_DIFFERENCE:g})",
        AXOLOTL,
        "The completions are then another policy's, and what is learned from them is beside the point.",
        _look_for_mismatch,
        lambda recipe: sampled_only(recipe) or _is_not_vllm(recipe),
    ),
    Rule(
        "sampling_starves",
        "sampling takes nearly all of the time",
        (_SAMPLING, "time/learning"),
        10,
        10,
        f"above {MOST_SAMPLING:.0%} of the time of all phases",
        "ours: sampling is most of many runs; from here on nothing but a faster sampler makes steps faster",
        "The learner waits for completions.",
        _look_for_starvation,
        sampled_only,
    ),
)
