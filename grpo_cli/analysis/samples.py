"""Sampled completions with what every reward gives them: what probing and measuring both look at.

Owns the passage from completions of a model to scores. Samples nothing and judges nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo_cli.rewards.contract import Batch, Score
from grpo_cli.rewards.scoring import Reward

if TYPE_CHECKING:
    from grpo_cli.fast.completions import Completion


NO_TRAINER = SimpleNamespace(global_step=0, epoch=0.0, max_steps=0, num_train_epochs=0)
"""What rewards that read `trainer_state` find where nothing is being trained."""


@dataclass(frozen=True)
class ScoredCompletion:
    """One sampled completion with its scores."""

    group: int
    """Which of the prompts it answers, from 0."""
    row: int
    """The row of the data the prompt is of, from 0."""
    prompt: Any
    """Text, or messages."""
    text: str
    tokens: int
    clipped: bool
    """Whether it was cut off at the longest length."""
    rewards: dict[str, float | None]
    """None where a reward does not apply."""
    reasons: dict[str, str]
    """Why, by reward that gives a reason."""
    failed: list[str]
    """Rewards whose scoring failed, so that `on_error` gave the score."""
    answers: dict[str, str | None]
    """What it answers, by reward that can say so; for majority votes."""
    total: float
    """The weighted sum, as TRL forms it."""


def score_samples(
    rewards: Sequence[Reward],
    columns: dict[str, list[Any]],
    sampled: "Sequence[Sequence[Completion]]",
    seed: int = 0,
) -> list[ScoredCompletion]:
    """Scores completions of the rows of a dataset.

    Args:
        rewards: The recipe's, built.
        columns: The rows, `prompt` and `row_id` among their columns.
        sampled: For each row, its completions.
        seed: Of the random numbers that a user's reward draws.

    Raises:
        RewardError: A reward fails, and its `on_error` is `raise`.
    """
    flat = [(index, completion) for index, group in enumerate(sampled) for completion in group]
    repeated = {name: [values[index] for index, _ in flat] for name, values in columns.items()}
    prompts = repeated.pop("prompt")
    chat = bool(prompts) and isinstance(prompts[0], list)
    batch = Batch(
        prompts=prompts,
        completions=[_as_message(c.text) if chat else c.text for _, c in flat],
        completion_ids=[list(c.token_ids) for _, c in flat],
        columns=repeated,
        extra={"trainer_state": NO_TRAINER},
    )
    scores = {
        reward.name: reward.score(replace(batch, seed=f"{seed}:{reward.name}"))
        for reward in rewards
    }
    return [
        _record(rewards, group, repeated["row_id"][at], prompts[at], completion, scores, at)
        for at, (group, completion) in enumerate(flat)
    ]


def as_scored(record: dict[str, Any]) -> ScoredCompletion:
    """A completion as it was before it was written as JSON; keys of other owners are passed over."""
    return ScoredCompletion(
        **{field.name: record[field.name] for field in fields(ScoredCompletion)}
    )


def group_by_row(scored: Sequence[ScoredCompletion]) -> list[list[ScoredCompletion]]:
    """The completions of each prompt together, in the order of the data's rows."""
    groups: dict[int, list[ScoredCompletion]] = {}
    for each in scored:
        groups.setdefault(each.row, []).append(each)
    return [groups[row] for row in sorted(groups)]


def _record(
    rewards: Sequence[Reward],
    group: int,
    row: int,
    prompt: Any,
    completion: "Completion",
    scores: dict[str, list[Score]],
    at: int,
) -> ScoredCompletion:
    own = {name: values[at] for name, values in scores.items()}
    return ScoredCompletion(
        group=group,
        row=row,
        prompt=prompt,
        text=completion.text,
        tokens=len(completion.token_ids),
        clipped=completion.clipped,
        rewards={name: score.value for name, score in own.items()},
        reasons={name: score.reason for name, score in own.items() if score.reason},
        failed=[name for name, score in own.items() if score.failed],
        answers={
            reward.name: reward.params.vote(completion.text)
            for reward in rewards
            if reward.right_answer is not None
        },
        total=sum(
            reward.weight * value
            for reward in rewards
            if (value := own[reward.name].value) is not None
        ),
    )


def _as_message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]
