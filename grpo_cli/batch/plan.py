"""The settings of a batch, the rules they must meet, the nearest values that fix a rule, and every count."""

import math
from collections.abc import Iterator, Set
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from grpo_cli.issues import Issue
from grpo_cli.recipe import NUM_GENERATIONS

if TYPE_CHECKING:
    from grpo_cli.recipe.recipe import Recipe


_FRESH_PROMPTS = "generation.dynamic_sampling.max_resample"
_TRAINING = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"]
_GENERATION = ["num_generations", "steps_per_generation", "generation_batch_size"]
_PATHS = {
    "num_processes": "launch.num_processes",
    "max_resample": _FRESH_PROMPTS,
    **{field: f"training.{field}" for field in [*_TRAINING, "per_device_eval_batch_size"]},
    **{field: f"generation.{field}" for field in [*_GENERATION, "num_generations_eval"]},
}
"""Recipe keys of the integers that must be positive."""
_SPLIT, _GROUPS = _PATHS["generation_batch_size"], _PATHS["num_generations"]
_DATASET, _EVAL = "dataset", _PATHS["per_device_eval_batch_size"]
"""Recipe keys that broken rules are reported at."""
_DURATION = {"max_steps", "num_train_epochs"}
_MINIMUM = {"num_generations": 2}
"""Smallest valid values other than 1."""
_EVAL_FIELDS = {"per_device_eval_batch_size", "num_generations_eval"}
_EVAL_KNOBS = _EVAL_FIELDS | {"num_processes"}
_NOT_BATCH = _EVAL_FIELDS | _DURATION | {"eval_dataset_size"}
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
    num_generations: int = NUM_GENERATIONS
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
    dataset_limit: int | None = None
    """The most prompts that `dataset.limit` leaves; None without it."""
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


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What follows from `inputs`; None if a value is unknown or the rules forbid it."""

    inputs: BatchInputs
    valid: bool
    problems: tuple[Issue, ...]
    suggestions: tuple[Suggestion, ...]
    """Smallest relative change first."""
    num_processes: int
    completions_per_micro_step: int | None = None
    completions_per_optimizer_step: int | None = None
    prompts_per_optimizer_step: int | float | None = None
    """`B·N·A / G` (letters as in docs/batch-sizes.md). Fractional if a step holds parts of groups (`S > A`
    allows it). With `I > 1` the same completions return in `I` passes, so the new prompts of a step
    are this divided by `I`."""
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    prompts_per_generation_batch: int | None = None
    most_prompts_per_generation_batch: int | None = None
    """Prompts sampled if every round replaces every group; None without dynamic sampling."""
    dropped_prompts_per_epoch: int | None = None
    """Prompts after the last whole generation batch; with shuffling, different ones each epoch."""
    generation_batches_per_epoch: int | None = None
    micro_steps_per_epoch: int | None = None
    optimizer_steps_per_epoch: int | None = None
    total_optimizer_steps: int | None = None
    total_generation_batches: int | None = None
    total_completions: int | None = None
    """Completions sampled in the whole training, evaluation not counted."""
    eval_valid: bool | None = None
    """None if training does not evaluate."""
    eval_num_generations: int | None = None
    eval_completions_per_step: int | None = None
    eval_prompts_per_step: int | None = None
    eval_steps: int | None = None
    """Batches of one evaluation."""
    eval_completions: int | None = None
    """Completions sampled in one evaluation, repeats included."""
    eval_repeated_prompts: int | None = None
    """Prompts repeated to fill the last batch of several processes; the metrics count each prompt once."""


def plan_batch(inputs: BatchInputs) -> BatchPlan:
    """Derive every count from `inputs` and find all problems at once.

    Stricter than TRL about `max_steps: 0` (TRL trains one step), `num_generations_eval: 0` (TRL takes
    `num_generations`) and empty data (TRL succeeds after no step, or without a metric).
    """
    invalid = _find_invalid_values(inputs)
    broken = _find_broken_rules(inputs, invalid.keys())
    problems, suggestions = list(invalid.values()), []
    for path, message in broken.items():
        fixes = _suggest(inputs, path, invalid.keys())
        problems.append(Issue(message, _describe_fix(inputs, path, fixes), path))
        suggestions += [each for each in fixes if each not in suggestions]
    return BatchPlan(
        inputs=inputs,
        valid=not problems,
        problems=tuple(problems),
        suggestions=tuple(sorted(suggestions, key=lambda s: s.change)),
        num_processes=inputs.num_processes,
        **_train_numbers(inputs, invalid.keys(), set(broken)),
        **_eval_numbers(inputs, invalid.keys()),
    )


def as_json(plan: BatchPlan) -> dict[str, object]:
    """Return the plan as plain values, for `--json`; keys are the fields of `BatchPlan`."""
    return {field.name: getattr(plan, field.name) for field in fields(plan)} | {
        "inputs": asdict(plan.inputs),
        "problems": [problem.as_json() for problem in plan.problems],
        "suggestions": [asdict(s) | {"nearest": list(s.nearest)} for s in plan.suggestions],
    }


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _train_numbers(inputs: BatchInputs, invalid: Set[str], broken: set[str]) -> dict[str, Any]:
    if invalid - _NOT_BATCH:
        return {}
    micro, batch, group = inputs.micro_batch, inputs.generation_batch, inputs.num_generations
    step = micro * inputs.gradient_accumulation_steps
    numbers: dict[str, Any] = {
        "completions_per_micro_step": micro,
        "completions_per_optimizer_step": step,
        "prompts_per_optimizer_step": step / group if step % group else step // group,
        "generation_batch_size": batch,
        "steps_per_generation": None if batch % micro else batch // micro,
        "prompts_per_generation_batch": None if batch % group else batch // group,
    }
    if broken & {_SPLIT, _GROUPS, _DATASET}:
        return numbers
    if inputs.max_resample is not None:
        most = numbers["prompts_per_generation_batch"] * (1 + inputs.max_resample)
        numbers["most_prompts_per_generation_batch"] = most
    if inputs.dataset_size is not None:
        batches, dropped = divmod(inputs.dataset_size, batch // group)
        micro_steps = batches * inputs.num_iterations * (batch // micro)
        numbers |= {
            "dropped_prompts_per_epoch": dropped,
            "generation_batches_per_epoch": batches,
            "micro_steps_per_epoch": micro_steps,
            "optimizer_steps_per_epoch": _ceil_div(micro_steps, inputs.gradient_accumulation_steps),
        }
    return numbers if invalid & _DURATION else numbers | _total_numbers(inputs, numbers)


def _total_numbers(inputs: BatchInputs, numbers: dict[str, Any]) -> dict[str, Any]:
    """Count the steps and samples of the whole training.

    A generation batch feeds `I·S` micro-steps and is sampled at the first of them, even if training
    ends before the last; every epoch starts with a new one.
    """
    cycle = inputs.num_iterations * numbers["steps_per_generation"]
    accumulation = inputs.gradient_accumulation_steps
    steps = inputs.max_steps if inputs.max_steps > 0 else None
    batches = None
    if per_epoch := numbers.get("optimizer_steps_per_epoch"):
        # The product is a float, as in the trainer: an exact fraction could differ by one step.
        steps = steps or math.ceil(inputs.num_train_epochs * per_epoch)
        epochs, rest = divmod(steps, per_epoch)
        whole_epochs = epochs * numbers["generation_batches_per_epoch"]
        batches = whole_epochs + _ceil_div(rest * accumulation, cycle)
    elif steps and cycle % accumulation == 0:
        # Every epoch is then a whole number of steps, whatever the dataset's size.
        batches = _ceil_div(steps * accumulation, cycle)
    return {
        "total_optimizer_steps": steps,
        "total_generation_batches": batches,
        "total_completions": batches and batches * numbers["generation_batch_size"],
    }


def _eval_numbers(inputs: BatchInputs, invalid: Set[str]) -> dict[str, Any]:
    if not _can_evaluate(inputs, invalid):
        return {"eval_valid": False} if inputs.evaluates else {}
    batch, group, size = inputs.eval_batch, inputs.eval_group, inputs.eval_dataset_size
    numbers: dict[str, Any] = {
        "eval_valid": batch % group == 0 and size != 0,
        "eval_num_generations": group,
        "eval_completions_per_step": batch,
        "eval_prompts_per_step": None if batch % group else batch // group,
    }
    if batch % group or not size:
        return numbers
    steps = _ceil_div(size * group, batch)
    # One process takes a short last batch; several fill it up with the first prompts again.
    sampled = size * group if inputs.num_processes == 1 else steps * batch
    repeated = sampled // group - size
    counts = {"eval_steps": steps, "eval_completions": sampled, "eval_repeated_prompts": repeated}
    return numbers | counts


def _find_invalid_values(inputs: BatchInputs) -> dict[str, Issue]:
    """Return problems of single values by field; rules that need such a field cannot be applied."""
    problems = _check_duration(inputs)
    for field, path in _PATHS.items():
        value, minimum = getattr(inputs, field), _MINIMUM.get(field, 1)
        if (
            value is not None
            and value < minimum
            and (inputs.evaluates or field not in _EVAL_FIELDS)
        ):
            why = "; advantages compare the completions of a group" if minimum == 2 else ""
            text = f"{field} is {value}, below {minimum}{why}"
            problems[field] = Issue(text, f"set {path} to {minimum} or more", path)
    batch, steps = inputs.generation_batch_size, inputs.steps_per_generation
    if batch is not None and steps is not None:
        text = f"generation_batch_size {batch} and steps_per_generation {steps} exclude each other"
        path = _PATHS["steps_per_generation"]
        problems["exclusive"] = Issue(text, f"remove {path} or {_SPLIT}", path)
    if inputs.evaluates and inputs.eval_dataset_size == 0:
        text = "the evaluation set has no prompts, so an evaluation yields no metric"
        fix = "add evaluation prompts, or set training.eval_strategy: no"
        problems["eval_dataset_size"] = Issue(text, fix, _DATASET)
    return problems


def _check_duration(inputs: BatchInputs) -> dict[str, Issue]:
    if inputs.max_steps > 0:  # overrides the epochs, whatever they are
        return {}
    field, fix = "max_steps", "set training.max_steps to 1 or more, or to -1 to train by epochs"
    if inputs.max_steps < 0:
        if 0 < inputs.num_train_epochs <= _MAX_EPOCHS:
            return {}
        field, fix = "num_train_epochs", "set training.num_train_epochs above 0"
    text = f"{field} is {getattr(inputs, field)}, which trains for no time or without end"
    return {field: Issue(text, fix, f"training.{field}")}


def _can_evaluate(inputs: BatchInputs, invalid: Set[str]) -> bool:
    return inputs.evaluates and not invalid & (_EVAL_KNOBS | {"num_generations"})


def _find_broken_rules(inputs: BatchInputs, invalid: Set[str]) -> dict[str, str]:
    """Return the message of each broken rule, by the recipe key it is reported at."""
    messages = {} if invalid - _NOT_BATCH else _check_training(inputs)
    if _can_evaluate(inputs, invalid):
        batch, group = inputs.eval_batch, inputs.eval_group
        factors = f"{inputs.per_device_eval_batch_size} × {inputs.num_processes}"
        what = f"evaluation batch {factors} = {batch}"
        messages[_EVAL] = _indivisible(what, f"hold whole groups of {group}", batch, group)
    return {path: message for path, message in messages.items() if message}


def _check_training(inputs: BatchInputs) -> dict[str, str | None]:
    micro, batch, group = inputs.micro_batch, inputs.generation_batch, inputs.num_generations
    factors = f"{inputs.per_device_train_batch_size} × {inputs.num_processes}"
    what = f"generation batch {factors} × {batch // micro} = {batch}"
    if inputs.generation_batch_size is not None:
        what = f"generation batch of {batch}"
    messages = {
        _SPLIT: _indivisible(
            what, f"split into whole micro-steps of {factors} = {micro}", batch, micro
        ),
        _GROUPS: _indivisible(what, f"hold whole groups of {group}", batch, group),
    }
    return messages if batch % group else messages | _check_prompts(inputs, what)


def _check_prompts(inputs: BatchInputs, what: str) -> dict[str, str | None]:
    size, group = inputs.dataset_size, inputs.num_generations
    needed, rounds = inputs.generation_batch // group, inputs.max_resample or 0
    most = needed * (1 + rounds)
    if size is None or size >= most:
        return {}
    if size < needed:
        return {
            _DATASET: f"training prompts ({size}) are fewer than one generation batch takes, so no step "
            f"would be trained ({what} completions / {group} = {needed} prompts)"
        }
    return {
        _FRESH_PROMPTS: f"training prompts ({size}) are fewer than one generation batch and its "
        f"replacements may take ({needed} prompts × (1 + {rounds}) = {most})"
    }


def _indivisible(what: str, verb: str, batch: int, size: int) -> str | None:
    whole, rest = divmod(batch, size)
    division = f"({batch} / {size} = {whole} remainder {rest})"
    return f"{what} completions does not {verb} {division}" if rest else None


def _suggest(inputs: BatchInputs, path: str, invalid: Set[str]) -> list[Suggestion]:
    """Return the nearest values of each setting that fix `path`, preferring those that fix all."""
    others = set(_find_broken_rules(inputs, invalid)) - {path}
    suggestions = []
    for knob in _list_knobs(inputs, path):
        nearest = _find_nearest(inputs, knob, invalid, allowed=set())
        complete = bool(nearest) and not invalid
        if not nearest and others:
            nearest = _find_nearest(inputs, knob, invalid, allowed=others)
        if nearest:
            suggestions.append(Suggestion(_PATHS[knob], _value(inputs, knob), nearest, complete))
    return sorted(suggestions, key=lambda each: each.change)


def _list_knobs(inputs: BatchInputs, path: str) -> list[str]:
    """Return the fields that the rule reported at `path` depends on."""
    if path == _EVAL:
        return sorted(_EVAL_KNOBS, reverse=True)
    # The first of these that is set decides how many micro-steps a generation batch feeds.
    sizes = ("generation_batch_size", "steps_per_generation", "gradient_accumulation_steps")
    size = next(field for field in sizes if getattr(inputs, field) is not None)
    group = [] if path == _SPLIT else ["num_generations"]
    rounds = ["max_resample"] if path == _FRESH_PROMPTS else []
    return [*rounds, *group, "per_device_train_batch_size", size, "num_processes"]


def _find_nearest(
    inputs: BatchInputs, knob: str, invalid: Set[str], allowed: set[str]
) -> tuple[int, ...]:
    """Return the nearest value on each side that breaks at most the rules in `allowed`."""

    def is_accepted(value: int) -> bool:
        change: dict[str, Any] = {knob: value}
        return set(_find_broken_rules(replace(inputs, **change), invalid)) <= allowed

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


def _describe_fix(inputs: BatchInputs, path: str, suggestions: list[Suggestion]) -> str:
    """Return the fix of a broken rule: one edit a suggestion, or what to change together."""
    edits = [f"set {each.knob} to {' or '.join(map(str, each.nearest))}" for each in suggestions]
    several = [f"change several of {', '.join(_PATHS[knob] for knob in _list_knobs(inputs, path))}"]
    needed = inputs.generation_batch // inputs.num_generations
    is_limited = inputs.dataset_limit is not None and inputs.dataset_limit < needed
    more = f"set dataset.limit to {needed} or more" if is_limited else "add prompts"
    first = {
        _DATASET: [more],
        _FRESH_PROMPTS: ["add prompts", "remove generation.dynamic_sampling"],
    }
    return "; or ".join(first.get(path, []) + (edits or several))


def batch_inputs(
    recipe: "Recipe", num_processes: int, prompts: int | None, eval_prompts: int | None = None
) -> BatchInputs:
    """Return the numbers of a recipe's batch arithmetic.

    Args:
        recipe: The recipe.
        num_processes: Of the launch, never of the process that asks.
        prompts: Training prompts, None if they are not known yet.
        eval_prompts: Evaluation prompts, likewise.
    """
    training, dynamic = recipe.training, recipe.generation.dynamic_sampling
    values: dict[str, Any] = {
        field.name: getattr(section, field.name)
        for section in (training, recipe.generation)
        for field in fields(BatchInputs)
        if field.name in type(section).model_fields
    }
    return BatchInputs(
        **values,
        num_processes=num_processes,
        max_resample=dynamic.max_resample if dynamic is not None else None,
        dataset_size=prompts,
        dataset_limit=recipe.dataset.limit,
        evaluates=training.eval_strategy != "no" and recipe.is_sampled,
        eval_dataset_size=eval_prompts,
    )
