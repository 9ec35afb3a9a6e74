"""Whether a machine can afford a training: memory, disk and time against what there is, and what to change.

Owns the limits and the advice. The estimates are `cost.py`'s and `memory.py`'s.
"""

from collections.abc import Iterator
from dataclasses import replace

from grpo_cli.batch import BatchPlan, plan_batch
from grpo_cli.checks.settings import read_setting
from grpo_cli.issues import Finding
from grpo_cli.probe.cost import BESIDE, INSIDE, DiskEstimate, TimeEstimate, count_events
from grpo_cli.probe.memory import MemoryEstimate
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.units import format_duration

NEARLY_FULL = 0.9
SLOW_SCORING, SLOW_EVALUATION = 0.5, 0.5
"""Shares of the time beyond which scoring, or measuring, is worth a warning."""
LARGE_DISK = 100 * 2**30
UNSAVED_S = 3600.0
"""A training longer than this should not depend on its last step to be saved."""


def judge_disk(disk: DiskEstimate, free: int) -> Iterator[Finding]:
    """Checkpoints that will not fit."""
    if disk.total > free:
        level, why = "error", "a full disk ends the training in the middle of a checkpoint"
    elif disk.total > LARGE_DISK:
        level, why = (
            "warning",
            "checkpoints hold the optimizer's states too, and all of them are kept",
        )
    else:
        return
    yield Finding(
        "cost: disk",
        "error" if level == "error" else "warning",
        f"{disk.total / 2**30:.1f} GiB for checkpoints and model, {free / 2**30:.1f} GiB free",
        "set `training.save_total_limit: 2`, or `training.save_only_model: true`",
        why,
        "training.save_total_limit",
    )


def judge_memory(
    memory: MemoryEstimate, available: int | None, recipe: Recipe, plan: BatchPlan, *, cuda: bool
) -> Iterator[Finding]:
    """Find more memory than there is; on CUDA that is a warning, until the estimate has been measured there."""
    if available is None or memory.peak_bytes <= NEARLY_FULL * available:
        return
    over = memory.peak_bytes > available
    worst = memory.largest()
    yield Finding(
        "cost: memory",
        "error" if over and not cuda else "warning",
        f"about {memory.peak_bytes / 2**30:.1f} GiB a process, {available / 2**30:.1f} GiB available; the "
        f"largest part is {worst.name} ({worst.bytes / 2**30:.1f} GiB)",
        _shrink(worst.name, recipe, plan),
        "a training that runs out of memory is killed, most often at its longest batch",
        "training.per_device_train_batch_size",
    )


def _smaller_batch(plan: BatchPlan) -> str:
    """The same completions a step in smaller micro-steps, as far as the arithmetic allows."""
    inputs = plan.inputs
    total = inputs.per_device_train_batch_size * inputs.gradient_accumulation_steps
    for batch in range(inputs.per_device_train_batch_size // 2, 0, -1):
        if total % batch:
            continue
        split = replace(
            inputs,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=total // batch,
        )
        if plan_batch(split).valid:
            return (
                f"set `per_device_train_batch_size: {batch}` and "
                f"`gradient_accumulation_steps: {total // batch}`"
            )
    return "lower `max_completion_length`"


def _shrink(part: str, recipe: Recipe, plan: BatchPlan) -> str:
    smaller = _smaller_batch(plan)
    advice = {
        "weights": "take a smaller model"
        if recipe.model.quantization
        else "add `model.lora` with `model.quantization: 4bit`, or take a smaller model",
        "optimizer states": "add `model.lora`, or set `training.optim: adamw_8bit`",
        "gradients": "add `model.lora`",
        "reference model": "set `training.beta: 0`, or add `model.lora` (it needs no second copy)",
        "keys and values": "lower `per_device_train_batch_size`, or set `generation.backend: vllm`",
        "vLLM": "lower `generation.vllm.gpu_memory_utilization`",
    }
    checkpointing = read_setting(recipe, "gradient_checkpointing")
    if part == "activations" and not checkpointing:
        return f"set `gradient_checkpointing: true`, or {smaller.removeprefix('set ')}"
    return advice.get(part, smaller)


def judge_time(recipe: Recipe, time: TimeEstimate) -> Iterator[Finding]:
    """Time that goes elsewhere than into learning, and hours that nothing saves."""
    if time.share("scoring") > SLOW_SCORING:
        yield Finding(
            "cost: scoring",
            "warning",
            f"rewards take {time.share('scoring'):.0%} of the time",
            "set `timeout_s` on the slow one (completions are then scored side by side), or `when` to "
            "narrow the rows it sees",
            "the devices wait while completions are scored",
            "rewards",
        )
    measuring = time.share(BESIDE) + time.share(INSIDE)
    if measuring > SLOW_EVALUATION and time.total_s > UNSAVED_S:
        yield _slow_evaluation(recipe, time, measuring)
    training_s = time.step_s * time.steps
    if training_s > UNSAVED_S and _saves_nothing(recipe, time.steps):
        every = max(int(UNSAVED_S / 2 / time.step_s), 1)
        yield Finding(
            "cost: nothing is saved",
            "warning",
            f"the {time.steps} steps take about {format_duration(training_s)}, and no checkpoint is saved "
            "before the last one",
            f"set `training.save_strategy: steps` and `training.save_steps: {every}`",
            "a crash in the last minute loses everything",
            "training.save_strategy",
        )


def _slow_evaluation(recipe: Recipe, time: TimeEstimate, measuring: float) -> Finding:
    beside = time.share(BESIDE) >= time.share(INSIDE)
    every = read_setting(recipe, "eval_steps") or read_setting(recipe, "logging_steps")
    limit = recipe.evaluation.limit or 256
    return Finding(
        "cost: evaluation",
        "warning",
        f"evaluation takes {measuring:.0%} of {format_duration(time.total_s)}",
        f"set `evaluation.limit: {max(limit // 8, 1)}`"
        if beside
        else f"raise `training.eval_steps` (now {every:g})",
        "less than half of the time is training",
        "evaluation.limit" if beside else "training.eval_steps",
    )


def _saves_nothing(recipe: Recipe, steps: int) -> bool:
    strategy = read_setting(recipe, "save_strategy")
    return strategy == "no" or (
        strategy == "steps"
        and not count_events(read_setting(recipe, "save_steps"), steps - 1, steps)
    )
