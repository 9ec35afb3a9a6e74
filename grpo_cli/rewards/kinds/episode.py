"""The rewards `environment` and `tool_use`: what an episode was worth, and whether its calls were well-formed."""

from collections.abc import Mapping
from typing import Any

from grpo_cli.errors import RewardError
from grpo_cli.rewards.contract import EPISODE, Batch, Meta, RewardParams, Score
from grpo_cli.runs.metrics import STEP


class EnvironmentParams(RewardParams):
    """Takes the score that the environment gives an episode.

    Formula: what the environment's `reward()` (in TRL's environments `get_reward()`) returns at the end of the
    episode; named parts are added up, and each is a metric, `episode/reward/PART`. The reward does not apply to an
    episode whose environment returns None.
    Range: the environment's.

    Source: `GRPOTrainer`, `get_reward` of `environment_factory` (TRL 1.16).
    """

    kind = "environment"
    meta = Meta(needs_episode=True)

    def score(self, batch: Batch, row: int) -> Score:
        value = _read(batch, row)["reward"]
        if isinstance(value, Mapping):
            parts = ", ".join(f"{name} {part:g}" for name, part in value.items())
            return Score(sum(value.values()), parts)
        return Score(value, "" if value is not None else "the environment gave none")


class ToolUseParams(RewardParams):
    """Rewards calls that are well-formed: they can be parsed, and name a tool that is offered.

    Formula: well-formed calls / all calls of the episode; 0 without a call. Whether a call succeeds does not
    count.
    Range: [0, 1].

    Source: TRL 1.16, the metric `tools/failure_frequency`, without calls that fail.
    """

    kind = "tool_use"
    meta = Meta((0.0, 1.0), needs_episode=True)

    def score(self, batch: Batch, row: int) -> Score:
        calls = [call for call in _read(batch, row)["calls"] if call[0] != STEP]
        formed = sum(failure not in ("malformed", "unknown") for _, failure, _ in calls)
        return Score(formed / max(len(calls), 1), f"{formed} of {len(calls)} calls")


def _read(batch: Batch, row: int) -> Mapping[str, Any]:
    records = batch.columns.get(EPISODE)
    if records is None:
        raise RewardError(
            "the completions are not of episodes", "add `tools` or an `environment` to the recipe"
        )
    record: Mapping[str, Any] = records[row]
    return record
