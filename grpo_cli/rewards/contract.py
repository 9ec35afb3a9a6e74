"""What every reward kind implements: its parameters, the batch it reads, the scores it returns."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple

from grpo_cli.errors import RewardError
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import Section

EPISODE = "episode"
"""The column that holds the record of each completion's episode, of recipes with tools or an environment."""
Reads = Literal["last", "model", "all"]
_STATE = {
    "epoch": 0.0,
    **dict.fromkeys(("global_step", "num_input_tokens_seen", "total_flos"), 0),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), 0),
    **dict.fromkeys(("train_batch_size", "trial_name", "trial_params", "best_metric"), None),
    **dict.fromkeys(("best_global_step", "best_model_checkpoint"), None),
    **{
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "is_hyper_param_search": False,
    },
}


class Score(NamedTuple):
    """One completion's score."""

    value: float | None
    """None if the reward does not apply to the row."""
    reason: str = ""
    """Why, in a few words, for logs."""
    failed: bool = False
    """Whether scoring failed and the recipe's `on_error` gave this score."""
    late: bool = False
    """Whether scoring was ended, at its time limit or with its process, which gave this score."""


@dataclass(frozen=True)
class RewardContext:
    """What a reward may know about the recipe around it."""

    max_completion_length: int
    """Longest completion, in tokens."""
    device: str = "cpu"
    """Device for a reward that is a model, as torch names it."""
    max_steps: int = 1
    """Planned optimizer steps of the training."""
    num_train_epochs: int = 1
    """Planned epochs, the last of which may be cut short."""

    def trainer_state(self) -> SimpleNamespace:
        """Return the `trainer_state` of batches that are scored outside of training: at its beginning.

        Source: `transformers.TrainerState`, whose fields it has.
        """
        return SimpleNamespace(
            **_STATE,
            max_steps=self.max_steps,
            num_train_epochs=self.num_train_epochs,
            log_history=[],
            stateful_callbacks={},
        )


@dataclass(frozen=True)
class Batch:
    """Completions to score, as TRL passes them; every sequence has one entry per completion."""

    prompts: Sequence[Any]
    """Texts, or lists of messages."""
    completions: Sequence[Any]
    """Texts, or lists of messages."""
    completion_ids: Sequence[Sequence[int]] | None = None
    """Token ids without padding; None if nothing was tokenized."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The dataset's columns."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else TRL passes: `trainer_state`, `log_extra`, `log_metric`."""
    positions: Sequence[int] | None = None
    """Positions of the rows in the batch they were taken from; None for a whole batch."""
    reads: Reads = "last"
    """Which messages of a completion make its text."""
    seed: str | None = None
    """Seeds the random numbers of a user's function; None leaves the process's random state alone."""

    @cached_property
    def texts(self) -> list[str]:
        """The text of each completion."""
        return [completion_text(completion, self.reads) for completion in self.completions]

    def take(self, rows: Sequence[int]) -> "Batch":
        """Return a batch of only these rows, without TRL's loggers."""
        ids, positions = self.completion_ids, self.positions
        return replace(
            self,
            prompts=[self.prompts[row] for row in rows],
            completions=[self.completions[row] for row in rows],
            completion_ids=None if ids is None else [ids[row] for row in rows],
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
            extra={"trainer_state": self.extra.get("trainer_state")},
            positions=[row if positions is None else positions[row] for row in rows],
        )

    @classmethod
    def join(cls, batches: Sequence["Batch"]) -> "Batch":
        """Return the rows of batches with the same columns as one batch, in the order of the data."""
        first = batches[0]
        ids = [batch.completion_ids for batch in batches if batch.completion_ids is not None]
        columns = {name: [batch.columns[name] for batch in batches] for name in first.columns}
        joined = cls(
            prompts=[*chain.from_iterable(batch.prompts for batch in batches)],
            completions=[*chain.from_iterable(batch.completions for batch in batches)],
            completion_ids=[*chain.from_iterable(ids)] if len(ids) == len(batches) else None,
            columns={name: [*chain.from_iterable(parts)] for name, parts in columns.items()},
        )
        rows = joined.columns["row_id"]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        return replace(joined.take(order), extra=first.extra, positions=None)

    def cell(self, column: str, row: int) -> Any:
        """Return a row's value in a column; raises `RewardError` if there is no such column."""
        if column not in self.columns:
            names = ", ".join(self.columns)
            raise RewardError(f"there is no column {column!r} (columns: {names})")
        return self.columns[column][row]

    def row_name(self, row: int) -> str:
        """Return what messages call a row: its number in the data from 1, or else in the batch."""
        ids = self.columns.get("row_id")
        if ids is not None:
            return f"row {ids[row] + 1}"
        position = row if self.positions is None else self.positions[row]
        return f"row {position + 1} of the batch"


Scorer = Callable[[Batch], Sequence[Score | Exception]]
"""Scores a batch: one `Score` per completion, or the error that prevents it. An error that is raised
fails the whole batch. A scorer with state has `state_dict` and `load_state_dict`."""


class DescribedError(RewardError):
    """A row's failure whose text already names the reward and the row."""

    row_id: int | None = None
    """The row; None if it is a batch, or not of a dataset."""
    late: bool = False
    """Whether scoring exceeded its time limit."""


class TimeLimit(NamedTuple):
    """How long one completion may take by default."""

    seconds: float
    late_score: float | None = None
    """Score of a completion that takes longer; None treats it as an error."""
    score_easily: Callable[[Batch, int], Score | None] = lambda batch, row: None
    """Returns the score of a row that needs no time limit; None if it may take long."""


@dataclass(frozen=True)
class Meta:
    """Facts about a kind that are known without scoring."""

    range: tuple[float, float] = (-math.inf, math.inf)
    """Lowest and highest score."""
    right_answer: float | None = None
    """The score of a right answer, for kinds that judge answers; accuracy is the share that gets it."""
    has_gold: bool = False
    """Whether it compares with a gold answer; so does every kind with a `right_answer`."""
    repeats_gold: bool = False
    """Whether a right answer contains all of the gold answer's text."""
    costly: bool = False
    """Whether each score takes seconds or money."""
    waits: bool = False
    """Whether it mostly waits for something outside this process."""
    needs_episode: bool = False
    """Whether it scores what happened in an episode, of which made-up answers know nothing."""
    reads_tokens: bool = False
    """Whether it needs token ids."""
    reads_images: bool = False
    """Whether it may look at the images of prompts, which the column `images` then holds."""
    named_by: str = ""
    """The parameter `file:NAME` whose NAME a reward without a `name` gets, instead of the kind's."""

    @property
    def judges(self) -> bool:
        """True if it compares with a gold answer."""
        return self.has_gold or self.right_answer is not None


class Columns(NamedTuple):
    """The dataset columns of a reward."""

    required: tuple[str, ...] = ()
    """Those without which it cannot score."""
    named: tuple[str, ...] = ()
    """Those that may hold the right answer, for kinds that cannot say which one does."""


@dataclass(frozen=True)
class Gold:
    """The gold answer of a row."""

    text: str = ""
    """A short right answer; empty if the row can be scored, but no right answer is known."""
    vote: Callable[[str], str | None] = lambda text: None
    """Returns the answer of a completion in one spelling, for majority votes."""
    issue: Issue | None = None
    """Why few right answers may equal it."""
    is_readable: Callable[[], bool] = lambda: True
    """Returns whether scoring can read it, if only a library that is slow to import can tell."""


class RewardParams(Section):
    """The parameters of one kind; a subclass's docstring says what it rewards.

    A kind implements `score` for one row, or `build` if it loads something or scores whole batches. The rest has
    defaults.
    """

    kind: ClassVar[str]
    """The kind's name in recipes."""
    meta: ClassVar[Meta] = Meta()
    """What holds whatever the parameters."""

    def details(self) -> Meta:
        """Return `meta`, with what depends on the parameters."""
        return self.meta

    def columns(self) -> Columns:
        """Return the dataset columns that it reads: the one that `answer` names, if there is such a parameter."""
        column = getattr(self, "answer", None)
        return Columns() if column is None else Columns((column,))

    def problems(self, context: RewardContext | None = None) -> list[Issue]:
        """Return what the disk, or a valid recipe around it (`context`), says is wrong; imports nothing heavy.

        The path of each is a parameter, or a dotted path below it.
        """
        return []

    def gold(self, batch: Batch, row: int) -> Gold | Issue | None:
        """Return a row's gold answer, or why the row cannot be judged; imports nothing heavy.

        An `error` is one in a single row too; None: the kind has none, or needs none for this row.
        """
        return None

    def time_limit(self) -> TimeLimit | None:
        """Return the limit if the recipe sets no `timeout_s`; None is no limit.

        With a limit, rows are scored one by one in processes that can be killed.
        """
        return None

    def score(self, batch: Batch, row: int) -> Score:
        """Score one row; what it raises is that row's failure."""
        raise NotImplementedError(f"{type(self).__name__} has neither `score` nor `build`")

    def build(self, context: RewardContext) -> Scorer:
        """Load what scoring needs (libraries, the user's own code) and return the scorer."""
        return score_rows(self.score)


def gold_column(params: RewardParams) -> tuple[str, str]:
    """Return the parameter that names the column of gold answers, and that column; empty if none does."""
    if (nested := getattr(params, "of", None)) is not None:
        parameter, column = gold_column(nested)
        return f"of.{parameter}", column
    column = getattr(params, "answer", "")
    return ("answer" if column else "", column)


def score_rows(
    score: Callable[[Batch, int], Score], map_rows: Callable[..., Iterable[Any]] = map
) -> Scorer:
    """Return a scorer of a function that scores one row; what it raises fails that row alone."""

    def score_row(batch: Batch, row: int) -> Score | Exception:
        try:
            return score(batch, row)
        except Exception as error:
            return error

    return lambda batch: list(map_rows(partial(score_row, batch), range(len(batch.completions))))


def text_of(value: Any) -> str:
    """Return the text of a prompt or completion; of messages, their contents, one per line."""
    if isinstance(value, str):
        return value
    return "\n".join(_content_of(message.get("content")) for message in value)


def completion_text(completion: Any, reads: Reads = "last") -> str:
    """Return the text of a completion: of messages the model's last one, all of the model's, or all."""
    if isinstance(completion, str) or reads == "all":
        return text_of(completion)
    own = [each for each in completion if each.get("role", "assistant") == "assistant"]
    return text_of(own[-1:] if reads == "last" else own)


def _content_of(content: Any) -> str:
    """Content may be missing (tool calls) or a list of blocks (images)."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.get("text") or "" for block in content)
