"""Sampled completions with the scores of every reward."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from grpo_cli.data.mixing import SOURCE
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.rewards.contract import EPISODE, NO_TRAINER, Batch
from grpo_cli.rewards.scoring import Reward, weighted_sum

if TYPE_CHECKING:
    from grpo_cli.fast.completions import Completion


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
    """None if a reward does not apply."""
    reasons: dict[str, str]
    """Why, by reward that gives a reason."""
    failed: list[str]
    """Rewards whose scoring failed, so that `on_error` gave the score."""
    answers: dict[str, str | None]
    """What it answers, by reward that can say so; for majority votes."""
    total: float | None
    """The weighted sum, as TRL forms it; None if no reward gives a score."""
    messages: tuple[dict[str, Any], ...] = ()
    """All messages of an episode; empty if the answer is the only one."""
    episode: dict[str, Any] | None = None
    """The record of an episode; None if there was none."""
    source: str | None = None
    """The source of its row, if rows have one."""


def score_samples(
    rewards: Sequence[Reward],
    columns: dict[str, list[Any]],
    sampled: "Sequence[Sequence[Completion]]",
    seed: int = 0,
) -> list[ScoredCompletion]:
    """Score completions of the rows of a dataset.

    Args:
        columns: The rows, `prompt` and `row_id` among their columns.
        sampled: For each row, its completions.

    Raises:
        RewardError: A reward fails, and its `on_error` is `raise`.
    """
    flat = [(index, completion) for index, group in enumerate(sampled) for completion in group]
    repeated = {name: [values[index] for index, _ in flat] for name, values in columns.items()}
    prompts = repeated.pop("prompt")
    if any(completion.episode for _, completion in flat):
        repeated[EPISODE] = [completion.episode for _, completion in flat]
    if any(completion.images is not None for _, completion in flat):
        repeated[IMAGES] = [list(completion.images or ()) for _, completion in flat]
    chat = bool(prompts) and isinstance(prompts[0], list)
    batch = Batch(
        prompts=[c.prompt or prompt for (_, c), prompt in zip(flat, prompts, strict=True)],
        completions=[
            list(c.messages) or ([{"role": "assistant", "content": c.text}] if chat else c.text)
            for _, c in flat
        ],
        completion_ids=[list(c.token_ids) for _, c in flat],
        columns=repeated,
        extra={"trainer_state": NO_TRAINER},
    )
    by_reward = [reward.score(replace(batch, seed=f"{seed}:{reward.name}")) for reward in rewards]
    names, weights = [each.name for each in rewards], [each.weight for each in rewards]
    judges = [each for each in rewards if each.right_answer is not None]
    scored = []
    for place, (group, completion) in enumerate(flat):
        scores = [values[place] for values in by_reward]
        named = dict(zip(names, scores, strict=True))
        scored.append(
            ScoredCompletion(
                group=group,
                row=repeated["row_id"][place],
                prompt=completion.prompt or prompts[place],
                text=completion.text,
                tokens=len(completion.token_ids),
                clipped=completion.clipped,
                rewards={name: score.value for name, score in named.items()},
                reasons={name: score.reason for name, score in named.items() if score.reason},
                failed=[name for name, score in named.items() if score.failed],
                answers={each.name: each.params.vote(completion.text) for each in judges},
                total=weighted_sum(weights, [score.value for score in scores]),
                messages=completion.messages,
                episode=completion.episode,
                source=repeated[SOURCE][place] if SOURCE in repeated else None,
            )
        )
    return scored


def as_scored(record: dict[str, Any]) -> ScoredCompletion:
    """Return a completion as it was before it was written; raises `TypeError` for an earlier version's."""
    known = {field.name for field in fields(ScoredCompletion)}
    values = {name: value for name, value in record.items() if name in known}
    if all(value is None for value in values.get("rewards", {}).values()):
        # Earlier versions wrote a total of 0.
        values["total"] = None
    return ScoredCompletion(**{**values, "messages": tuple(record.get("messages", ()))})


def group_by_row(scored: Sequence[ScoredCompletion]) -> list[list[ScoredCompletion]]:
    """Return the completions of each prompt together, in the order of the data's rows."""
    groups: dict[int, list[ScoredCompletion]] = {}
    for each in scored:
        groups.setdefault(each.row, []).append(each)
    return [groups[row] for row in sorted(groups)]
