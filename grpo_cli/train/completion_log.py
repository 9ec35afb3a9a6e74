"""`completions/rank_N.jsonl`: every group that was sampled, with its scores and reasons.

One record a group: the prompt once, its completions side by side. A group that TRL spreads over
several processes has a part in each one's file, under the same step and row. `learned: false` marks
a group that was sampled and gave way to another, or was not needed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_cli.rewards.contract import Batch, Score
from grpo_cli.runs.metrics import append_record


class CompletionLog:
    """Collects the scores of a batch, reward by reward, and writes the batch when it is complete."""

    def __init__(
        self,
        path: Path | None,
        reward_names: Sequence[str],
        eos_token_ids: Sequence[int],
        is_training: Callable[[], bool],
    ) -> None:
        """Starts a log.

        Args:
            path: The file to append to; None writes nothing.
            reward_names: In the order in which they are called.
            eos_token_ids: A completion that ends in none of them was cut off.
            is_training: Whether the batch in hand is for training, or for TRL's evaluation loop.
        """
        self.path = path
        self.is_training = is_training
        self._names = tuple(reward_names)
        self._eos = frozenset(eos_token_ids)
        self._scores: dict[str, Sequence[Score]] = {}
        self._held: list[list[tuple[list[int], dict[str, Any]]]] | None = None
        """Records of each batch with the rows they are of, while it is not known what is learned from."""

    @contextmanager
    def marking(self) -> Iterator[list[set[int]]]:
        """Holds records back until it is known which groups are learned from.

        Yields:
            An empty list, to be filled with the rows of each batch that are learned from. All groups of a
            batch that has no entry are taken to be.
        """
        self._held, marks = [], list[set[int]]()
        try:
            yield marks
        finally:
            held, self._held = self._held, None
            for number, batch in enumerate(held):
                for members, record in batch:
                    unused = number < len(marks) and not marks[number].intersection(members)
                    self._write({**record, "learned": False} if unused else record)

    def add(self, name: str, batch: Batch, scores: Sequence[Score], *, step: int) -> None:
        """Takes one reward's scores of a batch; the last reward's write the batch.

        Args:
            name: The reward.
            batch: What was scored.
            scores: One a completion.
            step: Optimizer steps done so far.
        """
        if self.path is None:
            return
        self._scores[name] = scores
        if name != self._names[-1]:
            return
        groups: dict[Any, list[int]] = {}
        rows = batch.columns.get("row_id", range(len(batch.completions)))
        for index, row in enumerate(rows):
            groups.setdefault(row, []).append(index)
        found = [
            (members, self._describe(batch, row, members, step)) for row, members in groups.items()
        ]
        self._scores = {}
        if self._held is not None:
            self._held.append(found)
            return
        for _, record in found:
            self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        if self.path is not None:
            append_record(self.path, record)

    def _describe(self, batch: Batch, row: Any, members: list[int], step: int) -> dict[str, Any]:
        ids = batch.completion_ids or [[] for _ in batch.completions]
        training = self.is_training()
        return {
            # The step that learns from these completions, as metrics.jsonl counts.
            "step": step + 1 if training else step,
            "split": "train" if training else "eval",
            "row": row,
            "prompt": batch.prompts[members[0]],
            "completions": [batch.texts[index] for index in members],
            "tokens": [len(ids[index]) for index in members],
            "clipped": [not ids[index] or ids[index][-1] not in self._eos for index in members],
            "rewards": {
                name: [scores[index].value for index in members]
                for name, scores in self._scores.items()
            },
            "reasons": {
                name: [scores[index].reason for index in members]
                for name, scores in self._scores.items()
                if any(scores[index].reason for index in members)
            },
        }
