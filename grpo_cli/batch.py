"""Exact integer batch arithmetic of GRPO training and evaluation.

Owns the rules a batch must meet, the count of steps and samples that follows, and the values that
would mend a broken setting. Does not read recipes, datasets or hardware: numbers in, numbers out.

Glossary, used with these meanings throughout the package:

- *prompt*: one row of the dataset; one question.
- *completion*: one answer sampled for a prompt. `per_device_train_batch_size` counts completions.
- *group*: the `num_generations` completions of one prompt; advantages compare within it.
- *micro-step*: one forward and backward pass on every process (`B·N` completions).
- *optimizer step*: one weight update, after `gradient_accumulation_steps` micro-steps; the last one
  of an epoch has fewer where they do not divide. Trainers report it as `global_step`.

Letters: `B` per-device batch, `N` processes, `A` gradient accumulation, `S` steps per generation
(default `A`), `G` generations per prompt, `I` iterations over each generation batch.

Source: TRL 1.16.0 `GRPOConfig.__post_init__` (rules), `GRPOTrainer.get_train_dataloader`,
`GRPOTrainer._get_train_sampler` and `RepeatSampler` (what an epoch holds), `_prepare_inputs` (when
sampling happens); transformers 5.17 `Trainer.set_initial_training_values` (steps); accelerate 1.15
`BatchSamplerShard` (how evaluation fills its last batch).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import Any

from grpo_cli.errors import Problem

_TRAINING = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"]
_GENERATION = ["num_generations", "steps_per_generation", "generation_batch_size"]
_PATHS = {
    "num_processes": "launch.num_processes",
    **{field: f"training.{field}" for field in [*_TRAINING, "per_device_eval_batch_size"]},
    **{field: f"generation.{field}" for field in [*_GENERATION, "num_generations_eval"]},
}
"""Where the recipe holds the integers that must be positive."""
_LEAST = {"num_generations": 2}
_SPLIT, _GROUPS = _PATHS["generation_batch_size"], _PATHS["num_generations"]
_DATASET, _EVAL = "dataset", _PATHS["per_device_eval_batch_size"]
_TIME = {"max_steps", "num_train_epochs"}
_EVAL_KNOBS = {"per_device_eval_batch_size", "num_generations_eval", "num_processes"}
_EVAL_ONLY = _EVAL_KNOBS - {"num_processes"}
_NOT_BATCH = _EVAL_ONLY | _TIME | {"eval_dataset_size"}
"""Fields the training batch can be computed without."""
_MOST_EPOCHS = 1e9
"""More is a slip of the pen; keeps steps far from where floats lose whole numbers."""
_MAX_CANDIDATES = 4096
"""Values tried on each side of a knob; only groups of thousands could ever need more."""


@dataclass(frozen=True, kw_only=True)
class BatchInputs:
    """The settings that decide the arithmetic, under TRL's names and with TRL's defaults."""

    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_processes: int = 1
    num_generations: int = 8
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    num_iterations: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    """Optimizer steps; negative means that `num_train_epochs` decides."""
    dataset_size: int | None = None
    """Training prompts; None where unknown."""
    evaluates: bool = False
    """Whether `eval_strategy` is other than "no"."""
    per_device_eval_batch_size: int = 8
    num_generations_eval: int | None = None
    eval_dataset_size: int | None = None
    """Evaluation prompts; None where unknown."""


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


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What follows from `inputs`. None where a value cannot be known or the rules forbid it."""

    inputs: BatchInputs
    valid: bool
    problems: tuple[Problem, ...]
    suggestions: tuple[Suggestion, ...]
    """Smallest relative change first."""
    num_processes: int
    completions_per_micro_step: int | None = None
    completions_per_optimizer_step: int | None = None
    prompts_per_optimizer_step: int | float | None = None
    """Groups' worth of completions in a full optimizer step, `B·N·A / G`. Fractional where a step
    holds parts of groups (`S > A` allows it). Where `I > 1` the same completions come back in `I`
    passes, so *new* prompts per step are this divided by `I`."""
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    prompts_per_generation_batch: int | None = None
    dropped_prompts_per_epoch: int | None = None
    """Prompts after the last whole generation batch; with shuffling, other ones each epoch."""
    generation_batches_per_epoch: int | None = None
    micro_steps_per_epoch: int | None = None
    optimizer_steps_per_epoch: int | None = None
    total_optimizer_steps: int | None = None
    total_generation_batches: int | None = None
    total_completions: int | None = None
    """Completions sampled in the whole training, evaluation not counted."""
    eval_valid: bool | None = None
    """None where training does not evaluate."""
    eval_num_generations: int | None = None
    eval_completions_per_step: int | None = None
    eval_prompts_per_step: int | None = None
    eval_steps: int | None = None
    """Batches of one evaluation."""
    eval_completions: int | None = None
    """Completions sampled in one evaluation, repeats included."""
    eval_repeated_prompts: int | None = None
    """Prompts asked again to fill the last batch of several processes; the metrics count them."""


@dataclass(frozen=True)
class DerivationLine:
    """One line of the sum, as a person writes it on paper."""

    label: str
    formula: str
    result: str
    note: str = ""


def plan_batch(inputs: BatchInputs) -> BatchPlan:
    """Derives every count from `inputs`, and finds all problems at once.

    Stricter than the trainer in three places, where it would do something nobody asks for:
    `max_steps: 0` (it trains one step), `num_generations_eval: 0` (it takes `num_generations`), and
    nothing to train or evaluate on (it ends in success after no step, or without a metric).
    """
    senseless = _senseless_values(inputs)
    broken = _broken(inputs, senseless.keys())
    problems, suggestions = list(senseless.values()), []
    for path, message in broken.items():
        offers = _suggest(inputs, path, senseless.keys())
        problems.append(Problem(message, _fix(inputs, path, offers), path))
        suggestions += [offer for offer in offers if offer not in suggestions]
    return BatchPlan(
        inputs=inputs,
        valid=not problems,
        problems=tuple(problems),
        suggestions=tuple(sorted(suggestions, key=lambda s: s.change)),
        num_processes=inputs.num_processes,
        **_train_numbers(inputs, senseless.keys(), set(broken)),
        **_eval_numbers(inputs, senseless.keys()),
    )


def as_json(plan: BatchPlan) -> dict[str, object]:
    """The plan as plain values, for `--json`; keys are the fields of `BatchPlan`."""
    return {field.name: getattr(plan, field.name) for field in fields(plan)} | {
        "inputs": asdict(plan.inputs),
        "problems": [problem.as_json() for problem in plan.problems],
        "suggestions": [asdict(s) | {"nearest": list(s.nearest)} for s in plan.suggestions],
    }


def _senseless_values(inputs: BatchInputs) -> dict[str, Problem]:
    """Values that are wrong by themselves, by field; the rules that need them cannot be applied."""
    found = _duration_problem(inputs)
    for field, path in _PATHS.items():
        value, least = getattr(inputs, field), _LEAST.get(field, 1)
        if value is not None and value < least and (inputs.evaluates or field not in _EVAL_ONLY):
            why = "; advantages compare the completions of a group" if least == 2 else ""
            text = f"{field} is {value}, below {least}{why}"
            found[field] = Problem(text, f"set {path} to {least} or more", path)
    batch, steps = inputs.generation_batch_size, inputs.steps_per_generation
    if batch is not None and steps is not None:
        text = f"generation_batch_size {batch} and steps_per_generation {steps} exclude each other"
        path = _PATHS["steps_per_generation"]
        found["exclusive"] = Problem(text, f"remove {path} or {_SPLIT}", path)
    if inputs.evaluates and inputs.eval_dataset_size == 0:
        text = "the evaluation set has no prompts, so an evaluation yields no metric"
        fix = "add evaluation prompts, or set training.eval_strategy: no"
        found["eval_dataset_size"] = Problem(text, fix, _DATASET)
    return found


def _duration_problem(inputs: BatchInputs) -> dict[str, Problem]:
    field, fix = "max_steps", "set training.max_steps to 1 or more, or to -1 to train by epochs"
    if inputs.max_steps < 0:  # any positive value overrides the epochs, whatever they are
        field, fix = "num_train_epochs", "set training.num_train_epochs above 0"
    value = getattr(inputs, field)
    fine = inputs.max_steps > 0 or 0 < value <= _MOST_EPOCHS
    text = f"{field} is {value}, which trains for no time or without end"
    return {} if fine else {field: Problem(text, fix, f"training.{field}")}


def _micro_batch(inputs: BatchInputs) -> int:
    return inputs.per_device_train_batch_size * inputs.num_processes


def _generation_batch(inputs: BatchInputs) -> int:
    steps = inputs.steps_per_generation or inputs.gradient_accumulation_steps
    return inputs.generation_batch_size or _micro_batch(inputs) * steps


def _eval_batch(inputs: BatchInputs) -> int:
    return inputs.per_device_eval_batch_size * inputs.num_processes


def _eval_group(inputs: BatchInputs) -> int:
    return inputs.num_generations_eval or inputs.num_generations


def _evaluates(inputs: BatchInputs, senseless: Set[str]) -> bool:
    """Whether there is an evaluation batch, and it can be computed."""
    return inputs.evaluates and not senseless & (_EVAL_KNOBS | {"num_generations"})


def _broken(inputs: BatchInputs, senseless: Set[str]) -> dict[str, str]:
    """What each broken rule says, by the path it is reported at."""
    said = {} if senseless - _NOT_BATCH else _train_rules(inputs)
    if _evaluates(inputs, senseless):
        batch, group = _eval_batch(inputs), _eval_group(inputs)
        factors = f"{inputs.per_device_eval_batch_size} × {inputs.num_processes}"
        what = f"evaluation batch {factors} = {batch}"
        said[_EVAL] = _uneven(what, f"hold whole groups of {group}", batch, group)
    return {path: message for path, message in said.items() if message}


def _train_rules(inputs: BatchInputs) -> dict[str, str | None]:
    micro, batch, group = _micro_batch(inputs), _generation_batch(inputs), inputs.num_generations
    factors = f"{inputs.per_device_train_batch_size} × {inputs.num_processes}"
    what = f"generation batch {factors} × {batch // micro} = {batch}"
    if inputs.generation_batch_size is not None:
        what = f"generation batch of {batch}"
    size, needed = inputs.dataset_size, batch // group
    short = size is not None and size < needed and batch % group == 0
    lacking = (
        f"training prompts ({size}) are fewer than one generation batch takes, so no step would be "
        f"trained ({what} completions / {group} = {needed} prompts)"
    )
    return {
        _SPLIT: _uneven(what, f"split into whole micro-steps of {factors} = {micro}", batch, micro),
        _GROUPS: _uneven(what, f"hold whole groups of {group}", batch, group),
        _DATASET: lacking if short else None,
    }


def _uneven(what: str, verb: str, batch: int, size: int) -> str | None:
    whole, rest = divmod(batch, size)
    shown = f"({batch} / {size} = {whole} remainder {rest})"
    return f"{what} completions does not {verb} {shown}" if rest else None


def _knobs(inputs: BatchInputs, path: str) -> list[str]:
    """The fields that bear on the rule reported at `path`."""
    if path == _EVAL:
        return sorted(_EVAL_KNOBS, reverse=True)
    # A generation batch feeds as many micro-steps as the first of these that is set says.
    rhythms = ("generation_batch_size", "steps_per_generation", "gradient_accumulation_steps")
    rhythm = next(knob for knob in rhythms if getattr(inputs, knob) is not None)
    group = [] if path == _SPLIT else ["num_generations"]
    return [*group, "per_device_train_batch_size", rhythm, "num_processes"]


def _suggest(inputs: BatchInputs, path: str, senseless: Set[str]) -> list[Suggestion]:
    """The nearest values of each knob that mend `path`, preferring those that mend everything."""
    others = set(_broken(inputs, senseless)) - {path}
    found = []
    for knob in _knobs(inputs, path):
        nearest = _nearest(inputs, knob, senseless, allowed=set())
        complete = bool(nearest) and not senseless
        if not nearest and others:
            nearest = _nearest(inputs, knob, senseless, allowed=others)
        if nearest:
            found.append(Suggestion(_PATHS[knob], _value(inputs, knob), nearest, complete))
    return sorted(found, key=lambda s: s.change)


def _nearest(
    inputs: BatchInputs, knob: str, senseless: Set[str], allowed: set[str]
) -> tuple[int, ...]:
    """The nearest value on each side that breaks at most the rules in `allowed`."""

    def accepts(value: int) -> bool:
        change: dict[str, Any] = {knob: value}
        return set(_broken(replace(inputs, **change), senseless)) <= allowed

    hits = [next(filter(accepts, side), None) for side in _sides(inputs, knob)]
    return tuple(sorted(filter(None, hits), key=lambda hit: abs(hit - _value(inputs, knob))))


def _sides(inputs: BatchInputs, knob: str) -> list[Iterator[int]]:
    """Candidates below and above, nearest first.

    Divisibility repeats with the group sizes, and a group is never larger than a batch, so nothing
    new lies above the ceiling.
    """
    value = _value(inputs, knob)
    stride = _micro_batch(inputs) if knob == "generation_batch_size" else 1
    period = stride * math.lcm(inputs.num_generations, _eval_group(inputs))
    ceiling = max(value + period, _generation_batch(inputs), _eval_batch(inputs))
    below = range((value - 1) // stride * stride, _LEAST.get(knob, 1) - 1, -stride)
    above = range((value // stride + 1) * stride, ceiling + 1, stride)
    return [islice(side, _MAX_CANDIDATES) for side in (below, above)]


def _value(inputs: BatchInputs, knob: str) -> int:
    value: int = getattr(inputs, knob) or inputs.num_generations
    return value


def _fix(inputs: BatchInputs, path: str, offers: list[Suggestion]) -> str:
    edits = [f"set {offer.knob} to {' or '.join(map(str, offer.nearest))}" for offer in offers]
    several = [f"change several of {', '.join(_PATHS[knob] for knob in _knobs(inputs, path))}"]
    return "; or ".join((["add prompts"] if path == _DATASET else []) + (edits or several))


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _train_numbers(inputs: BatchInputs, senseless: Set[str], broken: set[str]) -> dict[str, Any]:
    if senseless - _NOT_BATCH:
        return {}
    micro, batch, group = _micro_batch(inputs), _generation_batch(inputs), inputs.num_generations
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
    if inputs.dataset_size is not None:
        batches, dropped = divmod(inputs.dataset_size, batch // group)
        micro_steps = batches * inputs.num_iterations * (batch // micro)
        numbers |= {
            "dropped_prompts_per_epoch": dropped,
            "generation_batches_per_epoch": batches,
            "micro_steps_per_epoch": micro_steps,
            "optimizer_steps_per_epoch": _ceil_div(micro_steps, inputs.gradient_accumulation_steps),
        }
    return numbers if senseless & _TIME else numbers | _total_numbers(inputs, numbers)


def _total_numbers(inputs: BatchInputs, numbers: dict[str, Any]) -> dict[str, Any]:
    """Steps and samples of the whole training.

    A generation batch feeds `I·S` micro-steps and is sampled at the first of them, also where
    training ends before the last; every epoch starts on a fresh one.
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


def _eval_numbers(inputs: BatchInputs, senseless: Set[str]) -> dict[str, Any]:
    if not _evaluates(inputs, senseless):
        return {"eval_valid": False} if inputs.evaluates else {}
    batch, group, size = _eval_batch(inputs), _eval_group(inputs), inputs.eval_dataset_size
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


_SUMS = {
    "completions_per_micro_step": "{B} per device × {N} processes",
    "completions_per_optimizer_step": "{micro} per micro-step × {A} accumulation",
    "prompts_per_optimizer_step": "{completions_per_optimizer_step} completions / {G} per group",
    "generation_batch_size": "{micro} per micro-step × {S} steps per generation",
    "prompts_per_generation_batch": "{generation_batch_size} completions / {G} per group",
    "generation_batches_per_epoch": "⌊{dataset_size} prompts / {P} per generation batch⌋",
    "dropped_prompts_per_epoch": "{dataset_size} prompts − {batches} generation batches × {P}",
    "micro_steps_per_epoch": "{batches} generation batches × {I} iterations × {S} steps",
    "optimizer_steps_per_epoch": "⌈{micro_steps_per_epoch} micro-steps / {A} accumulation⌉",
    "total_optimizer_steps": "⌈{num_train_epochs} epochs × {optimizer_steps_per_epoch}⌉",
    "total_completions": "{total_generation_batches} generation batches × {generation_batch_size}",
    "eval_prompts_per_step": "{eval_completions_per_step} completions / {E} per group",
    "eval_completions": "({eval_dataset_size} + {eval_repeated_prompts} repeated) prompts × {E}",
}
"""How each result comes about, by the plan's field, in order; letters as in the module's head."""
_SHORT = dict(zip("BAIGS", [*_TRAINING, *_GENERATION[:2]], strict=True)) | {
    "N": "num_processes",
    "P": "prompts_per_generation_batch",
    "E": "eval_num_generations",
    "micro": "completions_per_micro_step",
    "batches": "generation_batches_per_epoch",
}
_SINGULAR = re.compile(
    r"(?<![\d,.])1 ([a-z -]*?(?:process|batch|iteration|epoch|prompt|step))e?s\b"
)


def derive(plan: BatchPlan) -> list[DerivationLine]:
    """The derivation in the order of a person's sum; what cannot be computed is left out."""
    inputs = plan.inputs
    known = asdict(inputs) | {field.name: getattr(plan, field.name) for field in fields(plan)}
    shown = {name: _show(value) for name, value in known.items()}
    for part, whole, group in (
        ("prompts_per_generation_batch", plan.generation_batch_size, inputs.num_generations),
        ("eval_prompts_per_step", plan.eval_completions_per_step, _eval_group(inputs)),
    ):
        if whole and whole % group:
            shown[part] = f"{whole // group:,} remainder {whole % group:,}"
    short = {letter: shown[field] for letter, field in _SHORT.items()}
    notes, sums = _notes(plan), dict(_SUMS)
    sums |= {"total_optimizer_steps": "as max_steps sets"} if inputs.max_steps > 0 else {}
    if inputs.generation_batch_size is not None:
        sums["generation_batch_size"] = "as generation_batch_size sets"
    formulas = {field: sums[field].format(**shown, **short) for field in sums if shown[field]}
    return [
        DerivationLine(
            field.replace("micro_", "micro-").replace("_", " "),
            _SINGULAR.sub(r"1 \1", formula),
            shown[field],
            notes[field],
        )
        for field, formula in formulas.items()
    ]


def _show(value: object) -> str:
    """A number with thousands separators; empty where there is none."""
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) else ""


def _notes(plan: BatchPlan) -> defaultdict[str, str]:
    """What a person should know beside a result, by the field that holds it."""
    passes, notes = plan.inputs.num_iterations, defaultdict[str, str](str)
    if not plan.prompts_per_generation_batch:
        notes["prompts_per_generation_batch"] = "must be a whole number"
    if isinstance(plan.prompts_per_optimizer_step, float):
        notes["prompts_per_optimizer_step"] = "a step holds parts of groups"
    if passes > 1:
        notes["prompts_per_optimizer_step"] = f"each completion is used in {passes} passes"
    if plan.dropped_prompts_per_epoch:
        notes["dropped_prompts_per_epoch"] = "with shuffling, other prompts each epoch"
    micro_steps = plan.micro_steps_per_epoch
    if micro_steps and (short := micro_steps % plan.inputs.gradient_accumulation_steps):
        notes["optimizer_steps_per_epoch"] = f"the last one has fewer micro-steps: {short}"
    rule = "accumulation plays no part" if plan.eval_prompts_per_step else "must be a whole number"
    notes["eval_prompts_per_step"] = rule
    if plan.eval_repeated_prompts:
        notes["eval_completions"] = "the first prompts come again to fill the last batch"
    return notes
