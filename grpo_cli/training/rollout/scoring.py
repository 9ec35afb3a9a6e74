"""Scores rollouts; rewards that wait score a part of a batch in a thread while the next is sampled."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import gather

from grpo_cli.rewards.contract import Batch, Score
from grpo_cli.rewards.scoring import Reward
from grpo_cli.runs.metrics import ERROR_SHARE
from grpo_cli.training.rollout.rollout import Call, Context, Rollout

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
