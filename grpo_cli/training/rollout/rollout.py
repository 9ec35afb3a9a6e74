"""The completions of a generation batch with the rows that they answer; how they are scored, and what that says.

Rewards that wait score a part of a batch in a thread while the next is sampled. Scores become totals, groups
without signal, and metrics under TRL's names.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object
from transformers import TrainerState
from trl.trainer.utils import nanstd

from grpo_cli.data.images import without_images
from grpo_cli.rewards.contract import EPISODE, Batch, Score
from grpo_cli.rewards.scoring import ROUNDING, Reward
from grpo_cli.runs.metrics import ERROR_SHARE
from grpo_cli.upstream.trl import (
    CLIPPED_RATIO,
    MEAN_LENGTH,
    REWARD,
    REWARD_STD,
    reward_metric,
)

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


LOGGERS = ("log_extra", "log_metric")
"""Functions that TRL passes to rewards."""
NO_REWARD = "none"
"""The name of the reward of a training without any."""


class _Scored(NamedTuple):
    """One reward's scores of some completions, in their order."""

    scores: list[Score]
    seconds: float
    calls: list[Call]


Pending = list[dict[str, "Future[_Scored]"]]
"""Of each part of a batch the scores by reward, while they are computed."""


class Scoring:
    """Scores the completions of a rollout with each reward."""

    def __init__(self, rewards: Sequence[Reward], seed: str, parts: int = 1) -> None:
        """Make a stage.

        Args:
            rewards: Those of the recipe; without any, all completions score 0 under `NO_REWARD`.
            seed: Of this process, for the random numbers of rewards.
            parts: In how many parts a batch is sampled, if a reward waits.
        """
        self._rewards = rewards
        self._waiting = [reward for reward in rewards if reward.waits]
        self._parts = parts
        self._seed = seed
        self._calls: dict[str, tuple[int, int]] = {}
        """By split: the step of the last batch, and its number in that step."""
        self._work: SimpleQueue[tuple[Reward, Batch, Future[_Scored]]] | None = None
        self.logging: set[str] = set()
        """Rewards that log metrics in evaluations, which are of all their batches."""

    @property
    def names(self) -> list[str]:
        """The names of the columns of scores."""
        return [reward.name for reward in self._rewards] or [NO_REWARD]

    def split(self, rows: int, context: Context) -> list[slice]:
        """Return the parts of a batch that are sampled one after the other."""
        in_parts = self._waiting and context.training
        return cut(rows, context.group_size, self._parts) if in_parts else [slice(0, rows)]

    def begin(self, part: Rollout) -> dict[str, "Future[_Scored]"]:
        """Begin to score a part of a batch in a thread, with the rewards that wait."""
        if not (self._waiting and part.context.training) or part.episodes is not None:
            return {}
        if self._work is None:
            self._work = SimpleQueue()
            # Not a pool of concurrent.futures: a process does not end before its threads do.
            thread = threading.Thread(target=self._serve, name="grpo-scoring", daemon=True)
            thread.start()
        batch = part.as_batch(trainer_state=part.context.state)
        futures: dict[str, Future[_Scored]] = {each.name: Future() for each in self._waiting}
        for reward in self._waiting:
            self._work.put((reward, batch, futures[reward.name]))
        return futures

    def finish(self, rollout: Rollout, pending: Pending) -> Rollout:
        """Return a rollout with all its scores; see `Reward.score` for what it raises.

        Args:
            pending: What `begin` returned for each of its parts.
        """
        context = rollout.context
        seed = self._next_seed(context)
        batch = rollout.as_batch(trainer_state=context.state)
        scored = [self._take(reward, batch, pending, seed, context) for reward in self._rewards]
        pairs = list(zip(scored, self._rewards, strict=True))
        judged = {reward.name: each.scores for each, reward in pairs}
        calls = [[*each.calls, *self._measure(each, reward)] for each, reward in pairs] or [[]]
        if (repeated := repeated_share(batch)) is not None:
            calls[0].append(("log_metric", ("completions/repeated_share", repeated)))
        values = [[score.value for score in scores] for scores in judged.values()]
        return replace(
            rollout,
            scores=_gather(values, len(rollout.rows)),
            judged=judged,
            calls=calls,
            seconds=[each.seconds for each in scored],
        )

    def _take(
        self, reward: Reward, batch: Batch, pending: Pending, seed: str, context: Context
    ) -> _Scored:
        parts = [futures[reward.name].result() for futures in pending if reward.name in futures]
        if not parts:
            named = replace(batch, seed=f"{self._seed}:{reward.name}:{seed}")
            return self._score(reward, named, context)
        scores = [score for part in parts for score in part.scores]
        calls = [call for part in parts for call in part.calls]
        return _Scored(scores, sum(part.seconds for part in parts), calls)

    def _score(self, reward: Reward, batch: Batch, context: Context | None = None) -> _Scored:
        calls: list[Call] = []

        def record(name: str) -> Callable[..., None]:
            return lambda *arguments: calls.append((name, arguments))

        loggers = {name: record(name) for name in LOGGERS}
        if context is not None and not context.training:
            loggers["log_metric"] = lambda *_: self.logging.add(reward.name)
        started = time.perf_counter()
        scores = reward.score(replace(batch, extra={**batch.extra, **loggers}))
        return _Scored(scores, time.perf_counter() - started, calls)

    def _measure(self, scored: _Scored, reward: Reward) -> Iterator[Call]:
        """Yield what TRL averages over the processes and puts beside its own reward metrics."""
        if reward.forgives:
            failed = sum(score.failed or score.late for score in scored.scores)
            share = failed / max(len(scored.scores), 1)
            yield "log_metric", (f"rewards/{reward.name}{ERROR_SHARE}", share)

    def _next_seed(self, context: Context) -> str:
        split, step = context.split, context.state.global_step
        last, number = self._calls.get(split, (-1, 0))
        number = number + 1 if last == step else 0
        self._calls[split] = step, number
        return f"{split}:{step}:{number}"

    def _serve(self) -> None:
        while self._work is not None:
            reward, batch, future = self._work.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._score(reward, batch))
            except BaseException as error:  # for the thread that waits
                future.set_exception(error)


def _gather(columns: list[list[float | None]], rows: int) -> torch.Tensor:
    """Return the scores of all processes, `[completions, rewards] float32`; 0 without any reward."""
    device = PartialState().device
    if not columns:
        return gather(torch.zeros(rows, 1, device=device))
    numbers = [[torch.nan if value is None else value for value in column] for column in columns]
    scores = torch.tensor(numbers, dtype=torch.float32, device=device)
    return gather(scores.T.contiguous())


def cut(size: int, group: int, parts: int) -> list[slice]:
    """Cut a batch into at most `parts` even parts of whole groups; one that splits a group stays whole."""
    if size % group:
        return [slice(0, size)]
    groups = size // group
    parts = min(parts, groups)
    edges = [groups * edge // parts * group for edge in range(parts + 1)]
    return [slice(*each) for each in pairwise(edges)]


def repeated_share(batch: Batch) -> float | None:
    """Share of this process's completions that equal another of their group; None without groups."""
    rows = row_ids(batch)
    if len(set(rows)) == len(batch.completions):
        return None
    # All messages of an episode: many end with the same answer.
    counts = Counter(zip(rows, map(str, batch.completions), strict=True))
    return sum(count for count in counts.values() if count > 1) / len(batch.completions)


def row_ids(batch: Batch) -> Sequence[Any]:
    """Return the row of each completion."""
    return batch.columns.get("row_id", range(len(batch.completions)))


_EPSILON = 1e-4
"""TRL adds this to a standard deviation that it divides by."""


@dataclass(frozen=True)
class Aggregation:
    """How the scores of a completion become its total."""

    names: Sequence[str]
    weights: torch.Tensor
    """`[rewards] float32`."""
    normalized_first: bool
    """Whether each reward is normalized within its group before the sum."""

    def find_silent(self, scores: torch.Tensor, group_size: int) -> list[int]:
        """Return the groups whose scored completions all have the same total, up to rounding.

        TRL looks for a standard deviation of 0 in float32, where the mean of eight totals of 1.3 is not 1.3: equal
        totals get advantages of about 1e-3 and are learned from. Here totals are compared in float64, up to
        rounding.

        Args:
            scores: `[completions, rewards] float32`, whole groups; NaN if a reward gave none.
            group_size: Completions of a group.
        """
        grouped = scores.double().view(-1, group_size, scores.shape[1])
        if self.normalized_first:
            rounding = ROUNDING * grouped.abs().nan_to_num().amax(1, True)
            centred = grouped - grouped.nanmean(dim=1, keepdim=True)
            centred = torch.where(centred.abs() <= rounding, 0.0, centred)
            grouped = centred / (nanstd(grouped, dim=1, keepdim=True) + _EPSILON)
        parts = grouped * self.weights.double().to(scores.device)
        unscored = scores.isnan().all(dim=1).view(-1, group_size)
        totals = parts.nansum(dim=2)
        most = totals.masked_fill(unscored, -torch.inf).amax(dim=1)
        least = totals.masked_fill(unscored, torch.inf).amin(dim=1)
        scale = parts.abs().nansum(dim=2).amax(dim=1)
        return (~(most - least > ROUNDING * scale)).nonzero().flatten().tolist()

    def totals(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each completion's scores, `[completions]`; NaN if no reward scored it."""
        totals = (scores * self.weights.to(scores.device)).nansum(dim=1)
        totals[scores.isnan().all(dim=1)] = torch.nan
        return totals

    def measure(self, scores: torch.Tensor) -> dict[str, float]:
        """Return the means and deviations that TRL logs of the scores of a batch."""
        totals = self.totals(scores)
        metrics = {REWARD: totals.nanmean().item(), REWARD_STD: nanstd(totals).item()}
        for index, name in enumerate(self.names):
            metrics[reward_metric(name)] = scores[:, index].nanmean().item()
            metrics[reward_metric(name, "std")] = nanstd(scores[:, index]).item()
        return metrics


def measure_lengths(rollout: Rollout, ended: Sequence[bool]) -> dict[str, float]:
    """Return the lengths that TRL logs, over all processes; `ended` says which completions were not cut off."""
    masks = rollout.mask or [[1] * len(ids) for ids in rollout.completion_ids]
    own = [(sum(mask), end) for mask, end in zip(masks, ended, strict=True)]
    pairs = gather_object(own)
    lengths = torch.tensor([length for length, _ in pairs]).float()
    whole = torch.tensor([length for length, end in pairs if end] or [0]).float()
    return {
        MEAN_LENGTH: lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        CLIPPED_RATIO: 1 - sum(end for _, end in pairs) / len(pairs),
        "completions/mean_terminated_length": whole.mean().item(),
        "completions/min_terminated_length": whole.min().item(),
        "completions/max_terminated_length": whole.max().item(),
    }


def count_tokens(rollout: Rollout) -> int:
    """Return the tokens of prompts and completions of all processes, as TRL counts them."""
    masks = rollout.mask or rollout.completion_ids
    lengths = [len(ids) for ids in rollout.prompt_ids]
    lengths += [sum(row) if rollout.mask else len(row) for row in masks]
    return sum(gather_object([sum(lengths)]))
