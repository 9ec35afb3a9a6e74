"""The reward `reasoning_gym`: each procedural task's own scorer, guarded against answers that would run code."""

import copy
import json
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from pydantic import Field

from grpo_cli.errors import RewardError, nearest
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import OneOrMany
from grpo_cli.rewards.answers import TextOrPlace, canonical_answer, find_answer, is_explosive
from grpo_cli.rewards.contract import (
    Batch,
    Columns,
    Gold,
    Meta,
    RewardContext,
    RewardParams,
    Score,
    Scorer,
    TimeLimit,
)
from grpo_cli.rewards.kinds import find_missing

TaskScorer = Callable[[str | None, dict[str, Any]], float]

_LITERAL_TASKS = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
"""Tasks whose scorers call `eval` on an answer (reasoning-gym 0.1.25)."""
_ARITHMETIC_TASKS = frozenset(
    "countdown puzzle24 polynomial_multiplication simple_integration intermediate_integration".split()
)
"""Tasks whose scorers call sympy's `parse_expr` on an answer, which calls `eval` (0.1.25)."""
_LITERAL = re.compile(r"[\w\s,.'\"\[\]-]*")
_ARITHMETIC = re.compile(r"[\w\s+\-*/^().,=]*")
_NAME = re.compile(r"[A-Za-z_]\w+")
_FUNCTIONS = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt abs Abs pi".split()
)
_LONGEST_ARITHMETIC = 2000
_FIX = "take the rows from `dataset: {kind: reasoning_gym}`, or use another kind of reward"
_TUPLES = {"arc_agi": "output", "rearc": "output"}
"""Metadata that scorers compare as nested tuples, which JSON turns into lists."""


class ReasoningGymParams(RewardParams):
    """Scores an answer with the reasoning-gym task that generated the question.

    Formula: the task's `score_answer`, unchanged. Most tasks give 1 for a correct answer and 0 or
    a little (0.01, 0.05) for a wrong one; some give partial credit. An answer scores 0 if it makes
    the scorer raise an exception, or would run code in a scorer that evaluates text.
    Range: [0, 1] for nearly all tasks.

    Source: `reasoning_gym.dataset.ProceduralDataset.score_answer` (reasoning-gym 0.1.25).
    """

    kind = "reasoning_gym"
    meta = Meta((0.0, 1.0), right_answer=1.0)

    task: str | None = None
    """The task; leave out to read it from each row's metadata (`source_dataset`)."""
    extract: OneOrMany[TextOrPlace] = Field(default=("text",), min_length=1)
    """Where to look for the answer: one place, or a list in order; `text` is the whole completion
    (after `</think>`), stripped of white space."""

    def columns(self) -> Columns:
        return Columns(("answer", "metadata"))

    def problems(self, context: RewardContext | None = None) -> list[Issue]:
        return find_missing("reasoning_gym", "reasoning-gym", "reasoning-gym")

    def time_limit(self) -> TimeLimit:
        """Return one, as some scorers evaluate an answer; what takes too long is not right."""
        return TimeLimit(5.0, 0.0, self._score_easily)

    def gold(self, batch: Batch, row: int) -> Gold | Issue:
        try:
            entry = _read_entry(batch, row)
            self._task(entry)
        except RewardError as error:
            return error.as_issue("task")
        return Gold(entry["answer"] or "", partial(canonical_answer, places=self.extract))

    def _score_easily(self, batch: Batch, row: int) -> Score | None:
        from reasoning_gym.dataset import ProceduralDataset

        scorer = _find_scorer(self._task(_read_entry(batch, row)))
        owner = type(getattr(scorer, "__self__", None))
        compares = getattr(owner, "score_answer", None) is ProceduralDataset.score_answer
        return self.score(batch, row) if compares else None

    def build(self, context: RewardContext) -> Scorer:
        if self.task is not None:
            _find_scorer(self.task)
        return super().build(context)

    def score(self, batch: Batch, row: int) -> Score:
        entry = _read_entry(batch, row)
        task = self._task(entry)
        found = find_answer(batch.texts[row], self.extract)
        answer = found.text if found else None
        if answer is not None and not _is_safe(task, answer):
            return Score(0.0, "answer is not one the scorer may evaluate")
        scorer = _find_scorer(task)
        try:
            return Score(scorer(answer, entry))
        except Exception as error:
            # Some scorers raise on malformed answers; a scorer that cannot score the gold is broken.
            scorer(entry["answer"], entry)
            return Score(0.0, f"malformed answer ({type(error).__name__})")

    def _task(self, entry: dict[str, Any]) -> str:
        task = self.task or entry["metadata"].get("source_dataset")
        if task is None:
            raise RewardError("metadata names no source_dataset", "name the task: task: chain_sum")
        return task


@lru_cache
def _find_scorer(task: str) -> TaskScorer:
    """Return the scorer of a task; raises `RewardError` if there is no such task."""
    from reasoning_gym import factory

    if task not in factory.DATASETS:
        close = nearest(task, factory.DATASETS)
        raise RewardError(f"reasoning-gym has no task {task!r}", f"task: {close}" if close else "")
    scorer: TaskScorer = factory.get_score_answer_fn(task)
    return scorer


def _is_safe(task: str, answer: str) -> bool:
    """Return whether a task's scorer may see an answer: it runs no code, and finishes."""
    if task in _LITERAL_TASKS:
        return _LITERAL.fullmatch(answer) is not None
    if task not in _ARITHMETIC_TASKS:
        return True
    known = _FUNCTIONS.issuperset(_NAME.findall(answer))
    shaped = known and _ARITHMETIC.fullmatch(answer) is not None
    return shaped and not is_explosive(answer, _LONGEST_ARITHMETIC)


def _read_entry(batch: Batch, row: int) -> dict[str, Any]:
    cell = batch.cell("metadata", row)
    try:
        # A copy, since scorers may write to it and the completions of a group share the row.
        metadata = json.loads(cell) if isinstance(cell, str) else copy.deepcopy(cell)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RewardError(f"metadata is not JSON ({error}): {cell[:80]!r}", _FIX) from error
    if not isinstance(metadata, dict):
        raise RewardError(f"metadata should be a mapping, not {metadata!r:.80}", _FIX)
    field = _TUPLES.get(metadata.get("source_dataset", ""))
    if field in metadata:
        metadata[field] = _as_tuples(metadata[field])
    question = batch.columns["question"][row] if "question" in batch.columns else ""
    return {"question": question, "answer": batch.cell("answer", row), "metadata": metadata}


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value
