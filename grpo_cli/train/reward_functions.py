"""Our rewards in the shape TRL calls, with every score written down on the way.

TRL calls each reward once for each batch, with the columns of the dataset as keyword arguments
(trl 1.16.0, `GRPOTrainer._calculate_rewards`).
"""

from collections.abc import Callable, Sequence
from typing import Any

from grpo_cli.rewards.contract import Batch
from grpo_cli.rewards.scoring import Reward
from grpo_cli.train.completion_log import CompletionLog

_NOT_COLUMNS = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})


class RewardFunction:
    """One reward as TRL calls it; `__name__` is what TRL logs it under."""

    def __init__(self, reward: Reward, log: CompletionLog) -> None:
        self.reward = reward
        self.log = log
        self.__name__ = reward.name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **given: Any,
    ) -> list[float | None]:
        """Scores a batch; see `Reward.score` for what it raises."""
        batch = Batch(
            prompts=prompts,
            completions=completions,
            completion_ids=completion_ids,
            columns={key: value for key, value in given.items() if key not in _NOT_COLUMNS},
            extra={key: value for key, value in given.items() if key in _NOT_COLUMNS},
        )
        scores = self.reward.score(batch)
        self.log.add(self.reward.name, batch, scores, step=given["trainer_state"].global_step)
        return [score.value for score in scores]


def build_reward_functions(
    rewards: Sequence[Reward], log: CompletionLog
) -> list[Callable[..., list[float | None]]]:
    """The list that `GRPOTrainer` takes as `reward_funcs`."""
    return [RewardFunction(reward, log) for reward in rewards]
