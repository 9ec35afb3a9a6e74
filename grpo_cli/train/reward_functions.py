"""Our rewards in the shape TRL calls, with every score written down on the way, and their states in checkpoints.

TRL calls each reward once for each batch, with the columns of the dataset as keyword arguments
(trl 1.16.0, `GRPOTrainer._calculate_rewards`).
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import Batch
from grpo_cli.rewards.scoring import Reward, has_state, read_state
from grpo_cli.train.completion_log import CompletionLog
from grpo_cli.train.overlap import EarlyScores, EarlyScoring

_NOT_COLUMNS = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})


class RewardFunction:
    """One reward as TRL calls it; `__name__` is what TRL logs it under."""

    def __init__(
        self,
        reward: Reward,
        log: CompletionLog,
        early: EarlyScoring,
        seed: str,
        *,
        describes: bool = False,
    ) -> None:
        """Wraps a reward.

        Args:
            reward: The reward.
            log: Takes its scores.
            early: May have the scores already.
            seed: Of this process: what the reward draws follows from it and from the place of the call.
            describes: Whether this one measures the batch besides: of several, one does.
        """
        self.reward = reward
        self.log = log
        self._early = early
        self._seed = f"{seed}:{reward.name}"
        self._calls: dict[bool, tuple[int, int]] = {}
        """The step of the last call and its number in that step, in training and in evaluation."""
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
            seed=self._next_seed(given["trainer_state"].global_step),
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

    def _next_seed(self, step: int) -> str:
        training = self.log.is_training()
        last, number = self._calls.get(training, (-1, 0))
        number = number + 1 if last == step else 0
        self._calls[training] = step, number
        return f"{self._seed}:{'train' if training else 'eval'}:{step}:{number}"

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


def save_states(rewards: Sequence[Reward]) -> dict[str, Any]:
    """Return the state of each reward that offers one, by name.

    Raises:
        RewardError: A state cannot be read, or holds what a checkpoint could not give back.
    """
    return {reward.name: read_state(reward) for reward in rewards if has_state(reward)}


def load_states(
    rewards: Sequence[Reward], states: Mapping[str, Any], checkpoint: Path, *, force: bool
) -> None:
    """Give each reward that offers a state the one it had.

    Args:
        rewards: Of the recipe.
        states: From `save_states`.
        checkpoint: Where they were kept.
        force: Whether a reward may begin anew.

    Raises:
        RewardError: There is none of a reward, or the reward refuses it.
    """
    for reward in filter(has_state, rewards):
        if reward.name not in states:
            if force:
                continue
            raise RewardError(
                f"{checkpoint} holds no state of reward {reward.name!r}, which would begin anew. Fix: start a run "
                "of its own, or go on all the same with --force"
            )
        try:
            reward.scorer.load_state_dict(states[reward.name])  # type: ignore[attr-defined]
        except Exception as error:
            raise RewardError(
                f"load_state_dict() of reward {reward.name!r} failed: {error!r:.300}. Fix: let it take what "
                "state_dict() returned"
            ) from error


def build_reward_functions(
    rewards: Sequence[Reward], log: CompletionLog, early: EarlyScoring, seed: str
) -> list[Callable[..., list[float | None]]]:
    """The list that `GRPOTrainer` takes as `reward_funcs`."""
    return [
        RewardFunction(reward, log, early, seed, describes=index == 0)
        for index, reward in enumerate(rewards)
    ]
