"""`completions/rank_N.jsonl`, one record for each group: the prompt once, its completions side by side."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.rewards.contract import EPISODE, Batch, Score
from grpo_cli.runs.metrics import append_record
from grpo_cli.training.rollout.rollout import Rollout, Round
from grpo_cli.training.rollout.scoring import row_ids

if TYPE_CHECKING:
    from grpo_cli.runs.thumbnails import Thumbnails


class CompletionLog:
    """The completions that one process has sampled.

    A group that TRL spreads over several processes has a part in each one's file, under the same step and row.
    `learned: false` marks a group that was sampled but replaced by another, or not needed.
    """

    def __init__(
        self,
        path: Path | None,
        is_complete: Callable[[Sequence[int]], bool],
        thumbnails: "Thumbnails | None" = None,
    ) -> None:
        """Make a log.

        Args:
            path: What it appends to; None writes nothing.
            is_complete: Tells whether a completion, of these tokens, was not cut off.
            thumbnails: Keeps copies of the prompts' images, if they may have some.
        """
        self.path = path
        self._thumbnails = thumbnails
        self._is_complete = is_complete

    def __call__(self, rollout: Rollout) -> Rollout:
        """Write a finished rollout, and what was sampled for it but is not learned from."""
        everything = set(range(len(rollout.rows)))
        for part in rollout.rounds or [Round(rollout, everything)]:
            own = part.rollout
            step = own.context.state.global_step
            self.add(
                own.as_batch(),
                own.judged,
                step=step,
                training=own.context.training,
                learned=part.learned,
            )
        return rollout

    def add(
        self,
        batch: Batch,
        judged: Mapping[str, Sequence[Score]],
        *,
        step: int,
        training: bool = True,
        learned: set[int] | None = None,
    ) -> None:
        """Write a batch.

        Args:
            judged: Its scores by reward.
            step: Optimizer steps so far.
            training: Whether it is not of an evaluation.
            learned: The completions that are learned from; None is all.
        """
        if self.path is None:
            return
        groups: dict[Any, list[int]] = {}
        for index, row in enumerate(row_ids(batch)):
            groups.setdefault(row, []).append(index)
        for row, members in groups.items():
            unused = learned is not None and not learned.intersection(members)
            append_record(
                self.path,
                {
                    # The step that learns from these completions, as metrics.jsonl counts.
                    "step": step + 1 if training else step,
                    "split": "train" if training else "eval",
                    "row": row,
                    "prompt": self._show_prompt(batch, members[0], (training, row)),
                    **self._describe(batch, judged, members),
                    **({"learned": False} if unused else {}),
                },
            )

    def _describe(
        self, batch: Batch, judged: Mapping[str, Sequence[Score]], members: list[int]
    ) -> dict[str, Any]:
        ids = batch.completion_ids or [[] for _ in batch.completions]
        scores = {name: [scores[index] for index in members] for name, scores in judged.items()}
        reasons = {name: [score.reason for score in own] for name, own in scores.items()}
        failed = {name: [each.failed or each.late for each in own] for name, own in scores.items()}
        return {
            "completions": [batch.texts[index] for index in members],
            "tokens": [len(ids[index]) for index in members],
            "clipped": [not self._is_complete(ids[index]) for index in members],
            "rewards": {name: [score.value for score in own] for name, own in scores.items()},
            "reasons": {name: own for name, own in reasons.items() if any(own)},
            "failed": {name: own for name, own in failed.items() if any(own)},
            **_describe_episodes(batch, members),
        }

    def _show_prompt(self, batch: Batch, index: int, key: Hashable) -> Any:
        prompt, images = batch.prompts[index], batch.columns.get(IMAGES)
        if self._thumbnails is None or images is None:
            return prompt
        return self._thumbnails.name_images(prompt, key, lambda: images[index])


def _describe_episodes(batch: Batch, members: Sequence[int]) -> dict[str, Any]:
    """Return the messages and records of episodes; nothing if a completion is one answer."""
    records = batch.columns.get(EPISODE)
    if records is None:
        return {}
    from grpo_cli.environments.episode import is_clipped

    return {
        "messages": [batch.completions[index] for index in members],
        "clipped": [is_clipped(records[index]["end"]) for index in members],
        "episodes": [records[index] for index in members],
    }
