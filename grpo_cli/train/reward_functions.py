"""Our rewards in the shape TRL calls, with every score written down on the way.

TRL calls each reward once for each batch, with the columns of the dataset as keyword arguments
(trl 1.16.0, `GRPOTrainer._calculate_rewards`).
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from grpo_cli.rewards.contract import Batch
from grpo_cli.rewards.scoring import Reward
from grpo_cli.train.completion_log import CompletionLog
from grpo_cli.train.overlap import EarlyScores, EarlyScoring

_NOT_COLUMNS = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})


class RewardFunction:
    """One reward as TRL calls it; `__name__` is what TRL logs it under."""

    def __init__(
        self, reward: Reward, log: CompletionLog, early: EarlyScoring, *, describes: bool = False
    ) -> None:
        """Wraps a reward.

        Args:
            reward: The reward.
            log: Takes its scores.
            early: May have the scores already.
            describes: Whether this one measures the batch besides: of several, one does.
        """
        self.reward = reward
        self.log = log
        self._early = early
        self._describes = describes
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
        scores, seconds, _ = self._early.take(self.reward, batch) or self._score(batch)
        # TRL averages these over the processes and logs them beside its own reward metrics.
        measure = given.get("log_metric", _ignore)
        measure(f"rewards/{self.reward.name}/seconds", seconds)
        repeated = _repeated_share(batch) if self._describes else None
        if repeated is not None:
            measure("completions/repeated_share", repeated)
        if self.reward.on_error != "raise":
            failed = sum(score.failed for score in scores) / max(len(scores), 1)
            measure(f"rewards/{self.reward.name}/error_share", failed)
        self.log.add(self.reward.name, batch, scores, step=given["trainer_state"].global_step)
        return [score.value for score in scores]

    def _score(self, batch: Batch) -> EarlyScores:
        started = time.perf_counter()
        scores = self.reward.score(batch)
        return EarlyScores(scores, time.perf_counter() - started, [])


def _repeated_share(batch: Batch) -> float | None:
    """Share of completions that equal another one of their group, of those in this process.

    None where no prompt has two completions.
    """
    rows = batch.columns.get("row_id", range(len(batch.texts)))
    if len(set(rows)) == len(batch.texts):
        return None
    found = Counter(zip(rows, batch.texts, strict=True))
    return sum(count for count in found.values() if count > 1) / len(batch.texts)


def _ignore(name: str, value: float) -> None:
    """Stands for TRL's `log_metric` where there is none."""


def build_reward_functions(
    rewards: Sequence[Reward], log: CompletionLog, early: EarlyScoring
) -> list[Callable[..., list[float | None]]]:
    """The list that `GRPOTrainer` takes as `reward_funcs`."""
    return [
        RewardFunction(reward, log, early, describes=index == 0)
        for index, reward in enumerate(rewards)
    ]
