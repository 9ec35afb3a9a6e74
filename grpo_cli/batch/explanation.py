"""The derivation of a plan line by line, and common misreadings of the settings with their numbers.

Source: TRL 0.14.0, the first with GRPO, `GRPOTrainer.compute_loss` (each prompt of the batch is answered
`num_generations` times); TRL 0.15.0 and 0.16.0 `GRPOTrainer.__init__` (pull request 2776: the batch counts
completions, per-device batch × processes must divide); TRL 0.17.0 `GRPOTrainer.__init__` (pull request 3283:
accumulation counts too); TRL 0.18.0 to 1.16.0 `GRPOConfig.__post_init__` (pull request 3388: the generation
batch divides).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any

from grpo_cli.batch.plan import BatchInputs, BatchPlan

_SUMS = {
    "completions_per_micro_step": "{B} per device × {N} processes",
    "completions_per_optimizer_step": "{micro} per micro-step × {A} accumulation",
    "prompts_per_optimizer_step": "{completions_per_optimizer_step} completions / {G} per group",
    "generation_batch_size": "{micro} per micro-step × {S} steps per generation",
    "prompts_per_generation_batch": "{generation_batch_size} completions / {G} per group",
    "most_prompts_per_generation_batch": "{P} prompts × (1 + {max_resample} rounds)",
    "generation_batches_per_epoch": "⌊{dataset_size} prompts / {P} per generation batch⌋",
    "dropped_prompts_per_epoch": "{dataset_size} prompts − {batches} generation batches × {P}",
    "micro_steps_per_epoch": "{batches} generation batches × {I} iterations × {S} steps",
    "optimizer_steps_per_epoch": "⌈{micro_steps_per_epoch} micro-steps / {A} accumulation⌉",
    "total_optimizer_steps": "⌈{num_train_epochs} epochs × {optimizer_steps_per_epoch}⌉",
    "total_completions": "{total_generation_batches} generation batches × {generation_batch_size}",
    "eval_prompts_per_step": "{eval_completions_per_step} completions / {E} per group",
    "eval_completions": "({eval_dataset_size} + {eval_repeated_prompts} repeated) prompts × {E}",
}
"""Formulas by the plan's field, in order of display; letters as in the package's docstring."""
_SHORT = {
    "B": "per_device_train_batch_size",
    "A": "gradient_accumulation_steps",
    "I": "num_iterations",
    "G": "num_generations",
    "S": "steps_per_generation",
    "N": "num_processes",
    "P": "prompts_per_generation_batch",
    "E": "eval_num_generations",
    "micro": "completions_per_micro_step",
    "batches": "generation_batches_per_epoch",
}
_SINGULAR = re.compile(
    r"(?<![\d,.])1 ([a-z -]*?(?:process|batch|iteration|epoch|prompt|step))e?s\b"
)


@dataclass(frozen=True)
class DerivationLine:
    """One line of the derivation."""

    label: str
    formula: str
    result: str
    note: str = ""


def derive(plan: BatchPlan) -> list[DerivationLine]:
    """Return the lines of the derivation; results that cannot be computed are left out."""
    inputs = plan.inputs
    known = asdict(inputs) | {field.name: getattr(plan, field.name) for field in fields(plan)}
    shown = {name: _show(value) for name, value in known.items()}
    for part, whole, group in (
        ("prompts_per_generation_batch", plan.generation_batch_size, inputs.num_generations),
        ("eval_prompts_per_step", plan.eval_completions_per_step, inputs.eval_group),
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
    """Return a number with thousands separators; empty if there is none."""
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) else ""


def _notes(plan: BatchPlan) -> defaultdict[str, str]:
    """Return remarks on results, by field."""
    passes, notes = plan.inputs.num_iterations, defaultdict[str, str](str)
    if not plan.prompts_per_generation_batch:
        notes["prompts_per_generation_batch"] = "must be a whole number"
    if isinstance(plan.prompts_per_optimizer_step, float):
        notes["prompts_per_optimizer_step"] = "a step holds parts of groups"
    if passes > 1:
        notes["prompts_per_optimizer_step"] = f"each completion is used in {passes} passes"
    if plan.most_prompts_per_generation_batch:
        note = "if every group is replaced; steps and epochs are counted in batches regardless"
        notes["most_prompts_per_generation_batch"] = note
        notes["total_completions"] = "plus those of replaced groups"
    if plan.dropped_prompts_per_epoch:
        notes["dropped_prompts_per_epoch"] = "with shuffling, different prompts each epoch"
    micro_steps = plan.micro_steps_per_epoch
    if micro_steps and (short := micro_steps % plan.inputs.gradient_accumulation_steps):
        notes["optimizer_steps_per_epoch"] = f"the last one has fewer micro-steps: {short}"
    rule = (
        "accumulation does not matter" if plan.eval_prompts_per_step else "must be a whole number"
    )
    notes["eval_prompts_per_step"] = rule
    if plan.eval_repeated_prompts:
        notes["eval_completions"] = "the first prompts are repeated to fill the last batch"
    return notes


@dataclass(frozen=True)
class Reading:
    """A number, or whether a division comes out, with its derivation."""

    value: int | bool | None
    """None if unknown."""
    text: str


@dataclass(frozen=True)
class Misreading:
    """A common mistake, what it would give for these settings, and the truth."""

    topic: str
    """`unit`, `divisibility` or `steps`."""
    claim: str
    claimed: Reading
    actual: Reading
    because: str
    source: str

    @property
    def right_here(self) -> bool | None:
        """Whether the mistake gives the right number anyway; None if unknown."""
        if self.claimed.value is None or self.actual.value is None:
            return None
        return self.claimed.value == self.actual.value

    def as_json(self) -> dict[str, Any]:
        """Return the misreading as plain values."""
        return asdict(self) | {"right_here": self.right_here}


_MISTAKES = {
    "unit": (
        "unit",
        "per_device_train_batch_size counts prompts",
        "it counts completions, each one of a group. It counted prompts in TRL 0.14, the first with GRPO, "
        "and no longer since 0.15",
        "huggingface/trl pull request 2776",
    ),
    "per_device": (
        "divisibility",
        "per_device_train_batch_size must be a multiple of num_generations",
        "a group may be spread over processes and micro-steps; only the generation batch must hold whole "
        "groups. TRL 0.15 and 0.16 required it of one process, by the next rule",
        "huggingface/trl pull request 3388; GRPOConfig.__post_init__ of TRL 1.16",
    ),
    "processes": (
        "divisibility",
        "per_device_train_batch_size × processes must be a multiple of num_generations",
        "that was the rule of TRL 0.15 and 0.16. Since 0.17 accumulation counts too, and since 0.18 the "
        "generation batch does, however it is set. For evaluation the old rule still holds",
        "huggingface/trl pull requests 2776, 3283 and 3388",
    ),
    "accumulation": (
        "divisibility",
        "per_device_train_batch_size × processes × gradient_accumulation_steps must be a multiple of "
        "num_generations",
        "that was the rule of TRL 0.17. Since 0.18 steps_per_generation or generation_batch_size, if "
        "set, takes the place of accumulation",
        "huggingface/trl pull request 3388",
    ),
    "ungrouped_steps": (
        "steps",
        "steps = epochs × prompts / completions of a step",
        "a prompt takes num_generations ({group}) places of the batch, not one",
        "RepeatSampler of TRL 1.16; huggingface/trl issue 3204",
    ),
    "grouped_steps": (
        "steps",
        "steps = epochs × prompts × num_generations / completions of a step",
        "the formula holds if no prompt is dropped, num_iterations is 1 and accumulation divides the "
        "epoch{conditions}",
        "RepeatSampler of TRL 1.16; huggingface/trl issue 3204",
    ),
}
"""Topic, claim, reason and source of each mistake."""


def find_misreadings(plan: BatchPlan) -> list[Misreading]:
    """Return the common misreadings of a plan's settings; none if these are invalid by themselves."""
    if plan.completions_per_micro_step is None:
        return []
    set_steps = "max_steps is set, so neither prompts nor epochs decide; besides, "
    misreadings = []
    for name, claimed, actual in _read_all(plan):
        topic, claim, because, source = _MISTAKES[name]
        because = because.format(
            group=plan.inputs.num_generations, conditions=_check_conditions(plan)
        )
        if topic == "steps" and plan.inputs.max_steps > 0:
            because = set_steps + because
        misreadings.append(Misreading(topic, claim, claimed, actual, because, source))
    return misreadings


def _read_all(plan: BatchPlan) -> Iterator[tuple[str, Reading, Reading]]:
    """Yield the name, the claimed and the actual number of each mistake."""
    i, group = plan.inputs, plan.inputs.num_generations
    device, processes = i.per_device_train_batch_size, i.num_processes
    factors = f"{device} × {processes} × {i.gradient_accumulation_steps}"
    step = i.micro_batch * i.gradient_accumulation_steps
    yield "unit", *_read_completions(factors, step, group)
    batch = _divide_generation_batch(plan)
    yield "per_device", _divide("", device, group), batch
    yield "processes", _divide(f"{device} × {processes}", i.micro_batch, group), batch
    if step != i.generation_batch:
        yield "accumulation", _divide(factors, step, group), batch
    yield "ungrouped_steps", _estimate_steps(i, 1), _read_steps(plan)
    yield "grouped_steps", _estimate_steps(i, group), _read_steps(plan)


def _read_completions(factors: str, step: int, group: int) -> tuple[Reading, Reading]:
    prompts = f"{Fraction(step, group)}" if step % group == 0 else f"{step / group:,.6g}"
    noun = "prompt" if step == group else "prompts"
    return (
        Reading(
            step * group,
            f"{step * group:,} completions a step ({factors} = {step:,} prompts, × {group})",
        ),
        Reading(
            step,
            f"{step:,} completions a step ({factors}), of {prompts} {noun} (/ {group})",
        ),
    )


def _divide_generation_batch(plan: BatchPlan) -> Reading:
    i = plan.inputs
    steps = i.steps_per_generation or i.gradient_accumulation_steps
    factors = f"{i.per_device_train_batch_size} × {i.num_processes} × {steps}"
    factors = "generation_batch_size" if i.generation_batch_size is not None else factors
    reading = _divide(f"generation batch {factors}", i.generation_batch, i.num_generations)
    if plan.steps_per_generation is not None:
        return reading
    text = (
        f"{reading.text} by this rule, but it does not split into micro-steps of {i.micro_batch:,}"
    )
    return Reading(reading.value, text)


def _divide(factors: str, batch: int, group: int) -> Reading:
    whole, rest = divmod(batch, group)
    verdict = f" remainder {rest}: refused" if rest else ": allowed"
    before = f"{factors} = {batch:,}; " if factors else ""
    return Reading(not rest, f"{before}{batch:,} / {group} = {whole:,}{verdict}")


def _estimate_steps(inputs: BatchInputs, factor: int) -> Reading:
    """Return the steps by a simple formula, rounded up as the trainer does."""
    if inputs.dataset_size is None:
        return Reading(None, "unknown without the number of prompts (--dataset-size)")
    if not math.isfinite(inputs.num_train_epochs):
        return Reading(None, f"unknown for {inputs.num_train_epochs:g} epochs")
    step = inputs.micro_batch * inputs.gradient_accumulation_steps
    exact = inputs.num_train_epochs * (inputs.dataset_size * factor / step)
    steps = math.ceil(exact)
    times = f" × {factor}" if factor > 1 else ""
    formula = f"{inputs.num_train_epochs:g} × {inputs.dataset_size:,}{times} / {step:,}"
    rounded = "" if exact == steps else f" = {exact:,.6g}, rounded up"
    return Reading(steps, f"{steps:,} steps ({formula}{rounded})")


def _read_steps(plan: BatchPlan) -> Reading:
    i, total = plan.inputs, plan.total_optimizer_steps
    if total is None:
        fits = plan.valid or i.dataset_size is None
        why = "without the number of prompts (--dataset-size)" if fits else "until the sizes fit"
        return Reading(None, f"unknown {why}")
    if i.max_steps > 0:
        return Reading(total, f"{total:,} steps, as max_steps sets")
    epoch = (
        f"⌊{i.dataset_size:,} / {plan.prompts_per_generation_batch:,}⌋ generation batches "
        f"× {i.num_iterations} × {plan.steps_per_generation} micro-steps, "
        f"/ {i.gradient_accumulation_steps} rounded up = {plan.optimizer_steps_per_epoch:,} an epoch"
    )
    return Reading(total, f"{total:,} steps ({epoch}, × {i.num_train_epochs:g})")


def _check_conditions(plan: BatchPlan) -> str:
    """Return which conditions of the simple formula fail here; empty if that is unknown."""
    i = plan.inputs
    dropped, micro_steps = plan.dropped_prompts_per_epoch, plan.micro_steps_per_epoch
    if dropped is None or micro_steps is None:
        return ""
    failures = []
    if dropped:
        failures.append(f"{dropped:,} of {i.dataset_size:,} prompts are dropped each epoch")
    if i.num_iterations > 1:
        failures.append(f"each completion is trained on {i.num_iterations} times")
    if short := micro_steps % i.gradient_accumulation_steps:
        failures.append(
            f"{micro_steps:,} micro-steps leave {short} after steps of {i.gradient_accumulation_steps}"
        )
    return f"; here {', and '.join(failures) if failures else 'all of that holds'}"
