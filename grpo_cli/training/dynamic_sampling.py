"""Dynamic sampling: groups without signal are replaced by completions of fresh prompts.

As many fresh prompts are sampled as there are such groups, by TRL's own code and on all processes alike, and those
of their groups that have a signal take the places. Groups left without after the last round stay. TRL then makes
the batch of the completions in place, as if it had sampled them at once.

Source: DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.2. There whole batches are sampled until enough groups
have a signal; here as many prompts as are needed, and at most `max_resample` times.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import nanstd

from grpo_cli.rewards.scoring import ROUNDING
from grpo_cli.training.difficulty import DifficultySampler
from grpo_cli.training.reward_functions import CompletionLog

_STATE = "dynamic_sampling"
"""Key of the counts in the trainer's state, which every checkpoint holds."""
_EPSILON = 1e-4
"""TRL adds this to a standard deviation that it divides by."""


def find_silent(
    rewards: torch.Tensor, group_size: int, weights: torch.Tensor, *, normalized_first: bool
) -> list[int]:
    """Return the groups whose scored completions all have the same total, up to rounding.

    TRL looks for a standard deviation of 0 in float32, where the mean of eight totals of 1.3 is not 1.3: equal
    totals get advantages of about 1e-3 and are learned from. Here totals are compared in float64, up to rounding.

    Args:
        rewards: [completions, rewards] float32, whole groups; NaN if a reward gave none.
        group_size: Completions of a group.
        weights: Of each reward, float32.
        normalized_first: Whether each reward is normalized within its group before the sum.
    """
    grouped = rewards.double().view(-1, group_size, rewards.shape[1])
    if normalized_first:
        rounding = ROUNDING * grouped.abs().nan_to_num().amax(1, True)
        centred = grouped - grouped.nanmean(dim=1, keepdim=True)
        centred = torch.where(centred.abs() <= rounding, 0.0, centred)
        grouped = centred / (nanstd(grouped, dim=1, keepdim=True) + _EPSILON)
    parts = grouped * weights.double()
    unscored = rewards.isnan().all(dim=1).view(-1, group_size)
    totals = parts.nansum(dim=2)
    most = totals.masked_fill(unscored, -torch.inf).amax(dim=1)
    least = totals.masked_fill(unscored, torch.inf).amin(dim=1)
    scale = parts.abs().nansum(dim=2).amax(dim=1)
    return (~(most - least > ROUNDING * scale)).nonzero().flatten().tolist()


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


@dataclass(frozen=True)
class Scored:
    """Completions of this process, and the rewards of all."""

    inputs: list[Mapping[str, Any]]
    """A row of the dataset for each completion."""
    generated: list[tuple[Any, ...]]
    """For each what TRL's `_generate` returned, and the entropies of its tokens."""
    rewards: torch.Tensor
    """[completions, rewards] float32, of all processes in order."""


@dataclass
class _Filling:
    """A generation batch while groups are replaced; groups and completions are numbered over all processes."""

    scored: Scored
    silent: list[int]
    """Groups in place without signal."""
    kept: list[set[int]]
    """For each round, the rows of this process's completions that are in place; the first is TRL's own batch."""
    resampled: int = 0


class DynamicSampling:
    """Samples generation batches, and replaces groups without signal in at most `max_resample` rounds."""

    def __init__(self, trainer: Any, max_resample: int, log: CompletionLog) -> None:
        self._trainer = trainer
        self._max_resample = max_resample
        self._log = log
        self._size = trainer.num_generations
        self._data = trainer.train_dataset
        self._places = {row: place for place, row in enumerate(self._data["row_id"])}
        self._fresh: FreshPrompts | None = None

    def sample(self, inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a generation batch after replacing its groups without signal, and log how many.

        Args:
            inputs: Rows of this process; over all processes each prompt comes `num_generations` times in a row.
        """
        trainer = self._trainer
        state = trainer.state.stateful_callbacks
        counts = state.get(_STATE, {"taken": 0, "prompts_seen": 0})
        if self._fresh is None or self._fresh.taken != counts["taken"]:
            self._fresh = FreshPrompts(len(self._data), trainer.args.seed, counts["taken"])
        with self._log.marking() as marks:
            batch = trainer.make_batch(list(inputs))
            scored = trainer.scored(list(inputs))
            silent = trainer.find_silent(scored.rewards, self._size)
            filling = _Filling(scored, silent, [set(range(len(inputs)))])
            if silent:
                used = gather_object([each["row_id"] for each in inputs])
                with trainer.first_metrics_kept():
                    fresh = trainer.difficulty or self._fresh
                    self._replace(filling, fresh, {self._places[row] for row in used})
                    batch = trainer.make_batch(filling.scored.inputs, filling.scored)
            marks += filling.kept
        groups = len(scored.rewards) // self._size
        seen = counts["prompts_seen"] + groups + filling.resampled
        state[_STATE] = {"taken": self._fresh.taken, "prompts_seen": seen}
        self._log_metrics(filling, groups, seen)
        return batch

    def _log_metrics(self, filling: _Filling, groups: int, seen: int) -> None:
        metrics, prefix = self._trainer._metrics["train"], "dynamic_sampling"
        metrics[f"{prefix}/rounds"].append(len(filling.kept) - 1)
        metrics[f"{prefix}/resampled_groups"].append(filling.resampled)
        metrics[f"{prefix}/frac_reward_zero_std"].append(len(filling.silent) / groups)
        # As with `num_tokens`: the newest count, not the mean.
        metrics[f"{prefix}/prompts_seen"] = [seen]
        metrics[f"{prefix}/epochs"] = [seen / len(self._data)]

    def _replace(
        self, filling: _Filling, fresh: FreshPrompts | DifficultySampler, used: set[int]
    ) -> None:
        size, processes = self._size, self._trainer.accelerator.num_processes
        # So many groups have completions that divide evenly among the processes. A generation batch does so too,
        # hence no round takes more prompts than a batch.
        unit = processes // math.gcd(processes, size)
        while filling.silent and len(filling.kept) <= self._max_resample:
            places = fresh.take(math.ceil(len(filling.silent) / unit) * unit, used)
            used |= set(places)
            here = self._share(len(places) * size)
            rows = [dict(self._data[places[number // size]]) for number in here]
            scored = self._trainer.sample_and_score(rows)
            silent = set(self._trainer.find_silent(scored.rewards, size))
            useful = [group for group in range(len(places)) if group not in silent]
            pairs = list(zip(filling.silent, useful, strict=False))
            filling.silent = filling.silent[len(pairs) :]
            filling.resampled += len(places)
            self._move(filling, scored, pairs)

    def _share(self, completions: int) -> range:
        """Return the numbers of this process's completions, of so many on all."""
        accelerator = self._trainer.accelerator
        own = completions // accelerator.num_processes
        return range(accelerator.process_index * own, (accelerator.process_index + 1) * own)

    def _move(self, filling: _Filling, fresh: Scored, pairs: Sequence[tuple[int, int]]) -> None:
        """Put the completions of fresh groups in place, on whatever process they were sampled."""
        size, target = self._size, filling.scored
        sources = {
            old * size + member: new * size + member for old, new in pairs for member in range(size)
        }
        here, home = self._share(len(fresh.rewards)), self._share(len(target.rewards))
        own = {number: number - here.start for number in sources.values() if number in here}
        sent = [(number, fresh.inputs[row], fresh.generated[row]) for number, row in own.items()]
        moved = {number: row for number, *row in gather_object(sent)}
        for place, number in sources.items():
            target.rewards[place] = fresh.rewards[number]
            if place in home:
                row = place - home.start
                target.inputs[row], target.generated[row] = moved[number]
                filling.kept[0].discard(row)
        filling.kept.append(set(own.values()))
