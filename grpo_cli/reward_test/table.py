"""Rewards and rows of the data: golds, and the scores of answers to the rows."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from grpo_cli.issues import Issue
from grpo_cli.rewards.contract import Batch, Gold, Score
from grpo_cli.rewards.pool import count_workers
from grpo_cli.rewards.scoring import Reward, clip_score, weighted_sum

Progress = Callable[[str], None]
Encode = Callable[[str], Sequence[int]]
"""Token ids of a completion."""
Answers = Mapping[int, str]
"""An answer to each of some rows."""
Scores = Mapping[int, Sequence[Score]]
"""Each reward's score of the answer to a row."""


class TooSlowError(Exception):
    """The rewards take longer than they may."""


class Table:
    """Rows of the data, and rewards to score answers to them."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        columns: dict[str, list[Any]],
        encode: Encode | None,
        on_progress: Progress,
        budget_s: float | None = None,
    ) -> None:
        self.rewards = rewards
        self.columns = dict(columns)
        self.prompts = self.columns.pop("prompt")
        self.judges = [index for index, reward in enumerate(rewards) if reward.meta.judges]
        self.seconds = [0.0] * len(rewards)
        self.completions = [0] * len(rewards)
        self.scores: list[list[Score]] = [[] for _ in rewards]
        self._budget_s = budget_s
        self._encode = encode
        self._on_progress = on_progress
        self._golds: dict[int, dict[int, str]] = {}
        self.unanswered = Batch(self.prompts, [""] * len(self.prompts), columns=self.columns)

    def row(self, row: int) -> dict[str, Any]:
        """Return a row's columns."""
        return {name: values[row] for name, values in self.columns.items()}

    def row_name(self, row: int) -> str:
        """Return what messages call a row."""
        return self.unanswered.row_name(row)

    def applying(self, index: int) -> list[int]:
        """Return the rows that a reward's `when` holds on."""
        condition = self.rewards[index].condition
        rows = range(len(self.prompts))
        return [row for row in rows if condition is None or condition.holds(self.unanswered, row)]

    def golds(self, index: int) -> dict[int, str]:
        """Return the gold answers that a reward reads, by row."""
        if index not in self._golds:
            params = self.rewards[index].params
            golds = {row: params.gold(self.unanswered, row) for row in self.applying(index)}
            self._golds[index] = {
                row: gold.text
                for row, gold in golds.items()
                if isinstance(gold, Gold) and gold.text and gold.is_readable()
            }
        return self._golds[index]

    def gold_issue(self, index: int, row: int) -> Issue | None:
        """Return why a row has no gold answer that counts as right, or few answers equal it."""
        gold = self.rewards[index].params.gold(self.unanswered, row)
        return gold.issue if isinstance(gold, Gold) else gold

    def unreadable(self, index: int) -> list[int]:
        """Return the rows to which a reward should apply, and whose gold it cannot read."""
        golds = self.golds(index)
        return [row for row in self.applying(index) if row not in golds]

    @cached_property
    def owners(self) -> dict[int, int]:
        """For each row with a gold, the first reward that reads it."""
        owners = {row: index for index in reversed(self.judges) for row in self.golds(index)}
        return dict(sorted(owners.items()))

    def score(
        self, texts: Answers, what: str, *, skip: Collection[int] = ()
    ) -> dict[int, list[Score]]:
        """Return every reward's score of the answer to each row; none of rewards in `skip`.

        Raises:
            TooSlowError: The rewards take longer than they may.
        """
        rows, written = list(texts), list(texts.values())
        taken = self.unanswered.take(rows)
        chat = bool(rows) and not isinstance(taken.prompts[0], str)
        messages = [[{"role": "assistant", "content": text}] for text in written]
        batch = replace(
            taken,
            completions=messages if chat else written,
            completion_ids=[self._encode(text) for text in written] if self._encode else None,
            positions=None,
        )
        skipped = {*skip, *(n for n, each in enumerate(self.rewards) if each.meta.needs_episode)}
        by_reward = [
            [Score(None)] * len(rows) if index in skipped else self._score_one(index, batch, what)
            for index in range(len(self.rewards))
        ]
        return dict(zip(rows, map(list, zip(*by_reward, strict=True)), strict=True))

    def _score_one(self, index: int, batch: Batch, what: str) -> list[Score]:
        reward = self.rewards[index]
        self._on_progress(f"scoring {what} with {reward.name}")
        size = len(batch.completions)
        if size and not self.completions[index] and not reward.meta.costly:
            # The first call, of each process that scores, loads what the others use.
            reward.score(batch.take(range(min(size, count_workers()))))
        self._check_budget()
        started = time.perf_counter()
        scores = reward.score(batch)
        self.scores[index] += scores
        self.seconds[index] += time.perf_counter() - started
        self.completions[index] += size
        return scores

    def _check_budget(self) -> None:
        if self._budget_s is not None and sum(self.seconds) > self._budget_s:
            index = max(range(len(self.rewards)), key=lambda index: self.seconds[index])
            each = f"{self.seconds_each(index):.2g} s a completion"
            raise TooSlowError(f"`{self.rewards[index].name}` takes {each}")

    def seconds_each(self, index: int) -> float:
        """Return the seconds that a reward takes for a completion, the first one left out."""
        return self.seconds[index] / max(self.completions[index], 1)

    def total(self, scores: Sequence[Score]) -> float:
        """Return the weighted sum; 0 if no reward applies."""
        weights = [reward.weight for reward in self.rewards]
        return weighted_sum(weights, [score.value for score in scores]) or 0.0

    def is_best(self, scores: Sequence[Score]) -> bool:
        """Return whether every reward gave its highest score; False if one has none that is known."""
        return all(
            score.value is not None
            and math.isfinite(reward.meta.range[1])
            and reward.weight > 0
            and score.value >= clip_score(reward.meta.range[1], reward.clip)
            for reward, score in zip(self.rewards, scores, strict=True)
        )
