"""Groups of completions, sampled and scored while the trainer learns: what `AsyncGRPOTrainer` learns from.

Owns the order of prompts, how far sampling runs ahead, advantages, and the threads. How completions are
sampled is a `Sampler`'s; that those from weights too old are left out is TRL's.

Implements `RolloutWorkerProtocol` of trl 1.16.0. Its own worker scores in another process, which rewards
would have to be sent to.
"""

import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import fmean, stdev
from typing import Any, NamedTuple, Protocol

import numpy
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from grpo_cli.errors import RunError
from grpo_cli.rewards.contract import Batch, Score
from grpo_cli.rewards.scoring import Reward
from grpo_cli.rewards.totals import add_up, are_equal

_LOOK_S = 0.05
_TINY = 1e-4
"""Added to a group's deviation; as `GRPOTrainer` does."""


class Sampled(NamedTuple):
    """One completion from a sampler."""

    token_ids: list[int]
    """With the end-of-sequence token, where there is one."""
    logprobs: list[float]
    """Of each token, under the weights that sampled it."""
    clipped: bool
    """Whether it was cut off at the greatest length."""


class Sampler(Protocol):
    """Samples completions of a prompt; from several threads at once."""

    def __call__(self, prompt_ids: Sequence[int], count: int) -> list[Sampled]:
        """That many completions of one prompt.

        Raises:
            RunError: There is nobody to sample any more.
        """


@dataclass(frozen=True)
class RolloutPlan:
    """What is sampled, and how far ahead."""

    rows: Sequence[Mapping[str, Any]]
    """The prompts with their columns."""
    group: int
    """Completions of a prompt."""
    ahead: int
    """Completions that may be sampled, and not yet learned from."""
    workers: int
    """Groups that are sampled at a time."""
    seed: int
    """Of the order of prompts."""
    first: int = 0
    """Groups that were learned from before."""

    def order(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The groups' numbers and prompts, epoch after epoch, without end."""
        number = 0
        for epoch in count():
            places = list(range(len(self.rows)))
            random.Random(f"{self.seed}/{epoch}").shuffle(places)
            for place in places:
                if number >= self.first:
                    yield number, self.rows[place]
                number += 1


class _Group(NamedTuple):
    number: int
    row: Mapping[str, Any]
    version: int
    prompt_ids: list[int]
    sampled: list[Sampled]


@dataclass
class Rollouts:
    """Threads that sample, one that scores, and the queue that TRL empties."""

    plan: RolloutPlan
    sampler: Sampler
    rewards: Sequence[Reward]
    encode: Callable[[Any], list[int]]
    """The tokens of a prompt."""
    read: Callable[[Any, Sequence[int], Sequence[Sequence[int]]], list[Any]]
    """A prompt's completions as rewards take them, from its tokens and theirs."""
    while_waiting: Callable[[], None]
    """Called now and then while the trainer waits; ends the training by raising."""
    on_scored: Callable[[str, Batch, Sequence[Score]], None] = lambda name, batch, scores: None
    """Told of every reward's scores of a group."""
    read_state: Callable[[], Any] = lambda: None
    """The trainer's state, for rewards that look at it."""
    rollout_buffer: "queue.Queue[RolloutSample]" = field(default_factory=queue.Queue)
    metrics_queue: "queue.Queue[dict[str, float]]" = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self._version = 0
        self._failure: BaseException | None = None
        self._progress = time.monotonic()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._under_way = 0
        self._unscored: queue.SimpleQueue[_Group] = queue.SimpleQueue()

    def skip(self, groups: int) -> None:
        """Begins behind groups that were learned from before."""
        self.plan = replace(self.plan, first=groups)

    def start(self) -> None:
        """Starts the threads; they end with the process."""
        self._order = self.plan.order()
        self._progress = time.monotonic()
        works = [self._sample] * self.plan.workers + [self._score]
        for work in works:
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def stop(self) -> None:
        """Asks the threads to end; they do after what they have in hand."""
        self._ended.set()

    def update_model_version(self, model_version: int) -> None:
        """Notes which weights samples come from, from now on."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Says why no samples come, where none will; TRL asks while it waits for some.

        Raises:
            RunError: Nothing was got done for too long.
        """
        self.while_waiting()
        if self._failure is not None:
            raise self._failure
        still_s = time.monotonic() - self._progress
        if still_s > stale_after_s:
            raise RunError(
                f"no completion was sampled or scored for {still_s:.0f} s. Fix: see the server's log in logs/; "
                "go on with --resume"
            )

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # for the thread that waits
            self._failure = self._failure or error
            self._ended.set()

    def _sample(self) -> None:
        while (taken := self._take_turn()) is not None:
            number, row, prompt_ids = taken
            version = self._version
            sampled = self.sampler(prompt_ids, self.plan.group)
            self._progress = time.monotonic()
            self._unscored.put(_Group(number, row, version, prompt_ids, sampled))

    def _take_turn(self) -> tuple[int, Mapping[str, Any], list[int]] | None:
        """The next group, as soon as there is room for it; None at the end."""
        while not self._ended.is_set():
            with self._lock:
                waiting = self.rollout_buffer.qsize() + self._under_way * self.plan.group
                if waiting + self.plan.group <= self.plan.ahead:
                    self._under_way += 1
                    self._progress = time.monotonic()
                    number, row = next(self._order)
                    return number, row, self.encode(row["prompt"])
            self._ended.wait(_LOOK_S)
        return None

    def _score(self) -> None:
        while not self._ended.is_set():
            try:
                group = self._unscored.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            samples = self._make_samples(group)
            with self._lock:
                for sample in samples:
                    self.rollout_buffer.put(sample)
                self._under_way -= 1
            self._progress = time.monotonic()

    def _make_samples(self, group: _Group) -> list[RolloutSample]:
        ids = [each.token_ids for each in group.sampled]
        prompt, size = group.row["prompt"], len(ids)
        names = [name for name in group.row if name != "prompt"]
        with self._lock:  # a tokenizer is no thread's alone
            completions = self.read(prompt, group.prompt_ids, ids)
        batch = Batch(
            prompts=[prompt] * size,
            completions=completions,
            completion_ids=ids,
            columns={name: [group.row[name]] * size for name in names},
            extra={"trainer_state": self.read_state()},
        )
        scores: dict[str, list[float | None]] = {}
        for reward in self.rewards:
            found = reward.score(batch)
            self.on_scored(reward.name, batch, found)
            scores[reward.name] = [score.value for score in found]
        weights = [reward.weight for reward in self.rewards]
        totals = [add_up(weights, values) for values in zip(*scores.values(), strict=True)]
        scale = max(
            sum(abs(weight * (value or 0.0)) for weight, value in zip(weights, values, strict=True))
            for values in zip(*scores.values(), strict=True)
        )
        advantages, spread = compare(totals, scale)
        return [
            _as_sample(
                group,
                place,
                batch.completions[place],
                advantages[place],
                {
                    "reward": totals[place],
                    "reward_std": spread,
                    "frac_reward_zero_std": float(spread == 0),
                    **{
                        f"rewards/{name}/mean": math.nan if values[place] is None else values[place]
                        for name, values in scores.items()
                    },
                },
            )
            for place in range(size)
        ]


def compare(totals: Sequence[float], scale: float | None = None) -> tuple[list[float], float]:
    """The advantages of a group, and its deviation; 0 for completions without a reward.

    Args:
        totals: Of each completion; NaN if no reward scored it.
        scale: As `are_equal` takes it.

    Source: `GRPOTrainer` (trl 1.16.0) with `scale_rewards: group`.
    """
    if are_equal(totals, scale):
        return [0.0] * len(totals), 0.0
    known = [total for total in totals if not math.isnan(total)]
    mean, spread = fmean(known), stdev(known)
    return [
        0.0 if math.isnan(total) else (total - mean) / (spread + _TINY) for total in totals
    ], spread


def _as_sample(
    group: _Group, place: int, completion: Any, advantage: float, metrics: dict[str, Any]
) -> RolloutSample:
    sampled, asked = group.sampled[place], len(group.prompt_ids)
    return RolloutSample(
        prompt=group.row["prompt"],
        completion=completion,
        input_ids=numpy.array([*group.prompt_ids, *sampled.token_ids]),
        completion_mask=numpy.array([0] * asked + [1] * len(sampled.token_ids)),
        old_log_probs=numpy.array([0.0] * asked + sampled.logprobs, dtype=numpy.float32),
        advantage=advantage,
        model_version=group.version,
        group_id=group.number,
        metrics={
            **metrics,
            "completions/mean_length": float(len(sampled.token_ids)),
            "completions/clipped_ratio": float(sampled.clipped),
        },
        enqueued_at=time.time(),
    )
