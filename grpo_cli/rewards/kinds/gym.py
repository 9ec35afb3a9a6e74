"""The reward of reasoning-gym's procedural tasks: each task's own scorer.

Owns what those scorers need and do not do themselves: JSON metadata, and a guard around the ones
that evaluate the model's text as Python.
"""

import copy
import importlib.util
import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field

from grpo_cli.errors import RewardError, SetupError, install_extra, nearest
from grpo_cli.recipe.base import OneOrMany
from grpo_cli.rewards.contract import Batch, RewardContext, RewardParams, Score, Scorer
from grpo_cli.rewards.reading.expressions import is_explosive
from grpo_cli.rewards.reading.extraction import TextOrPlace, canonical_answer, find_answer
from grpo_cli.rewards.rows import score_rows

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
_TUPLES = {"arc_agi": "output", "rearc": "output"}
"""Metadata that scorers compare as nested tuples, which JSON turns into lists."""


class ReasoningGymParams(RewardParams):
    """Rewards what the task of reasoning-gym that asked the question rewards.

    Formula: the task's `score_answer`, unchanged. Most tasks give 1 for the right answer and 0 or
    a little (0.01, 0.05) for a wrong one; some give partial credit. An answer that makes the
    scorer raise, or that would run code in one of the scorers that evaluate text, scores 0.
    Range: [0, 1] for nearly all tasks.

    Source: `reasoning_gym.dataset.ProceduralDataset.score_answer` (reasoning-gym 0.1.25).
    """

    kind: ClassVar[str] = "reasoning_gym"
    right_answer: ClassVar[float | None] = 1.0
    gold_needed: ClassVar[bool] = False

    task: str | None = None
    """The task; leave out to read it from each row's metadata (`source_dataset`)."""
    extract: OneOrMany[TextOrPlace] = Field(default=("text",), min_length=1)
    """Where the answer stands: one place or a list in order; `text` is the whole completion
    (what follows `</think>`), without the white space around it."""

    def required_columns(self) -> tuple[str, ...]:
        """Columns of rows that `dataset: {kind: reasoning_gym}` makes."""
        return ("answer", "metadata")

    def problems(self) -> list[tuple[str, str, str]]:
        """Reports reasoning-gym where it is not installed."""
        if importlib.util.find_spec("reasoning_gym") is not None:
            return []
        return [("kind", "reasoning-gym is not installed", install_extra("reasoning-gym"))]

    def default_timeout_s(self) -> float:
        """Some scorers evaluate an answer, which may take for ever."""
        return 5.0

    def late_score(self) -> float:
        """What cannot be evaluated is not right."""
        return 0.0

    def gold(self, batch: Batch, row: int) -> str | None:
        """The task's own answer; some tasks have none."""
        return _entry(batch, row)["answer"]

    def score_easily(self, batch: Batch, row: int) -> Score | None:
        """The score of a task whose scorer only compares texts, as most do."""
        entry = _entry(batch, row)
        return (
            self._score(batch, row, entry) if _scorers().only_compares(self._task(entry)) else None
        )

    def vote(self, text: str) -> str | None:
        """The answer found, numbers in one spelling."""
        return canonical_answer(text, self.extract)

    def build(self, context: RewardContext) -> Scorer:
        """Imports reasoning-gym (about a second)."""
        scorers = _scorers()
        if self.task is not None:
            scorers.find(self.task)
        return score_rows(lambda batch, row: self._score(batch, row, _entry(batch, row)))

    def _score(self, batch: Batch, row: int, entry: dict[str, Any]) -> Score:
        task = self._task(entry)
        found = find_answer(batch.texts[row], self.extract)
        return _score(task, _scorers().find(task), found.text if found else None, entry)

    def _task(self, entry: dict[str, Any]) -> str:
        task = self.task or entry["metadata"].get("source_dataset")
        if task is None:
            raise RewardError("metadata names no source_dataset; set the parameter task")
        return task


@lru_cache(maxsize=1)
def _scorers() -> "_Scorers":
    return _Scorers()


class _Scorers:
    """The scorers of the tasks met so far."""

    def __init__(self) -> None:
        try:
            from reasoning_gym import factory
        except ImportError as error:
            raise SetupError(
                f"reasoning-gym cannot be imported: {error}. Fix: {install_extra('reasoning-gym')}"
            ) from error
        self._factory = factory
        self._found: dict[str, TaskScorer] = {}

    def find(self, task: str) -> TaskScorer:
        """The scorer of a task; raises `RewardError` where there is none."""
        if task not in self._found:
            if task not in self._factory.DATASETS:
                close = nearest(task, self._factory.DATASETS)
                hint = f" Fix: task: {close}" if close else ""
                raise RewardError(f"reasoning-gym has no task {task!r}.{hint}")
            self._found[task] = self._factory.get_score_answer_fn(task)
        return self._found[task]

    def only_compares(self, task: str) -> bool:
        """Whether a task leaves scoring to reasoning-gym's comparison of texts."""
        from reasoning_gym.dataset import ProceduralDataset

        owner = type(getattr(self.find(task), "__self__", None))
        return getattr(owner, "score_answer", None) is ProceduralDataset.score_answer


def _is_safe(task: str, answer: str) -> bool:
    """Whether a task's scorer may see an answer: it runs no code, and finishes."""
    if task in _LITERAL_TASKS:
        return _LITERAL.fullmatch(answer) is not None
    if task not in _ARITHMETIC_TASKS:
        return True
    known = _FUNCTIONS.issuperset(_NAME.findall(answer))
    shaped = known and _ARITHMETIC.fullmatch(answer) is not None
    return shaped and not is_explosive(answer, _LONGEST_ARITHMETIC)


def _entry(batch: Batch, row: int) -> dict[str, Any]:
    """The row as reasoning-gym made it."""
    for name in ("answer", "metadata"):
        if name not in batch.columns:
            raise RewardError(f"there is no column {name!r}; it is made by the dataset's own kind")
    metadata = _metadata(batch.columns["metadata"][row])
    field = _TUPLES.get(metadata.get("source_dataset", ""))
    if field in metadata:
        metadata[field] = _as_tuples(metadata[field])
    questions = batch.columns.get("question")
    question = questions[row] if questions is not None else ""
    return {"question": question, "answer": batch.columns["answer"][row], "metadata": metadata}


def _metadata(written: Any) -> dict[str, Any]:
    try:
        # A copy, since scorers may write to it and the completions of a group share the row.
        metadata = json.loads(written) if isinstance(written, str) else copy.deepcopy(written)
    except json.JSONDecodeError as error:
        raise RewardError(f"metadata is not JSON ({error}): {written[:80]!r}") from error
    if not isinstance(metadata, dict):
        raise RewardError(f"metadata should be a mapping, not {metadata!r:.80}")
    return metadata


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _score(task: str, scorer: TaskScorer, answer: str | None, entry: dict[str, Any]) -> Score:
    if answer is not None and not _is_safe(task, answer):
        return Score(0.0, "answer is not one the scorer may evaluate")
    try:
        return Score(scorer(answer, entry))
    except Exception as error:
        # Some scorers raise on malformed answers; a scorer that cannot score the gold is broken.
        scorer(entry["answer"], entry)
        return Score(0.0, f"malformed answer ({type(error).__name__})")
