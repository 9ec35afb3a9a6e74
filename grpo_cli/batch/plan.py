"""What follows from the settings: whether they are valid, and every count of steps and samples."""

import math
from collections.abc import Set
from dataclasses import asdict, dataclass, fields
from typing import Any

from grpo_cli.batch.rules import (
    DATASET,
    DURATION,
    GROUPS,
    NOT_BATCH,
    SPLIT,
    BatchInputs,
    Suggestion,
    can_evaluate,
    describe_fix,
    find_broken_rules,
    find_invalid_values,
    suggest,
)
from grpo_cli.errors import Problem


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What follows from `inputs`; None if a value is unknown or the rules forbid it."""

    inputs: BatchInputs
    valid: bool
    problems: tuple[Problem, ...]
    suggestions: tuple[Suggestion, ...]
    """Smallest relative change first."""
    num_processes: int
    completions_per_micro_step: int | None = None
    completions_per_optimizer_step: int | None = None
    prompts_per_optimizer_step: int | float | None = None
    """`B·N·A / G`, for a full optimizer step. Fractional if a step holds parts of groups (`S > A`
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
    """Prompts repeated to fill the last batch of several processes; the metrics count them."""


def plan_batch(inputs: BatchInputs) -> BatchPlan:
    """Derive every count from `inputs` and find all problems at once.

    Stricter than TRL about `max_steps: 0` (TRL trains one step), `num_generations_eval: 0` (TRL takes
    `num_generations`) and empty data (TRL succeeds after no step, or without a metric).
    """
    invalid = find_invalid_values(inputs)
    broken = find_broken_rules(inputs, invalid.keys())
    problems, suggestions = list(invalid.values()), []
    for path, message in broken.items():
        fixes = suggest(inputs, path, invalid.keys())
        problems.append(Problem(message, describe_fix(inputs, path, fixes), path))
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
    if invalid - NOT_BATCH:
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
    if broken & {SPLIT, GROUPS, DATASET}:
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
    return numbers if invalid & DURATION else numbers | _total_numbers(inputs, numbers)


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
    if not can_evaluate(inputs, invalid):
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
