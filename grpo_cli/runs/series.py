"""The training metrics of a run under names of our own, read from its records.

The only file that knows what TRL calls its logged metrics (trl 1.16.0, `GRPOTrainer.log`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_REWARD_PREFIX, _MEAN = "rewards/", "/mean"
PHASES = ("sampling", "sync", "scoring", "learning")
"""What a training step spends its time on, in that order; `time/PHASE` in `metrics.jsonl`, in seconds."""


@dataclass(frozen=True)
class StepRecord:
    """What one logged training step says; None where it was not logged."""

    step: int
    total_steps: int | None
    reward: float | None
    reward_std: float | None = None
    """Standard deviation of the total over the batch."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Mean of each reward before its weight."""
    zero_signal: float | None = None
    """Share of groups whose rewards are all equal, so that they teach nothing."""
    zero_signal_left: float | None = None
    """The same after groups were replaced; logged with dynamic sampling alone."""
    completion_length: float | None = None
    """Mean, in tokens."""
    clipped: float | None = None
    """Share of completions cut off at `max_completion_length`."""
    entropy: float | None = None
    kl: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    """Prompt and completion tokens of all processes."""
    step_time_s: float | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each of `PHASES` that was logged."""


def read_step(record: Mapping[str, Any]) -> StepRecord | None:
    """A training record as a `StepRecord`; None for records of another kind, and damaged ones."""
    step = _number(record.get("step"))
    if record.get("event") != "train" or step is None:
        return None

    def get(name: str) -> Any:
        return _number(record.get(name))

    return StepRecord(
        step=int(step),
        total_steps=get("total_steps"),
        reward=get("reward"),
        reward_std=get("reward_std"),
        rewards=read_rewards(record),
        zero_signal=get("frac_reward_zero_std"),
        zero_signal_left=get("dynamic_sampling/frac_reward_zero_std"),
        completion_length=get("completions/mean_length"),
        clipped=get("completions/clipped_ratio"),
        entropy=get("entropy"),
        kl=get("kl"),
        grad_norm=get("grad_norm"),
        learning_rate=get("learning_rate"),
        tokens_per_s=get("tokens_per_s"),
        step_time_s=get("step_time"),
        phases_s={phase: value for phase in PHASES if (value := get(f"time/{phase}")) is not None},
    )


def read_rewards(record: Mapping[str, Any]) -> dict[str, float]:
    """The mean of each reward function in a record."""
    return {
        key[len(_REWARD_PREFIX) : -len(_MEAN)]: number
        for key, value in record.items()
        if key.startswith(_REWARD_PREFIX)
        and key.endswith(_MEAN)
        and (number := _number(value)) is not None
    }


def _number(value: Any) -> Any:
    """A number as it is; None for anything else, which only damage puts there."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
