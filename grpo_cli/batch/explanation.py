"""The derivation of a plan line by line, and the three usual misreadings of the settings with their numbers.

Source: TRL 0.14.0, the first with GRPO, `GRPOTrainer.compute_loss` (each prompt of the batch is answered
`num_generations` times); TRL 0.15.0 `GRPOTrainer.__init__` (pull request 2776: the batch counts completions); TRL
0.18.0 to 1.16.0 `GRPOConfig.__post_init__` (pull request 3388: the generation batch divides).
"""

import math
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
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
        """Return whether the mistake gives the right number anyway; None if unknown."""
        if self.claimed.value is None or self.actual.value is None:
            return None
        return self.claimed.value == self.actual.value

    def as_json(self) -> dict[str, Any]:
        """Return the misreading as plain values."""
        return asdict(self) | {"right_here": self.right_here}


def find_misreadings(plan: BatchPlan) -> list[Misreading]:
    """Return the common misreadings of a plan's settings; none if these are invalid by themselves."""
    i, step = plan.inputs, plan.completions_per_optimizer_step
    if step is None:
        return []
    group, machine = i.num_generations, f"{i.per_device_train_batch_size} × {i.num_processes}"
    factors = f"{machine} × {i.gradient_accumulation_steps}"
    micro_steps = i.steps_per_generation or i.gradient_accumulation_steps
    is_set = i.generation_batch_size is not None
    batch = "generation_batch_size" if is_set else f"{machine} × {micro_steps}"
    prompts = f"{step:,} completions a step ({factors}), of {step / group:,.6g} prompts (/ {group})"
    return [
        Misreading(
            "unit",
            "per_device_train_batch_size counts prompts",
            Reading(
                step * group,
                f"{step * group:,} completions a step ({factors} = {step:,} prompts, × {group})",
            ),
            Reading(step, prompts),
            "it counts completions, each one of a group. It counted prompts in TRL 0.14, the first with GRPO, "
            "and no longer since 0.15",
            "huggingface/trl pull request 2776",
        ),
        Misreading(
            "divisibility",
            "per_device_train_batch_size must be a multiple of num_generations",
            _divide("", i.per_device_train_batch_size, group),
            _divide(f"generation batch {batch} = ", i.generation_batch, group),
            "a group may be spread over processes and micro-steps; only the generation batch must hold whole "
            "groups. TRL 0.15 and 0.16 required it of all processes together",
            "huggingface/trl pull request 3388; GRPOConfig.__post_init__ of TRL 1.16",
        ),
        Misreading(
            "steps",
            "steps = epochs × prompts / completions of a step",
            _estimate_steps(i, step),
            _read_steps(plan),
            f"a prompt takes num_generations ({group}) places of the batch, not one",
            "RepeatSampler of TRL 1.16; huggingface/trl issue 3204",
        ),
    ]


def _divide(factors: str, batch: int, group: int) -> Reading:
    whole, rest = divmod(batch, group)
    verdict = f" remainder {rest}: refused" if rest else ": allowed"
    before = f"{factors}{batch:,}; " if factors else ""
    return Reading(not rest, f"{before}{batch:,} / {group} = {whole:,}{verdict}")


def _estimate_steps(inputs: BatchInputs, step: int) -> Reading:
    """Return the steps by the simple formula, rounded up as the trainer does."""
    if inputs.dataset_size is None:
        return Reading(None, "unknown without the number of prompts (--dataset-size)")
    exact = inputs.num_train_epochs * inputs.dataset_size / step
    formula = f"{inputs.num_train_epochs:g} × {inputs.dataset_size:,} / {step:,}"
    if not math.isfinite(exact):
        return Reading(None, f"unknown ({formula})")
    rounded = "" if exact == math.ceil(exact) else f" = {exact:,.6g}, rounded up"
    return Reading(math.ceil(exact), f"{math.ceil(exact):,} steps ({formula}{rounded})")


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
