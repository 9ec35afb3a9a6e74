"""Dynamic sampling: groups without signal give way to completions of fresh prompts.

A group whose completions all have the same total reward has no advantage and teaches nothing. As many fresh
prompts are sampled as there are such groups, by TRL's own code and on all processes alike, and the groups
among them that have a signal take the places. What is still without one after the last round stays.

Owns which groups are replaced by which. TRL's tensors are `sampled_rows.py`'s, its rewards
`group_signal.py`'s, and the order of fresh prompts `fresh_prompts.py`'s.

Source: DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.2. There whole batches are sampled until enough
groups have a signal; here as many prompts as are needed, and at most `max_resample` times.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object

from grpo_cli.fast.batches import loss_mask
from grpo_cli.train.completion_log import CompletionLog
from grpo_cli.train.fresh_prompts import FreshPrompts
from grpo_cli.train.group_signal import GroupSignal
from grpo_cli.train.sampled_rows import Row, cut_rows, join_rows

_STATE = "dynamic_sampling"
"""Under this name the trainer's state, and so every checkpoint, has the counts from which a run goes on."""


@dataclass(frozen=True)
class Sampled:
    """What TRL sampled and scored at a time."""

    batch: dict[str, Any]
    """As TRL makes it, of this process's completions."""
    rewards: torch.Tensor
    """[completions, rewards] float32, those of all processes one after the other."""


class Ask(Protocol):
    """Samples and scores rows by TRL's own code; all processes ask as often, and for as many."""

    def __call__(self, rows: list[Any], *, fresh: bool) -> Sampled:
        """Asks.

        Args:
            rows: Of this process; over all processes each prompt comes `num_generations` times in a row.
            fresh: Whether they stand in for others.
        """


@dataclass(frozen=True)
class Filled:
    """A generation batch after its groups without signal were replaced."""

    batch: dict[str, Any]
    """As TRL makes it."""
    rates: dict[str, float]
    """Metrics of this batch."""
    totals: dict[str, float]
    """Metrics of the whole run so far."""


@dataclass
class _Filling:
    """A generation batch while groups are replaced; groups and completions are numbered over all processes."""

    rewards: torch.Tensor
    """Of the completions in place; as in `Sampled`."""
    silent: list[int]
    """Groups in place without signal."""
    moved: dict[int, Row]
    """Completions that took a place in this process's batch, by their row there."""
    kept: list[set[int]]
    """Of each time that TRL was asked, the completions of this process that are in place, by their rows then."""
    resampled: int = 0
    """Groups sampled to replace others."""
    replaced: int = 0
    """Groups that were."""


class DynamicSampling:
    """Samples generation batches in which groups have a signal, as far as a few rounds can get them there."""

    def __init__(self, trainer: Any, max_resample: int, log: CompletionLog) -> None:
        """Prepares it; nothing is sampled yet.

        Args:
            trainer: The `GRPOTrainer`; its training data has `row_id`s.
            max_resample: Rounds at most.
            log: Of completions; marks those that are not learned from.
        """
        self._trainer = trainer
        self._max_resample = max_resample
        self._log = log
        self._signal = GroupSignal.of(trainer, trainer.num_generations)
        self._data = trainer.train_dataset
        self._places = {row: place for place, row in enumerate(self._data["row_id"])}
        self._fresh: FreshPrompts | None = None

    def sample(self, inputs: Sequence[Mapping[str, Any]], ask: Ask) -> Filled:
        """Samples a generation batch, and replaces its groups without signal.

        Args:
            inputs: Rows of this process, as for `ask`.
            ask: Samples.

        Raises:
            RunError: The batch holds what cannot be moved from one to another.
        """
        state = self._trainer.state.stateful_callbacks
        counts = state.get(_STATE, {"taken": 0, "prompts_seen": 0})
        fresh = self._open_order(counts["taken"])
        with self._log.marking() as marks:
            first = ask(list(inputs), fresh=False)
            silent = self._signal.find_silent(first.rewards)
            filling = _Filling(first.rewards.clone(), silent, {}, [set(range(len(inputs)))])
            if silent:
                self._replace(filling, fresh, self._find_places(inputs), ask)
            marks += filling.kept
        groups = len(first.rewards) // self._signal.group_size
        seen = counts["prompts_seen"] + groups + filling.resampled
        state[_STATE] = {"taken": fresh.taken, "prompts_seen": seen}
        return Filled(
            self._merge(first.batch, filling) if filling.replaced else first.batch,
            {
                "dynamic_sampling/rounds": len(filling.kept) - 1,
                "dynamic_sampling/resampled_groups": filling.resampled,
                "dynamic_sampling/frac_reward_zero_std": len(filling.silent) / groups,
            },
            {
                "dynamic_sampling/prompts_seen": seen,
                "dynamic_sampling/epochs": seen / len(self._data),
            },
        )

    def _open_order(self, taken: int) -> FreshPrompts:
        if self._fresh is None or self._fresh.taken != taken:
            self._fresh = FreshPrompts(len(self._data), self._trainer.args.seed, taken)
        return self._fresh

    def _find_places(self, inputs: Sequence[Mapping[str, Any]]) -> set[int]:
        """Where the prompts of a batch stand in the data, those of all processes."""
        return {self._places[row] for row in gather_object([each["row_id"] for each in inputs])}

    def _replace(self, filling: _Filling, fresh: FreshPrompts, used: set[int], ask: Ask) -> None:
        """Puts groups with a signal into the places of those without, round by round."""
        while filling.silent and len(filling.kept) <= self._max_resample:
            places = fresh.take(self._round_up(len(filling.silent)), used)
            used |= set(places)
            found = self._ask_for(places, ask)
            without = set(self._signal.find_silent(found.rewards))
            teaching = [group for group in range(len(places)) if group not in without]
            pairs = list(zip(filling.silent, teaching, strict=False))
            filling.silent = filling.silent[len(pairs) :]
            filling.resampled += len(places)
            filling.replaced += len(pairs)
            self._move(filling, found, self._spread(pairs))

    def _round_up(self, groups: int) -> int:
        """At least so many groups whose completions divide evenly among the processes.

        A generation batch holds such a number of groups, so no round takes more prompts than a batch.
        """
        processes = self._trainer.accelerator.num_processes
        unit = processes // math.gcd(processes, self._signal.group_size)
        return math.ceil(groups / unit) * unit

    def _ask_for(self, places: Sequence[int], ask: Ask) -> Sampled:
        size = self._signal.group_size
        here = self._share(len(places) * size)
        return ask([dict(self._data[places[number // size]]) for number in here], fresh=True)

    def _share(self, completions: int) -> range:
        """The numbers of this process's completions, of so many on all."""
        accelerator = self._trainer.accelerator
        own = completions // accelerator.num_processes
        return range(accelerator.process_index * own, (accelerator.process_index + 1) * own)

    def _spread(self, pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Completion by completion where each comes from, of groups and what replaces them."""
        size = self._signal.group_size
        return {
            place * size + at: fresh * size + at for place, fresh in pairs for at in range(size)
        }

    def _move(self, filling: _Filling, found: Sampled, sources: Mapping[int, int]) -> None:
        """Puts fresh completions into their places, wherever they were sampled."""
        here, home = self._share(len(found.rewards)), self._share(len(filling.rewards))
        own = [number for number in sources.values() if number in here]
        rows = cut_rows(found.batch, self._pad_token_id, [number - here.start for number in own])
        packed = [{name: part.cpu() for name, part in row.items()} for row in rows]
        sent = dict(gather_object(list(zip(own, packed, strict=True))))
        for place, number in sources.items():
            filling.rewards[place] = found.rewards[number]
            if place in home:
                filling.moved[place - home.start] = sent[number]
                filling.kept[0].discard(place - home.start)
        filling.kept.append({number - here.start for number in own})

    def _merge(self, batch: Mapping[str, Any], filling: _Filling) -> dict[str, Any]:
        """TRL's batch of this process with the completions that took a place, counted and scaled anew."""
        accelerator = self._trainer.accelerator
        home = self._share(len(filling.rewards))
        rows = cut_rows(batch, self._pad_token_id, range(len(home)))
        for at, row in filling.moved.items():
            rows[at] = {name: part.to(accelerator.device) for name, part in row.items()}
        merged = join_rows(rows, self._pad_token_id, self._trainer.pad_to_multiple_of)
        if self._signal.scales_by_batch:
            merged["advantages"] = self._signal.advantages(filling.rewards)[home.start : home.stop]
        merged["num_items_in_batch"] = accelerator.gather(loss_mask(merged).sum()).sum()
        return merged

    @property
    def _pad_token_id(self) -> int:
        return int(self._trainer.processing_class.pad_token_id)
