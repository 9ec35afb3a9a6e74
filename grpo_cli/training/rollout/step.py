"""A generation step: rows are drawn, sampled and scored, then stages act on the finished rollout, which is logged.

What a recipe does not ask for is not among the stages. All of it is plain data; the one thing that knows a trainer
is the sampler.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerCallback

from grpo_cli.recipe.dataset import IMAGES, SOURCE
from grpo_cli.rewards.contract import EPISODE, Batch, Score
from grpo_cli.runs.metrics import append_record
from grpo_cli.training.rollout.rollout import (
    NO_REWARD,
    Aggregation,
    Context,
    Rollout,
    Round,
    Row,
    Scoring,
    own_numbers,
    row_ids,
)
from grpo_cli.training.rollout.samplers import Sampler
from grpo_cli.upstream.trl import FRAC_ZERO_STD, REWARD

if TYPE_CHECKING:
    from grpo_cli.runs.thumbnails import Thumbnails
    from grpo_cli.training.difficulty import DifficultySampler


class Stage(Protocol):
    """Acts on a scored rollout; all processes take part."""

    def __call__(self, rollout: Rollout) -> Rollout:
        """Return the rollout, changed or as it is."""


class PhaseClock(TrainerCallback):
    """Seconds that this process's optimizer steps spend in each phase; learning is the rest."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._wall_s = 0.0
        self._steps = 0
        self._started: float | None = None

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - started)

    def add(self, phase: str, seconds: float, *, out_of: str | None = None) -> None:
        """Add seconds to a phase, taking them out of another; only during a step."""
        if self._started is None:
            return
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        if out_of is not None:
            self._seconds[out_of] = self._seconds.get(out_of, 0.0) - seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the clock: saving, logging and evaluation do not count."""
        if self._started is not None:
            self._wall_s += time.perf_counter() - self._started
            self._started = None
            self._steps += 1

    def take(self) -> dict[str, float]:
        """Return the mean seconds of each phase since the last call, as `time/PHASE`.

        Empty if sampling was never timed: the rest would be mistaken for learning.
        """
        if not self._steps or "sampling" not in self._seconds:
            return {}
        learning = max(self._wall_s - sum(self._seconds.values()), 0.0)
        phases = {**self._seconds, "learning": learning}
        steps, self._steps, self._wall_s = self._steps, 0, 0.0
        # The names stay: a step without sampling spends 0 seconds on it.
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return {f"time/{phase}": seconds / steps for phase, seconds in phases.items()}


class GenerationStep:
    """Makes a scored rollout of the rows that TRL has drawn."""

    def __init__(
        self,
        sampler: Sampler,
        scoring: Scoring | None,
        aggregation: Aggregation,
        clock: PhaseClock,
        *,
        data: Any = None,
        difficulty: "DifficultySampler | None" = None,
        sources: Sequence[str] = (),
    ) -> None:
        """Make a step.

        Args:
            sampler: Makes completions of rows.
            scoring: Scores them; None if the sampler does.
            aggregation: Tells which groups have a signal.
            clock: Adds up how long sampling and scoring take.
            data: The training rows, for `difficulty`.
            difficulty: Draws the prompts; None if TRL does.
            sources: Of a mixture; some metrics are of each.
        """
        self._sampler = sampler
        self._scoring = scoring
        self._aggregation = aggregation
        self._clock = clock
        self._data = data
        self._difficulty = difficulty
        self._sources = sources
        self.stages: list[Stage] = []
        """What acts on rollouts that are learned from, in order."""
        self.log: Stage | None = None
        """What writes finished rollouts down, those of evaluations too."""

    def run(self, rows: list[Row], context: Context) -> Rollout:
        """Return the scored completions of a generation batch."""
        drawn: dict[str, float] = {}
        if self._difficulty is not None and context.training:
            rows, drawn = self._draw(self._difficulty, len(rows), context)
        rollout = self.sample(rows, context)
        rollout = replace(rollout, metrics=rollout.metrics | drawn)
        for stage in self.stages if context.training else ():
            rollout = stage(rollout)
        if self._sources and context.training:
            rollout.metrics |= measure_sources(rollout, self._sources, self._aggregation)
        return rollout if self.log is None else self.log(rollout)

    def _draw(
        self, difficulty: "DifficultySampler", count: int, context: Context
    ) -> tuple[list[Row], dict[str, float]]:
        """Return other rows than TRL has drawn for this process's completions, and how difficult they are."""
        size = context.group_size
        prompts = difficulty.take(count * PartialState().num_processes // size)
        metrics = {f"difficulty/{name}": value for name, value in difficulty.metrics().items()}
        own = own_numbers(len(prompts) * size)
        return [dict(self._data[prompts[number // size]]) for number in own], metrics

    def sample(self, rows: list[Row], context: Context) -> Rollout:
        """Return completions of rows with their scores."""
        parts, pending = [], []
        cuts = [slice(0, len(rows))]
        if self._scoring is not None and self._sampler.in_parts:
            cuts = self._scoring.split(len(rows), context)
        try:
            for part in cuts:
                with self._timing():
                    parts.append(self._sampler.sample(rows[part], context))
                if self._scoring is not None:
                    pending.append(self._scoring.begin(parts[-1]))
            rollout = parts[0] if len(parts) == 1 else Rollout.join(parts)
            if self._scoring is not None:
                with self._clock.inside("scoring"):
                    rollout = self._scoring.finish(rollout, pending)
        finally:
            for future in chain.from_iterable(each.values() for each in pending):
                future.cancel()
        scores, size = rollout.all_scores, context.group_size
        rollout.silent = self._aggregation.find_silent(scores, size)
        if self._difficulty is not None and context.training:
            names = self._aggregation.names
            self._difficulty.learn(rollout.rows, scores, names)
        if context.training:
            share = len(rollout.silent) * size / len(scores)
            rollout.metrics |= {FRAC_ZERO_STD: share, **measure_episodes(rollout)}
        return rollout

    @contextmanager
    def _timing(self) -> Iterator[None]:
        """Add the time inside to sampling, except for what the sampler waits for others."""
        before = self._sampler.waits()
        with self._clock.inside("sampling"):
            yield
        for phase, seconds in self._sampler.waits().items():
            self._clock.add(phase, seconds - before[phase], out_of="sampling")


def measure_episodes(rollout: Rollout) -> dict[str, float]:
    """Return the means over the episodes of all processes; nothing if a completion is one answer."""
    if rollout.episodes is None:
        return {}
    from grpo_cli.environments.episode import episode_metrics

    names = set().union(*gather_object([rollout.tools]))
    return episode_metrics(gather_object([*rollout.episodes]), sorted(names))


def measure_sources(
    rollout: Rollout, sources: Sequence[str], aggregation: Aggregation
) -> dict[str, float]:
    """Return each source's share of the groups of all processes, its reward, and its groups without signal."""
    size = rollout.context.group_size
    names = gather_object([row[SOURCE] for row in rollout.rows])[::size]
    totals = aggregation.totals(rollout.all_scores).view(-1, size)
    metrics: dict[str, float] = {}
    for source in sources:
        groups = [group for group, name in enumerate(names) if name == source]
        metrics[f"sources/{source}/share"] = len(groups) / len(names)
        if groups and [*aggregation.names] != [NO_REWARD]:
            metrics[f"sources/{source}/{REWARD}"] = totals[groups].nanmean().item()
            silent = len(set(rollout.silent).intersection(groups))
            metrics[f"sources/{source}/{FRAC_ZERO_STD}"] = silent / len(groups)
    return metrics


class CompletionLog:
    """The completions that one process has sampled.

    A group that TRL spreads over several processes has a part in each one's file, under the same step and row.
    `learned: false` marks a group that was sampled but replaced by another, or not needed.
    """

    def __init__(
        self,
        path: Path | None,
        is_complete: Callable[[Sequence[int]], bool],
        thumbnails: "Thumbnails | None" = None,
    ) -> None:
        """Make a log.

        Args:
            path: What it appends to; None writes nothing.
            is_complete: Tells whether a completion, of these tokens, was not cut off.
            thumbnails: Keeps copies of the prompts' images, if they may have some.
        """
        self.path = path
        self._thumbnails = thumbnails
        self._is_complete = is_complete

    def __call__(self, rollout: Rollout) -> Rollout:
        """Write a finished rollout, and what was sampled for it but is not learned from."""
        everything = set(range(len(rollout.rows)))
        for part in rollout.rounds or [Round(rollout, everything)]:
            own = part.rollout
            step = own.context.state.global_step
            self.add(
                own.as_batch(),
                own.judged,
                step=step,
                training=own.context.training,
                learned=part.learned,
            )
        return rollout

    def add(
        self,
        batch: Batch,
        judged: Mapping[str, Sequence[Score]],
        *,
        step: int,
        training: bool = True,
        learned: set[int] | None = None,
    ) -> None:
        """Write a batch.

        Args:
            judged: Its scores by reward.
            step: Optimizer steps so far.
            training: Whether it is not of an evaluation.
            learned: The completions that are learned from; None is all.
        """
        if self.path is None:
            return
        groups: dict[Any, list[int]] = {}
        for index, row in enumerate(row_ids(batch)):
            groups.setdefault(row, []).append(index)
        for row, members in groups.items():
            unused = learned is not None and not learned.intersection(members)
            append_record(
                self.path,
                {
                    # The step that learns from these completions, as metrics.jsonl counts.
                    "step": step + 1 if training else step,
                    "split": "train" if training else "eval",
                    "row": row,
                    "prompt": self._show_prompt(batch, members[0], (training, row)),
                    **self._describe(batch, judged, members),
                    **({"learned": False} if unused else {}),
                },
            )

    def _describe(
        self, batch: Batch, judged: Mapping[str, Sequence[Score]], members: list[int]
    ) -> dict[str, Any]:
        ids = batch.completion_ids or [[] for _ in batch.completions]
        scores = {name: [scores[index] for index in members] for name, scores in judged.items()}
        reasons = {name: [score.reason for score in own] for name, own in scores.items()}
        failed = {name: [each.failed or each.late for each in own] for name, own in scores.items()}
        return {
            "completions": [batch.texts[index] for index in members],
            "tokens": [len(ids[index]) for index in members],
            "clipped": [not self._is_complete(ids[index]) for index in members],
            "rewards": {name: [score.value for score in own] for name, own in scores.items()},
            "reasons": {name: own for name, own in reasons.items() if any(own)},
            "failed": {name: own for name, own in failed.items() if any(own)},
            **_describe_episodes(batch, members),
        }

    def _show_prompt(self, batch: Batch, index: int, key: Hashable) -> Any:
        prompt, images = batch.prompts[index], batch.columns.get(IMAGES)
        if self._thumbnails is None or images is None:
            return prompt
        return self._thumbnails.name_images(prompt, key, lambda: images[index])


def _describe_episodes(batch: Batch, members: Sequence[int]) -> dict[str, Any]:
    """Return the messages and records of episodes; nothing if a completion is one answer."""
    records = batch.columns.get(EPISODE)
    if records is None:
        return {}
    from grpo_cli.environments.episode import is_clipped

    return {
        "messages": [batch.completions[index] for index in members],
        "clipped": [is_clipped(records[index]["end"]) for index in members],
        "episodes": [records[index] for index in members],
    }
