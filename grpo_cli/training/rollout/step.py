"""A generation step: rows are drawn, sampled and scored, then stages act on the finished rollout.

What a recipe does not ask for is not among the stages. All of it is plain data; the one thing that knows a trainer
is the sampler.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from accelerate import PartialState
from accelerate.utils import gather_object

from grpo_cli.data.mixing import SOURCE
from grpo_cli.training.callbacks import PhaseClock
from grpo_cli.training.rollout.rollout import Context, Rollout, Row, own_numbers
from grpo_cli.training.rollout.samplers import Sampler
from grpo_cli.training.rollout.scoring import NO_REWARD, Scoring
from grpo_cli.training.rollout.signal import Aggregation
from grpo_cli.upstream.trl import FRAC_ZERO_STD, REWARD

if TYPE_CHECKING:
    from grpo_cli.training.difficulty import DifficultySampler


class Stage(Protocol):
    """Acts on a scored rollout; all processes take part."""

    def __call__(self, rollout: Rollout) -> Rollout:
        """Return the rollout, changed or as it is."""


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
