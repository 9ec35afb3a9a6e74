"""Dynamic sampling: groups without signal are replaced by completions of fresh prompts.

As many fresh prompts are sampled as there are such groups, on all processes alike, and those of their groups that
have a signal take the places. Groups left without after the last round stay.

Source: DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.2. There whole batches are sampled until enough groups
have a signal; here only the prompts that are needed, and at most `max_resample` times.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from accelerate.utils import gather_object

from grpo_cli.training.rollout.rollout import (
    Aggregation,
    Context,
    Rollout,
    Round,
    Row,
    count_tokens,
    measure_lengths,
    own_numbers,
)

if TYPE_CHECKING:
    from grpo_cli.training.difficulty import DifficultySampler

_STATE = "dynamic_sampling"
"""Key of the counts in the trainer's state, which every checkpoint holds."""


def shuffled_rows(size: int, seed: int, first: int) -> Iterator[int]:
    """Yield rows without end, pass after pass, each shuffled by its own seed; skip the `first` ones."""
    for number in count(first // size):
        order = list(range(size))
        random.Random(f"{seed}/{number}").shuffle(order)
        yield from order[max(first - number * size, 0) :]


class FreshPrompts:
    """Takes fresh prompts from all training prompts in shuffled order.

    `taken`, the prompts so far with the skipped ones, is all that is needed to continue.
    """

    def __init__(self, size: int, seed: int, taken: int = 0) -> None:
        self.taken = taken
        self._order = shuffled_rows(size, seed, taken)

    def take(self, count: int, avoid: Set[int]) -> list[int]:
        """Return the next `count` different rows that are not in `avoid`."""
        rows: list[int] = []
        while len(rows) < count:
            row = next(self._order)
            self.taken += 1
            if row not in avoid and row not in rows:
                rows.append(row)
        return rows


class DynamicSampling:
    """Replaces groups without signal, in at most `max_resample` rounds."""

    def __init__(
        self,
        data: Any,
        seed: int,
        max_resample: int,
        *,
        sample: Callable[[list[Row], Context], Rollout],
        aggregation: Aggregation,
        ended: Callable[[Rollout], list[bool]],
        difficulty: "DifficultySampler | None" = None,
    ) -> None:
        """Make a stage.

        Args:
            data: The training rows.
            sample: Samples and scores rows.
            aggregation: Measures what was sampled first.
            ended: Tells which completions of a rollout were not cut off.
            difficulty: Draws the fresh prompts, if the recipe has one.
        """
        self._data = data
        self._seed = seed
        self._max_resample = max_resample
        self._sample = sample
        self._aggregation = aggregation
        self._ended = ended
        self._difficulty = difficulty
        self._indices = {row: index for index, row in enumerate(data["row_id"])}
        self._fresh: FreshPrompts | None = None

    def __call__(self, rollout: Rollout) -> Rollout:
        """Replace groups without signal; the metrics of the batch stay those of the first sampling."""
        counts = rollout.context.state.stateful_callbacks
        before = counts.get(_STATE, {"taken": 0, "prompts_seen": 0})
        if self._fresh is None or self._fresh.taken != before["taken"]:
            self._fresh = FreshPrompts(len(self._data), self._seed, before["taken"])
        size = rollout.context.group_size
        groups, resampled = len(rollout.all_scores) // size, 0
        if rollout.silent:
            rollout, resampled = self._replace(rollout)
        seen = before["prompts_seen"] + groups + resampled
        counts[_STATE] = {"taken": self._fresh.taken, "prompts_seen": seen}
        return replace(
            rollout,
            metrics=rollout.metrics
            | {
                "dynamic_sampling/rounds": max(len(rollout.rounds) - 1, 0),
                "dynamic_sampling/resampled_groups": resampled,
                "dynamic_sampling/frac_reward_zero_std": len(rollout.silent) / groups,
                "dynamic_sampling/prompts_seen": seen,
                "dynamic_sampling/epochs": seen / len(self._data),
            },
        )

    def _replace(self, first: Rollout) -> tuple[Rollout, int]:
        """Return the batch, and how many groups were sampled besides."""
        size, processes = first.context.group_size, PartialState().num_processes
        fresh = self._difficulty or self._fresh
        used = {self._indices[row] for row in gather_object([row["row_id"] for row in first.rows])}
        batch, resampled = first.copy(), 0
        silent = first.silent
        rounds = [Round(first, set(range(len(first.rows))))]
        # So many groups have completions that divide evenly among the processes. A generation batch does so too,
        # hence no round takes more prompts than a batch.
        unit = processes // math.gcd(processes, size)
        while silent and len(rounds) <= self._max_resample:
            prompts = fresh.take(math.ceil(len(silent) / unit) * unit, used)  # type: ignore[union-attr]
            used |= set(prompts)
            own = own_numbers(len(prompts) * size)
            rows = [dict(self._data[prompts[number // size]]) for number in own]
            sampled = self._sample(rows, first.context)
            useful = [group for group in range(len(prompts)) if group not in sampled.silent]
            pairs = list(zip(silent, useful, strict=False))
            silent = silent[len(pairs) :]
            resampled += len(prompts)
            learned, replaced = _move(batch, sampled, pairs)
            rounds[0].learned.difference_update(replaced)
            rounds.append(Round(sampled, learned))
        batch.rounds, batch.silent = rounds, silent
        batch.seconds = [
            sum(own) for own in zip(*(each.rollout.seconds for each in rounds), strict=True)
        ]
        batch.unused_tokens = sum(count_tokens(each.rollout) for each in rounds) - count_tokens(
            batch
        )
        batch.metrics = (
            first.metrics
            | self._aggregation.measure(first.all_scores)
            | measure_lengths(first, self._ended(first))
        )
        return batch, resampled


def _move(
    batch: Rollout, fresh: Rollout, pairs: Sequence[tuple[int, int]]
) -> tuple[set[int], set[int]]:
    """Put the completions of fresh groups in place, on whatever process they were sampled.

    Returns:
        This process's fresh completions that were used, and those of the batch that were replaced.
    """
    size, members = batch.context.group_size, range(batch.context.group_size)
    sources = {old * size + member: new * size + member for old, new in pairs for member in members}
    here, home = own_numbers(len(fresh.all_scores)), own_numbers(len(batch.all_scores))
    own = {number: number - here.start for number in sources.values() if number in here}
    moved = dict(gather_object([(number, fresh.take(index)) for number, index in own.items()]))
    replaced = set()
    for target, number in sources.items():
        batch.all_scores[target] = fresh.all_scores[number]
        if target in home:
            batch.put(target - home.start, moved[number])
            replaced.add(target - home.start)
    return set(own.values()), replaced
