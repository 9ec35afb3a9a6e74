"""The sum of a plan as a person writes it on paper, line by line.

Owns wording and order; every number comes from the plan.
"""

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, fields

from grpo_cli.batch.plan import BatchPlan

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
"""How each result comes about, by the plan's field, in order; letters as in the package's head."""
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
    """One line of the sum, as a person writes it on paper."""

    label: str
    formula: str
    result: str
    note: str = ""


def derive(plan: BatchPlan) -> list[DerivationLine]:
    """The derivation in the order of a person's sum; what cannot be computed is left out."""
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
    if plan.most_prompts_per_generation_batch:
        note = "where groups are replaced; steps and epochs count batches all the same"
        notes["most_prompts_per_generation_batch"] = note
        notes["total_completions"] = "and those of replaced groups"
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
