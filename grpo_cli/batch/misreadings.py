"""What is often read out of the settings, beside what is: three mistakes, each with its numbers here.

Owns the mistaken sums and their words. What is comes from the plan, never from here.

Source: TRL 0.14.0, the first with GRPO, `GRPOTrainer.compute_loss` (each prompt of the batch is answered
`num_generations` times); TRL 0.15.0 and 0.16.0 `GRPOTrainer.__init__` (pull request 2776: the batch counts
completions, per-device batch × processes must divide); TRL 0.17.0 `GRPOTrainer.__init__` (pull request 3283:
accumulation counts too); TRL 0.18.0 to 1.16.0 `GRPOConfig.__post_init__` (pull request 3388: the generation
batch divides).
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

from grpo_cli.batch.inputs import BatchInputs
from grpo_cli.batch.plan import BatchPlan


@dataclass(frozen=True)
class Reading:
    """A number, or a verdict on divisibility, with the sum it comes from."""

    value: int | bool | None
    """None where it cannot be known."""
    text: str


@dataclass(frozen=True)
class Misreading:
    """One mistaken reading, what it would give here, and what is."""

    topic: Literal["unit", "divisibility", "steps"]
    claim: str
    """As people say it."""
    claimed: Reading
    actual: Reading
    because: str
    """Why it is not so."""
    source: str
    """Where that can be looked up."""

    @property
    def right_here(self) -> bool | None:
        """Whether it gives the right number all the same; None where that cannot be known."""
        if self.claimed.value is None or self.actual.value is None:
            return None
        return self.claimed.value == self.actual.value

    def as_json(self) -> dict[str, Any]:
        """The misreading as plain values."""
        return asdict(self) | {"right_here": self.right_here}


def find_misreadings(plan: BatchPlan) -> list[Misreading]:
    """The usual misreadings for the settings of a plan; none where these make no sense by themselves."""
    if plan.completions_per_micro_step is None:
        return []
    return [_count_prompts(plan), *_divide_too_little(plan), *_count_steps(plan)]


def _count_prompts(plan: BatchPlan) -> Misreading:
    i = plan.inputs
    factors = (
        f"{i.per_device_train_batch_size} × {i.num_processes} × {i.gradient_accumulation_steps}"
    )
    step = i.micro_batch * i.gradient_accumulation_steps
    groups = _show(Fraction(step, i.num_generations))
    prompts = "prompt" if step == i.num_generations else "prompts"
    return Misreading(
        "unit",
        "per_device_train_batch_size counts prompts",
        Reading(
            step * i.num_generations,
            f"{step * i.num_generations:,} completions a step ({factors} = {step:,} prompts, "
            f"× {i.num_generations})",
        ),
        Reading(
            step,
            f"{step:,} completions a step ({factors}), of {groups} {prompts} (/ {i.num_generations})",
        ),
        "it counts completions, each one of a group. It counted prompts in TRL 0.14, the first with GRPO, "
        "and no longer since 0.15",
        "huggingface/trl pull request 2776",
    )


def _divide_too_little(plan: BatchPlan) -> Iterator[Misreading]:
    i, group = plan.inputs, plan.inputs.num_generations
    per_device, accumulation = i.per_device_train_batch_size, i.gradient_accumulation_steps
    actual = _divide_generation_batch(plan)
    yield Misreading(
        "divisibility",
        "per_device_train_batch_size must be a multiple of num_generations",
        _divide("", per_device, group),
        actual,
        "a group may be spread over processes and micro-steps; only the generation batch must hold whole "
        "ones. TRL 0.15 and 0.16 asked this of one process, by the next rule",
        "huggingface/trl pull request 3388; GRPOConfig.__post_init__ of TRL 1.16",
    )
    yield Misreading(
        "divisibility",
        "per_device_train_batch_size × processes must be a multiple of num_generations",
        _divide(f"{per_device} × {i.num_processes}", i.micro_batch, group),
        actual,
        "that was the rule of TRL 0.15 and 0.16. Since 0.17 accumulation counts too, and since 0.18 the "
        "generation batch does, whatever it is made of. For evaluation the old rule still holds",
        "huggingface/trl pull requests 2776, 3283 and 3388",
    )
    step = i.micro_batch * accumulation
    if step != i.generation_batch:
        yield Misreading(
            "divisibility",
            "per_device_train_batch_size × processes × gradient_accumulation_steps must be a multiple of "
            "num_generations",
            _divide(f"{per_device} × {i.num_processes} × {accumulation}", step, group),
            actual,
            "that was the rule of TRL 0.17. Since 0.18 steps_per_generation or generation_batch_size, where "
            "one is set, takes the place of accumulation",
            "huggingface/trl pull request 3388",
        )


def _divide_generation_batch(plan: BatchPlan) -> Reading:
    i = plan.inputs
    steps = i.steps_per_generation or i.gradient_accumulation_steps
    factors = f"{i.per_device_train_batch_size} × {i.num_processes} × {steps}"
    made = "generation_batch_size" if i.generation_batch_size is not None else factors
    found = _divide(f"generation batch {made}", i.generation_batch, i.num_generations)
    if plan.steps_per_generation is None:
        parts = f"micro-steps of {i.micro_batch:,}"
        return Reading(
            found.value, f"{found.text} by this rule, but it does not split into {parts}"
        )
    return found


def _divide(sum_: str, batch: int, group: int) -> Reading:
    whole, rest = divmod(batch, group)
    verdict = f" remainder {rest}: refused" if rest else ": allowed"
    before = f"{sum_} = {batch:,}; " if sum_ else ""
    return Reading(not rest, f"{before}{batch:,} / {group} = {whole:,}{verdict}")


def _count_steps(plan: BatchPlan) -> Iterator[Misreading]:
    i = plan.inputs
    actual, source = _read_steps(plan), "RepeatSampler of TRL 1.16; huggingface/trl issue 3204"
    yield Misreading(
        "steps",
        "steps = epochs × prompts / completions of a step",
        _estimate_steps(i, 1),
        actual,
        _unless_set(
            i, f"a prompt takes num_generations ({i.num_generations}) places of the batch, not one"
        ),
        source,
    )
    yield Misreading(
        "steps",
        "steps = epochs × prompts × num_generations / completions of a step",
        _estimate_steps(i, i.num_generations),
        actual,
        _unless_set(i, _say_conditions(plan)),
        source,
    )


def _estimate_steps(inputs: BatchInputs, factor: int) -> Reading:
    """Steps by a formula on paper, rounded up as the trainer does."""
    if inputs.dataset_size is None:
        return Reading(None, "not known without the number of prompts (--dataset-size)")
    if not math.isfinite(inputs.num_train_epochs):
        return Reading(None, f"not known for {inputs.num_train_epochs:g} epochs")
    step = inputs.micro_batch * inputs.gradient_accumulation_steps
    an_epoch = Fraction(inputs.dataset_size * factor, step)
    # Whole numbers stay whole: the trainer, too, multiplies them by the epochs.
    exact = inputs.num_train_epochs * (
        int(an_epoch) if an_epoch.denominator == 1 else float(an_epoch)
    )
    steps = math.ceil(exact)
    times = f" × {factor}" if factor > 1 else ""
    sum_ = f"{inputs.num_train_epochs:g} × {inputs.dataset_size:,}{times} / {step:,}"
    rounded = "" if exact == steps else f" = {exact:,.6g}, rounded up"
    return Reading(steps, f"{steps:,} steps ({sum_}{rounded})")


def _read_steps(plan: BatchPlan) -> Reading:
    i, total = plan.inputs, plan.total_optimizer_steps
    if i.max_steps > 0 and total is not None:
        return Reading(total, f"{total:,} steps, as max_steps sets")
    if total is None:
        lacking = plan.valid or i.dataset_size is None
        why = (
            "without the number of prompts (--dataset-size)" if lacking else "while they do not fit"
        )
        return Reading(None, f"not known {why}")
    epoch = (
        f"⌊{i.dataset_size:,} / {plan.prompts_per_generation_batch:,}⌋ generation batches "
        f"× {i.num_iterations} × {plan.steps_per_generation} micro-steps, "
        f"/ {i.gradient_accumulation_steps} rounded up = {plan.optimizer_steps_per_epoch:,} an epoch"
    )
    return Reading(total, f"{total:,} steps ({epoch}, × {i.num_train_epochs:g})")


def _unless_set(inputs: BatchInputs, because: str) -> str:
    if inputs.max_steps > 0:
        return f"max_steps is set, so that neither prompts nor epochs decide; besides, {because}"
    return because


def _say_conditions(plan: BatchPlan) -> str:
    """On what the simple formula rests, and which of it fails here."""
    i = plan.inputs
    dropped, micro_steps = plan.dropped_prompts_per_epoch, plan.micro_steps_per_epoch
    rule = "the formula holds where no prompt is dropped, num_iterations is 1 and accumulation divides the epoch"
    if dropped is None or micro_steps is None:
        return rule
    fails = []
    if dropped:
        fails.append(f"{dropped:,} of {i.dataset_size:,} prompts are dropped each epoch")
    if i.num_iterations > 1:
        fails.append(f"each completion is trained on {i.num_iterations} times")
    if short := micro_steps % i.gradient_accumulation_steps:
        fails.append(
            f"{micro_steps:,} micro-steps leave {short} after steps of {i.gradient_accumulation_steps}"
        )
    return f"{rule}; here {', and '.join(fails) if fails else 'all of that holds'}"


def _show(number: Fraction) -> str:
    return f"{number.numerator:,}" if number.denominator == 1 else f"{float(number):,.6g}"
