"""The nearest values that mend a broken rule, found by trying them on the rules themselves.

Owns which settings are tried and how far. What the rules are is `rules.py`'s.
"""

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from grpo_cli.batch.inputs import BatchInputs
from grpo_cli.batch.rules import (
    DATASET,
    EVAL,
    EVAL_KNOBS,
    FRESH,
    LEAST,
    PATHS,
    SPLIT,
    find_broken_rules,
)

_MAX_CANDIDATES = 4096
"""Values tried on each side of a knob; only groups of thousands could ever need more."""


@dataclass(frozen=True)
class Suggestion:
    """The nearest values of one knob that mend a problem, all else unchanged."""

    knob: str
    """Dotted path into the recipe."""
    value: int
    """The value in use now."""
    nearest: tuple[int, ...]
    """At most one value on each side, the smaller change first."""
    complete: bool = True
    """Whether this change alone makes the whole plan valid."""

    @property
    def change(self) -> float:
        """How far the nearest value is, relative to the value in use."""
        return abs(self.nearest[0] - self.value) / self.value


def suggest(inputs: BatchInputs, path: str, senseless: Set[str]) -> list[Suggestion]:
    """The nearest values of each knob that mend `path`, preferring those that mend everything."""
    others = set(find_broken_rules(inputs, senseless)) - {path}
    found = []
    for knob in _knobs(inputs, path):
        nearest = _nearest(inputs, knob, senseless, allowed=set())
        complete = bool(nearest) and not senseless
        if not nearest and others:
            nearest = _nearest(inputs, knob, senseless, allowed=others)
        if nearest:
            found.append(Suggestion(PATHS[knob], _value(inputs, knob), nearest, complete))
    return sorted(found, key=lambda s: s.change)


def _knobs(inputs: BatchInputs, path: str) -> list[str]:
    """The fields that bear on the rule reported at `path`."""
    if path == EVAL:
        return sorted(EVAL_KNOBS, reverse=True)
    # A generation batch feeds as many micro-steps as the first of these that is set says.
    rhythms = ("generation_batch_size", "steps_per_generation", "gradient_accumulation_steps")
    rhythm = next(knob for knob in rhythms if getattr(inputs, knob) is not None)
    group = [] if path == SPLIT else ["num_generations"]
    rounds = ["max_resample"] if path == FRESH else []
    return [*rounds, *group, "per_device_train_batch_size", rhythm, "num_processes"]


def _nearest(
    inputs: BatchInputs, knob: str, senseless: Set[str], allowed: set[str]
) -> tuple[int, ...]:
    """The nearest value on each side that breaks at most the rules in `allowed`."""

    def accepts(value: int) -> bool:
        change: dict[str, Any] = {knob: value}
        return set(find_broken_rules(replace(inputs, **change), senseless)) <= allowed

    hits = [next(filter(accepts, side), None) for side in _sides(inputs, knob)]
    return tuple(sorted(filter(None, hits), key=lambda hit: abs(hit - _value(inputs, knob))))


def _sides(inputs: BatchInputs, knob: str) -> list[Iterator[int]]:
    """Candidates below and above, nearest first.

    Divisibility repeats with the group sizes, and a group is never larger than a batch, so nothing
    new lies above the ceiling.
    """
    value = _value(inputs, knob)
    stride = inputs.micro_batch if knob == "generation_batch_size" else 1
    period = stride * math.lcm(inputs.num_generations, inputs.eval_group)
    ceiling = max(value + period, inputs.generation_batch, inputs.eval_batch)
    below = range((value - 1) // stride * stride, LEAST.get(knob, 1) - 1, -stride)
    above = range((value // stride + 1) * stride, ceiling + 1, stride)
    return [islice(side, _MAX_CANDIDATES) for side in (below, above)]


def _value(inputs: BatchInputs, knob: str) -> int:
    value: int = getattr(inputs, knob) or inputs.num_generations
    return value


def describe_fix(inputs: BatchInputs, path: str, offers: list[Suggestion]) -> str:
    """The fix of a broken rule: one edit for each suggestion, or what to change together."""
    edits = [f"set {offer.knob} to {' or '.join(map(str, offer.nearest))}" for offer in offers]
    several = [f"change several of {', '.join(PATHS[knob] for knob in _knobs(inputs, path))}"]
    more = {DATASET: ["add prompts"], FRESH: ["add prompts", "remove generation.dynamic_sampling"]}
    return "; or ".join(more.get(path, []) + (edits or several))
