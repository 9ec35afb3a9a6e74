"""The settings of a batch, the rules they must meet, and the nearest values that fix a broken rule."""

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from grpo_cli.errors import Problem

FRESH_PROMPTS = "generation.dynamic_sampling.max_resample"
_TRAINING = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"]
_GENERATION = ["num_generations", "steps_per_generation", "generation_batch_size"]
PATHS = {
    "num_processes": "launch.num_processes",
    "max_resample": FRESH_PROMPTS,
    **{field: f"training.{field}" for field in [*_TRAINING, "per_device_eval_batch_size"]},
    **{field: f"generation.{field}" for field in [*_GENERATION, "num_generations_eval"]},
}
"""Recipe keys of the integers that must be positive."""
SPLIT, GROUPS = PATHS["generation_batch_size"], PATHS["num_generations"]
DATASET, EVAL = "dataset", PATHS["per_device_eval_batch_size"]
"""Recipe keys that broken rules are reported at."""
DURATION = {"max_steps", "num_train_epochs"}
_MINIMUM = {"num_generations": 2}
"""Smallest valid values other than 1."""
_EVAL_FIELDS = {"per_device_eval_batch_size", "num_generations_eval"}
_EVAL_KNOBS = _EVAL_FIELDS | {"num_processes"}
NOT_BATCH = _EVAL_FIELDS | DURATION | {"eval_dataset_size"}
"""Fields the training batch does not depend on."""
_MAX_EPOCHS = 1e9
_MAX_CANDIDATES = 4096
"""Values tried on each side of a knob; only groups of thousands could need more."""


@dataclass(frozen=True, kw_only=True)
class BatchInputs:
    """The settings that decide the arithmetic, with TRL's names and defaults."""

    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_processes: int = 1
    num_generations: int = 8
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    max_resample: int | None = None
    """Rounds in which groups without signal are replaced; None without dynamic sampling."""
    num_iterations: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    """Optimizer steps; negative means that `num_train_epochs` decides."""
    dataset_size: int | None = None
    """Training prompts; None if unknown."""
    evaluates: bool = False
    """Whether `eval_strategy` is other than "no"."""
    per_device_eval_batch_size: int = 8
    num_generations_eval: int | None = None
    eval_dataset_size: int | None = None
    """Evaluation prompts; None if unknown."""

    @property
    def micro_batch(self) -> int:
        """Completions of one micro-step on all processes."""
        return self.per_device_train_batch_size * self.num_processes

    @property
    def generation_batch(self) -> int:
        """Completions of one generation batch, set or derived."""
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        return self.generation_batch_size or self.micro_batch * steps

    @property
    def eval_batch(self) -> int:
        """Completions of one evaluation batch on all processes."""
        return self.per_device_eval_batch_size * self.num_processes

    @property
    def eval_group(self) -> int:
        """Completions of one prompt in the evaluation."""
        return self.num_generations_eval or self.num_generations


@dataclass(frozen=True)
class Suggestion:
    """The nearest values of one setting that fix a problem, all else unchanged."""

    knob: str
    """Dotted path into the recipe."""
    value: int
    """The current value."""
    nearest: tuple[int, ...]
    """At most one value on each side, the smaller change first."""
    complete: bool = True
    """Whether this change alone makes the whole plan valid."""

    @property
    def change(self) -> float:
        """Distance of the nearest value, relative to the current one."""
        return abs(self.nearest[0] - self.value) / self.value


def find_invalid_values(inputs: BatchInputs) -> dict[str, Problem]:
    """Return problems of single values by field; rules that need such a field cannot be applied."""
    problems = _check_duration(inputs)
    for field, path in PATHS.items():
        value, minimum = getattr(inputs, field), _MINIMUM.get(field, 1)
        if (
            value is not None
            and value < minimum
            and (inputs.evaluates or field not in _EVAL_FIELDS)
        ):
            why = "; advantages compare the completions of a group" if minimum == 2 else ""
            text = f"{field} is {value}, below {minimum}{why}"
            problems[field] = Problem(text, f"set {path} to {minimum} or more", path)
    batch, steps = inputs.generation_batch_size, inputs.steps_per_generation
    if batch is not None and steps is not None:
        text = f"generation_batch_size {batch} and steps_per_generation {steps} exclude each other"
        path = PATHS["steps_per_generation"]
        problems["exclusive"] = Problem(text, f"remove {path} or {SPLIT}", path)
    if inputs.evaluates and inputs.eval_dataset_size == 0:
        text = "the evaluation set has no prompts, so an evaluation yields no metric"
        fix = "add evaluation prompts, or set training.eval_strategy: no"
        problems["eval_dataset_size"] = Problem(text, fix, DATASET)
    return problems


def _check_duration(inputs: BatchInputs) -> dict[str, Problem]:
    if inputs.max_steps > 0:  # overrides the epochs, whatever they are
        return {}
    field, fix = "max_steps", "set training.max_steps to 1 or more, or to -1 to train by epochs"
    if inputs.max_steps < 0:
        if 0 < inputs.num_train_epochs <= _MAX_EPOCHS:
            return {}
        field, fix = "num_train_epochs", "set training.num_train_epochs above 0"
    text = f"{field} is {getattr(inputs, field)}, which trains for no time or without end"
    return {field: Problem(text, fix, f"training.{field}")}


def can_evaluate(inputs: BatchInputs, invalid: Set[str]) -> bool:
    """Return whether there is an evaluation batch that can be computed."""
    return inputs.evaluates and not invalid & (_EVAL_KNOBS | {"num_generations"})


def find_broken_rules(inputs: BatchInputs, invalid: Set[str]) -> dict[str, str]:
    """Return the message of each broken rule, by the recipe key it is reported at."""
    messages = {} if invalid - NOT_BATCH else _check_training(inputs)
    if can_evaluate(inputs, invalid):
        batch, group = inputs.eval_batch, inputs.eval_group
        factors = f"{inputs.per_device_eval_batch_size} × {inputs.num_processes}"
        what = f"evaluation batch {factors} = {batch}"
        messages[EVAL] = _indivisible(what, f"hold whole groups of {group}", batch, group)
    return {path: message for path, message in messages.items() if message}


def _check_training(inputs: BatchInputs) -> dict[str, str | None]:
    micro, batch, group = inputs.micro_batch, inputs.generation_batch, inputs.num_generations
    factors = f"{inputs.per_device_train_batch_size} × {inputs.num_processes}"
    what = f"generation batch {factors} × {batch // micro} = {batch}"
    if inputs.generation_batch_size is not None:
        what = f"generation batch of {batch}"
    messages = {
        SPLIT: _indivisible(
            what, f"split into whole micro-steps of {factors} = {micro}", batch, micro
        ),
        GROUPS: _indivisible(what, f"hold whole groups of {group}", batch, group),
    }
    return messages if batch % group else messages | _check_prompts(inputs, what)


def _check_prompts(inputs: BatchInputs, what: str) -> dict[str, str | None]:
    """Compare the prompts there are with those of one generation batch and its replacements."""
    size, group = inputs.dataset_size, inputs.num_generations
    needed, rounds = inputs.generation_batch // group, inputs.max_resample or 0
    most = needed * (1 + rounds)
    if size is None or size >= most:
        return {}
    if size < needed:
        return {
            DATASET: f"training prompts ({size}) are fewer than one generation batch takes, so no step "
            f"would be trained ({what} completions / {group} = {needed} prompts)"
        }
    return {
        FRESH_PROMPTS: f"training prompts ({size}) are fewer than one generation batch and its "
        f"replacements may take ({needed} prompts × (1 + {rounds}) = {most})"
    }


def _indivisible(what: str, verb: str, batch: int, size: int) -> str | None:
    whole, rest = divmod(batch, size)
    division = f"({batch} / {size} = {whole} remainder {rest})"
    return f"{what} completions does not {verb} {division}" if rest else None


def suggest(inputs: BatchInputs, path: str, invalid: Set[str]) -> list[Suggestion]:
    """Return the nearest values of each setting that fix `path`, preferring those that fix all."""
    others = set(find_broken_rules(inputs, invalid)) - {path}
    suggestions = []
    for knob in _list_knobs(inputs, path):
        nearest = _find_nearest(inputs, knob, invalid, allowed=set())
        complete = bool(nearest) and not invalid
        if not nearest and others:
            nearest = _find_nearest(inputs, knob, invalid, allowed=others)
        if nearest:
            suggestions.append(Suggestion(PATHS[knob], _value(inputs, knob), nearest, complete))
    return sorted(suggestions, key=lambda each: each.change)


def _list_knobs(inputs: BatchInputs, path: str) -> list[str]:
    """Return the fields that the rule reported at `path` depends on."""
    if path == EVAL:
        return sorted(_EVAL_KNOBS, reverse=True)
    # The first of these that is set decides how many micro-steps a generation batch feeds.
    sizes = ("generation_batch_size", "steps_per_generation", "gradient_accumulation_steps")
    size = next(field for field in sizes if getattr(inputs, field) is not None)
    group = [] if path == SPLIT else ["num_generations"]
    rounds = ["max_resample"] if path == FRESH_PROMPTS else []
    return [*rounds, *group, "per_device_train_batch_size", size, "num_processes"]


def _find_nearest(
    inputs: BatchInputs, knob: str, invalid: Set[str], allowed: set[str]
) -> tuple[int, ...]:
    """Return the nearest value on each side that breaks at most the rules in `allowed`."""

    def is_accepted(value: int) -> bool:
        change: dict[str, Any] = {knob: value}
        return set(find_broken_rules(replace(inputs, **change), invalid)) <= allowed

    hits = [next(filter(is_accepted, side), None) for side in _candidates(inputs, knob)]
    return tuple(sorted(filter(None, hits), key=lambda hit: abs(hit - _value(inputs, knob))))


def _candidates(inputs: BatchInputs, knob: str) -> list[Iterator[int]]:
    """Return the values below and above, nearest first.

    Divisibility repeats with the group sizes, and a group is never larger than a batch, so nothing
    new lies above the ceiling.
    """
    value = _value(inputs, knob)
    stride = inputs.micro_batch if knob == "generation_batch_size" else 1
    period = stride * math.lcm(inputs.num_generations, inputs.eval_group)
    ceiling = max(value + period, inputs.generation_batch, inputs.eval_batch)
    below = range((value - 1) // stride * stride, _MINIMUM.get(knob, 1) - 1, -stride)
    above = range((value // stride + 1) * stride, ceiling + 1, stride)
    return [islice(side, _MAX_CANDIDATES) for side in (below, above)]


def _value(inputs: BatchInputs, knob: str) -> int:
    value: int = getattr(inputs, knob) or inputs.num_generations
    return value


def describe_fix(inputs: BatchInputs, path: str, suggestions: list[Suggestion]) -> str:
    """Return the fix of a broken rule: one edit a suggestion, or what to change together."""
    edits = [f"set {each.knob} to {' or '.join(map(str, each.nearest))}" for each in suggestions]
    several = [f"change several of {', '.join(PATHS[knob] for knob in _list_knobs(inputs, path))}"]
    first = {
        DATASET: ["add prompts"],
        FRESH_PROMPTS: ["add prompts", "remove generation.dynamic_sampling"],
    }
    return "; or ".join(first.get(path, []) + (edits or several))
