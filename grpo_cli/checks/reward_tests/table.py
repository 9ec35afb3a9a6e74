"""Rows, rewards, and what the rewards give to answers of our own making."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from grpo_cli.analysis.samples import NO_TRAINER
from grpo_cli.errors import RunError
from grpo_cli.rewards.contract import Batch, RewardParams, Score
from grpo_cli.rewards.scoring import Reward

Progress = Callable[[str], None]
Encode = Callable[[str], Sequence[int]]
"""Token ids of a completion."""
Scores = Sequence[Sequence[Score] | None]
"""For each row with an answer: each reward's score."""


_SLICE = 16
"""Completions scored between two looks at the clock."""
SLOW_S = 0.5
"""Seconds a completion from which a reward counts as costly, whatever its kind."""
_SLOW_CALLS = 2
"""Slow calls that it takes: one may be the machine's doing, or the first of a reward that loads something."""


class TooSlowError(RunError):
    """The rewards took longer than they may."""


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
        self.judges = [
            index
            for index, reward in enumerate(rewards)
            if type(reward.params).gold is not RewardParams.gold
        ]
        self.seconds = [0.0] * len(rewards)
        self.completions = 0
        self._budget_s = budget_s
        self._slow: Counter[int] = Counter()
        self._encode = encode
        self._on_progress = on_progress
        state = {"trainer_state": NO_TRAINER}
        self._asked = Batch(
            self.prompts, [""] * len(self.prompts), columns=self.columns, extra=state
        )

    def row(self, row: int) -> dict[str, Any]:
        """A row's columns."""
        return {name: values[row] for name, values in self.columns.items()}

    def place(self, row: int) -> str:
        """What messages call a row."""
        return self._asked.row_name(row)

    def applying(self, index: int) -> list[int]:
        """The rows that a reward's `when` holds on."""
        condition = self.rewards[index].condition
        rows = range(len(self.prompts))
        return [row for row in rows if condition is None or condition.holds(self._asked, row)]

    def gold(self, index: int, row: int) -> str | None:
        """The gold of a row, as a reward reads it."""
        return self.rewards[index].params.gold(self._asked, row)

    def unreadable(self, index: int) -> list[int]:
        """The rows to which a reward should apply, and whose gold it cannot read."""
        return [row for row in self.applying(index) if self.gold(index, row) is None]

    def owner(self, row: int) -> int | None:
        """The first reward that judges answers and has a gold for the row."""
        for index in self.judges:
            if row in self._applying[index] and self.gold(index, row) is not None:
                return index
        return None

    @cached_property
    def _applying(self) -> dict[int, set[int]]:
        return {index: set(self.applying(index)) for index in self.judges}

    def score(
        self, texts: Sequence[str | None], what: str, *, costly: bool = True
    ) -> list[list[Score] | None]:
        """Every reward's scores of an answer to each row.

        Args:
            texts: One a row; None where there is no answer.
            what: What the answers are, for progress.
            costly: Whether rewards whose scores are dear take part; they give no score else.
        """
        rows = [row for row, text in enumerate(texts) if text is not None]
        written = [text for text in texts if text is not None]
        taken = self._asked.take(rows)
        chat = bool(rows) and not isinstance(taken.prompts[0], str)
        batch = replace(
            taken,
            completions=[_as_message(text) for text in written] if chat else written,
            completion_ids=[self._encode(text) for text in written] if self._encode else None,
            places=None,
        )
        by_reward = [
            self._score_one(index, batch, what)
            if costly or not (reward.params.costly or self._slow[index] >= _SLOW_CALLS)
            else [Score(None)] * len(rows)
            for index, reward in enumerate(self.rewards)
        ]
        found = dict(zip(rows, map(list, zip(*by_reward, strict=True)), strict=True))
        return [found.get(row) for row in range(len(texts))]

    def _score_one(self, index: int, batch: Batch, what: str) -> list[Score]:
        reward = self.rewards[index]
        self._on_progress(f"scoring {what} with {reward.name}")
        started = time.perf_counter()
        scores = self._ask(reward, batch, started)
        spent = time.perf_counter() - started
        self.seconds[index] += spent
        if scores and spent > SLOW_S * len(scores):
            self._slow[index] += 1
        if index == 0:
            self.completions += len(scores)
        return scores

    def _ask(self, reward: Reward, batch: Batch, started: float) -> list[Score]:
        """A reward's scores; in slices where its time is limited, so that a slow one is noticed."""
        size = len(batch.completions)
        step = size if self._budget_s is None else _SLICE
        scores: list[Score] = []
        for start in range(0, size, max(step, 1)):
            spent = time.perf_counter() - started + sum(self.seconds)
            if self._budget_s is not None and spent > self._budget_s:
                each = (time.perf_counter() - started) / max(len(scores), 1)
                raise TooSlowError(f"`{reward.name}` takes {each:.2g} s a completion")
            part = batch if step >= size else batch.take(range(start, min(start + step, size)))
            scores += reward.score(part)
        return scores

    def total(self, scores: Sequence[Score]) -> float:
        """The weighted sum, as TRL forms it: scores that are None do not count."""
        return sum(
            reward.weight * score.value
            for reward, score in zip(self.rewards, scores, strict=True)
            if score.value is not None
        )


def _as_message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]
