"""Reward functions as `GRPOTrainer` takes them, for trainers of ours as well."""

from collections.abc import Callable
from typing import Any

from trl import GRPOTrainer

from grpo_cli.rewards.contract import Batch, RewardParams, Score
from grpo_cli.rewards.scoring import Reward
from grpo_cli.training.trainer import Parts


class Params(RewardParams):
    """Of a reward that a test makes up."""


def as_reward(function: Callable[..., Any]) -> Reward:
    """The reward that calls a function with what TRL passes to it."""

    def score(batch: Batch) -> list[Score]:
        values = function(
            prompts=batch.prompts,
            completions=batch.completions,
            completion_ids=batch.completion_ids,
            **batch.columns,
            **batch.extra,
        )
        return [Score(value) for value in values]

    return Reward(function.__name__, 1.0, "python", Params(), score)


def scored_by(trainer: type, *functions: Callable[..., Any], **parts: Any) -> dict[str, Any]:
    """The arguments of a class of trainers for these rewards; `parts` are those of `Parts`."""
    if trainer is GRPOTrainer:
        return {"reward_funcs": [*functions]}
    return {"parts": Parts(rewards=[as_reward(each) for each in functions], **parts)}
