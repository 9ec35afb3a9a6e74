"""The completions of one generation batch, with the rows that they answer and their scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerState

from grpo_cli.data.images import without_images
from grpo_cli.rewards.contract import EPISODE, Batch, Score

Row = dict[str, Any]
"""A row of the dataset: `prompt`, `row_id` and the columns that rewards read."""
Call = tuple[str, tuple[Any, ...]]
"""The name and the arguments of a reward's call of `log_metric` or `log_extra`."""

TEXTS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL does not pass to rewards under their own names."""
_BY_COMPLETION = "rows prompt_ids completion_ids completions mask logprobs entropies images".split()
"""Fields with one entry for each completion, or None."""


@dataclass(frozen=True)
class Context:
    """When and for what completions are sampled."""

    state: TrainerState
    training: bool
    """Whether they are learned from; otherwise they are of an evaluation."""
    group_size: int

    @property
    def split(self) -> str:
        """`train` or `eval`."""
        return "train" if self.training else "eval"


@dataclass
class Rollout:
    """One process's completions of a generation batch; those of a group stand side by side."""

    context: Context
    rows: list[Row]
    """One for each completion. With episodes: with the prompts that environments added to, and their records."""
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    completions: list[Any]
    """Texts, or lists of messages, as rewards read them."""
    mask: list[list[int]] | None = None
    """1 at tokens that are learned from; None if all are."""
    logprobs: list[list[float]] | None = None
    """Of the sampler, by token; None if it returns none."""
    entropies: list[list[float]] | None = None
    """Of the distributions that the model's own tokens were sampled from; None if they were not computed."""
    images: list[list[Any]] | None = None
    """Of episodes, as the model reads them; None if TRL reads those of the rows."""
    tools: frozenset[str] = frozenset()
    """Names of the tools that episodes were offered."""
    scores: torch.Tensor | None = None
    """`[completions, rewards] float32` of **all** processes in order; NaN if a reward does not apply."""
    judged: dict[str, list[Score]] = field(default_factory=dict)
    """This process's scores with their reasons, by reward."""
    calls: list[list[Call]] = field(default_factory=list)
    """What each reward logs, for TRL to take the means over processes."""
    seconds: list[float] = field(default_factory=list)
    """How long this process waited for each reward."""
    silent: list[int] = field(default_factory=list)
    """Groups without signal, numbered over all processes."""
    rounds: "list[Round]" = field(default_factory=list)
    """What dynamic sampling sampled; empty if nothing was replaced."""
    unused_tokens: int = 0
    """Tokens of all processes that it sampled and that are not in this rollout, with their prompts."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of this batch, the same on all processes; they take precedence over TRL's of the same name."""

    @property
    def own_ids(self) -> list[list[int]]:
        """The model's own tokens of each completion: of an episode without the results of its calls."""
        if self.episodes is None or self.mask is None:
            return self.completion_ids
        pairs = zip(self.completion_ids, self.mask, strict=True)
        return [[token for token, own in zip(*pair, strict=True) if own] for pair in pairs]

    @property
    def episodes(self) -> list[Mapping[str, Any]] | None:
        """The records of the completions' episodes; None if a completion is one answer."""
        if not self.rows or EPISODE not in self.rows[0]:
            return None
        return [row[EPISODE] for row in self.rows]

    @property
    def all_scores(self) -> torch.Tensor:
        """`scores`, which have been set."""
        if self.scores is None:
            raise ValueError("nothing has scored these completions")
        return self.scores

    def own_scores(self) -> list[list[float]]:
        """Return the scores of this process's completions, NaN if a reward does not apply."""
        first = PartialState().process_index * len(self.rows)
        return self.all_scores[first : first + len(self.rows)].tolist()

    def as_batch(self, **extra: Any) -> Batch:
        """Return the completions as rewards take them; `extra` as in `Batch.extra`."""
        return make_batch(
            self.rows, [row["prompt"] for row in self.rows], self.completions, self.own_ids, **extra
        )

    def take(self, index: int) -> dict[str, Any]:
        """Return all that belongs to one completion, which may be sent to another process."""
        columns = {name: getattr(self, name) for name in _BY_COMPLETION}
        return {name: column[index] for name, column in columns.items() if column is not None}

    def put(self, index: int, completion: Mapping[str, Any]) -> None:
        """Replace one completion by what `take` returned; the score stays."""
        for name in _BY_COMPLETION:
            if name not in completion:
                setattr(self, name, None)
            elif (column := getattr(self, name)) is not None:
                column[index] = completion[name]

    def copy(self) -> "Rollout":
        """Return the same completions, which may be replaced in the copy."""
        columns = {name: getattr(self, name) for name in _BY_COMPLETION}
        copies: dict[str, Any] = {
            name: None if each is None else list(each) for name, each in columns.items()
        }
        return replace(self, scores=self.all_scores.clone(), **copies)

    @classmethod
    def join(cls, parts: "Sequence[Rollout]") -> "Rollout":
        """Return the completions of several rollouts, of which none is scored, as one."""
        columns: dict[str, Any] = {}
        for name in _BY_COMPLETION:
            own = [getattr(part, name) for part in parts]
            missing = any(column is None for column in own)
            columns[name] = None if missing else [each for column in own for each in column]
        return cls(parts[0].context, **columns)


@dataclass(frozen=True)
class Round:
    """Completions that were sampled together."""

    rollout: Rollout
    learned: set[int]
    """Those of this process that are learned from."""


def make_batch(
    rows: Sequence[Row], prompts: Sequence[Any], completions: Any, ids: Any, **extra: Any
) -> Batch:
    """Return completions with the rows that they answer, as rewards take them."""
    return Batch(
        prompts=[without_images(prompt) for prompt in prompts],
        completions=completions,
        completion_ids=ids,
        columns={name: [row[name] for row in rows] for name in rows[0] if name not in TEXTS},
        extra=extra,
    )


def own_numbers(completions: int) -> range:
    """Return the numbers of this process's completions among those of all processes."""
    state = PartialState()
    own = completions // state.num_processes
    return range(state.process_index * own, (state.process_index + 1) * own)
