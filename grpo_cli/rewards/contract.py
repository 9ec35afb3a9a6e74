"""What every reward kind has in common: the batch it reads, the scores it gives, its parameters.

Owns the types only. Knows no kind (that is `registry.py`) and calls none (that is `scoring.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from grpo_cli.errors import RewardError
from grpo_cli.recipe.base import Section


class Score(NamedTuple):
    """One completion's score."""

    value: float | None
    """The score; None where this reward does not apply to the row."""
    reason: str = ""
    """Why, in a few words, for logs."""
    failed: bool = False
    """Whether scoring failed and the recipe's `on_error` gave this score."""


@dataclass(frozen=True)
class Batch:
    """Completions to score, as TRL hands them over; every sequence has one entry a completion."""

    prompts: Sequence[Any]
    """Texts, or lists of messages."""
    completions: Sequence[Any]
    """Texts, or lists of messages."""
    completion_ids: Sequence[Sequence[int]] | None = None
    """Token ids of the completions, without padding; None where nothing was tokenized."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The dataset's columns."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else TRL passes: `trainer_state`, `log_extra`, `log_metric`."""
    places: Sequence[int] | None = None
    """Where the rows stood in the batch they were taken from; None where this is that batch."""
    seed: str | None = None
    """Of the random numbers that a user's reward draws; None leaves the process's random state to it."""

    @cached_property
    def texts(self) -> list[str]:
        """The text of each completion."""
        return [text_of(completion) for completion in self.completions]

    def take(self, rows: Sequence[int]) -> "Batch":
        """The batch that holds nothing but `rows`, and logs nothing."""
        ids, places = self.completion_ids, self.places
        return replace(
            self,
            prompts=[self.prompts[row] for row in rows],
            completions=[self.completions[row] for row in rows],
            completion_ids=None if ids is None else [ids[row] for row in rows],
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
            extra={"trainer_state": self.extra.get("trainer_state")},
            places=[row if places is None else places[row] for row in rows],
        )

    def row_name(self, row: int) -> str:
        """What messages call a row: its number in the data, from 1, as the checks count; else in the batch."""
        ids = self.columns.get("row_id")
        if ids is not None:
            return f"row {ids[row] + 1}"
        return f"row {(row if self.places is None else self.places[row]) + 1} of the batch"


Scorer = Callable[[Batch], Sequence[Score | Exception]]
"""Scores a batch: one `Score` a completion, in order, or the error that stands in its way. An error
that is raised instead is the whole batch's. One with a state has `state_dict` and `load_state_dict`."""


class DescribedError(RewardError):
    """A row's failure whose text names the reward and the row already."""


@dataclass(frozen=True)
class RewardContext:
    """What a reward may know about the recipe around it."""

    max_completion_length: int
    """Longest completion, in tokens."""
    device: str = "cpu"
    """Where a reward that is a model of its own should run, as torch names it."""


class RewardParams(Section):
    """The parameters of one kind; a subclass's docstring says what it rewards."""

    kind: ClassVar[str]
    """The kind's name in recipes."""
    right_answer: ClassVar[float | None] = None
    """The score of a right answer, for kinds that judge answers; accuracy is the share that gets it."""

    highest: ClassVar[float | None] = None
    """The best score there is, for kinds that judge form; None where it depends on parameters."""
    gold_needed: ClassVar[bool] = True
    """Whether a kind that judges answers scores nothing where `gold` gives None."""
    costly: ClassVar[bool] = False
    """Whether each score takes seconds or money."""

    @classmethod
    def default_name(cls, params: Mapping[str, Any]) -> str:
        """What a reward with these parameters (as written) is called where it has no name."""
        return cls.kind

    def required_columns(self) -> tuple[str, ...]:
        """Dataset columns without which this reward cannot score."""
        return ()

    def problems(self) -> list[tuple[str, str, str]]:
        """What the disk says is wrong: (parameter path, message, fix). Imports nothing heavy."""
        return []

    def conflicts(self, context: RewardContext) -> list[tuple[str, str, str]]:
        """What contradicts the recipe around it: (parameter path, message, fix)."""
        return []

    def gold(self, batch: Batch, row: int) -> str | None:
        """A short text that answers the row rightly, for kinds that judge answers; None where there is none."""
        return None

    def gold_source(self) -> tuple[str, str] | None:
        """The parameter that names the column of golds, and that column; None where there is neither."""
        column = getattr(self, "answer", None)
        return None if column is None else ("answer", column)

    def has_gold(self, batch: Batch, row: int) -> bool:
        """Whether `gold` finds something; imports nothing heavy, and where in doubt says yes."""
        return self.gold(batch, row) is not None

    def gold_fault(self, batch: Batch, row: int) -> tuple[str, str] | None:
        """Why there is nothing to judge a row by: (message, fix); None where there is. Imports nothing heavy."""
        source = self.gold_source()
        if source is None or not self.gold_needed or self.has_gold(batch, row):
            return None
        parameter, column = source
        return (
            "the gold cannot be read, so the reward gives no score: "
            f"{batch.columns[column][row]!r:.80}",
            f"name the column that holds it (`{parameter}: …`), or {suggest_extraction(column)}",
        )

    def repeats_gold(self) -> bool:
        """Whether a right answer holds all of the gold's text."""
        return False

    def vote(self, text: str) -> str | None:
        """The answer that a completion gives, in one spelling, for majority votes; None where it gives none."""
        return None

    def reads_tokens(self) -> bool:
        """Whether it cannot score completions without token ids."""
        return False

    def default_timeout_s(self) -> float | None:
        """Seconds a completion may take where the recipe sets no `timeout_s`; None is no limit.

        With a limit, rows are scored one by one in processes of their own, which can be killed.
        """
        return None

    def waits(self, *, limited: bool) -> bool:
        """Whether it mostly waits for something outside of this process, and may do so on any thread.

        Args:
            limited: Whether the recipe sets `timeout_s`.
        """
        return False

    def late_score(self) -> float | None:
        """What a completion gets that takes too long; None where that is a failure.

        Kinds whose time is spent on what the model wrote give a score; a user's own code fails.
        """
        return None

    def warm_up(self) -> None:
        """Loads, before a time limit runs, what the first row would load."""

    def score_easily(self, batch: Batch, row: int) -> Score | None:
        """The score of a row that needs no time limit; None where it may take long."""
        return None

    def build(self, context: RewardContext) -> Scorer:
        """Loads what scoring needs (libraries, the user's own code) and returns the scorer."""
        raise NotImplementedError


def text_of(value: Any) -> str:
    """The text of a prompt or completion: itself, or its messages' contents, one a line."""
    if isinstance(value, str):
        return value
    return "\n".join(_content_of(message.get("content")) for message in value)


def suggest_extraction(column: str) -> str:
    """The edit that takes answers out of a column of whole solutions."""
    return (
        "take the answer out of it with a `regex` under `dataset.columns`, such as "
        f"`{column}: {{from: {column}, regex: '####\\s*(.+)$'}}`"
    )


def _content_of(content: Any) -> str:
    """A message's text; content may be missing (tool calls) or a list of blocks (images)."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.get("text") or "" for block in content)
