"""Checks what ends a training early: whether the rules of `stop_when`, and metrics, will be there to look at."""

from collections.abc import Iterator
from contextlib import suppress

from grpo_cli.analysis.diagnosis.rules import RULES
from grpo_cli.errors import Problem, RewardError, nearest
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import name_rewards

_EVALUATED = frozenset(
    """loss reward reward_std frac_reward_zero_std entropy kl num_tokens aux_loss cispo_clip_ratio runtime
    samples_per_second steps_per_second completions/mean_length completions/min_length completions/max_length
    completions/clipped_ratio completions/mean_terminated_length completions/min_terminated_length
    completions/max_terminated_length completions/repeated_share clip_ratio/low_mean clip_ratio/high_mean
    clip_ratio/region_mean clip_ratio/low_min clip_ratio/high_max""".split()
)
"""What every evaluation logs, and those of some losses (trl 1.16.0, `GRPOTrainer`); the rewards come on top."""


def check_metrics(recipe: Recipe) -> Iterator[Problem]:
    """Find metrics that training waits for and no evaluation logs; those of scored data are `scored.py`'s."""
    training = recipe.training
    if not recipe.is_sampled or training.eval_strategy == "no" or training.mode == "async":
        return
    with suppress(RewardError):
        names = name_rewards(recipe.rewards)
        known = {f"rewards/{name}/{what}" for name in names for what in ("mean", "std")}
        known |= _EVALUATED
        own = any(reward.kind == "python" for reward in recipe.rewards)
        for path, metric in named_metrics(recipe).items():
            name = (metric or "eval_reward").removeprefix("eval_")
            if name in known:
                continue
            yield Problem(
                f"no evaluation logs `eval_{name}`{', unless a function of yours does' if own else ''}",
                f"set it to eval_{nearest(name, known) or 'reward'}",
                path,
                level="warning" if own else "error",
            )


def named_metrics(recipe: Recipe) -> dict[str, str | None]:
    """The settings that name a metric of the evaluation, and which they name."""
    stopping = recipe.training.early_stopping
    return {
        "training.early_stopping.metric": stopping.metric if stopping else None,
        "training.metric_for_best_model": recipe.training.extras.get("metric_for_best_model"),
    }


def check_stop_when(recipe: Recipe) -> Iterator[Problem]:
    """A warning for each rule that can never stop this run."""
    bars = {rule.name: rule.skip_reason(recipe) for rule in RULES}
    if recipe.training.eval_strategy == "no":
        # The measurement after training comes too late to stop it.
        bars["held_out_gap"] = "`eval_strategy` is `no`, so held-out prompts are not looked at"
    for place, name in enumerate(recipe.training.stop_when):
        if (why := bars[name]) is not None:
            yield Problem(
                f"`{name}` can never stop this run: {why}",
                f"remove `{name}`, or change that",
                f"training.stop_when.{place}",
                level="warning",
            )
