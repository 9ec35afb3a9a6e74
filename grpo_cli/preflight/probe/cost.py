"""What a whole training will take: time and disk, from what was measured and from the plan.

Owns the sums. Memory has a module of its own (`memory.py`); the measurements are `rehearsal.py`'s.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from grpo_cli.batch import BatchPlan, plan_batch
from grpo_cli.models.shape import ModelShape
from grpo_cli.preflight.finding import Finding
from grpo_cli.preflight.probe.memory import MemoryEstimate
from grpo_cli.preflight.settings import read_setting
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.units import format_duration

NEARLY_FULL = 0.9
SLOW_SCORING, SLOW_EVALUATION = 0.5, 0.5
"""Shares of the time beyond which scoring, or measuring, is worth a warning."""
LARGE_DISK = 100 * 2**30
_BESIDE, _INSIDE = "measuring before and after", "evaluation while training"
UNSAVED_S = 3600.0
"""A training longer than this should not depend on its last step to be saved."""


@dataclass(frozen=True)
class Timings:
    """Seconds measured on this machine, for one process."""

    sample_s: float
    """For one completion, sampled in a batch."""
    score_s: float
    """For one completion, by all rewards."""
    forward_s: float
    """For one micro-step's forward pass, without gradients."""
    micro_step_s: float
    """For one micro-step's forward and backward pass."""
    update_s: float
    """For one update of the weights."""


@dataclass(frozen=True)
class TimePart:
    """One use of time in an optimizer step, or beside the steps."""

    name: str
    seconds: float
    """Over the whole training."""
    formula: str


@dataclass(frozen=True)
class TimeEstimate:
    """How long a training will take."""

    parts: tuple[TimePart, ...]
    step_s: float
    """Seconds for one optimizer step."""
    steps: int
    total_s: float

    def share(self, name: str) -> float:
        """A part's share of the whole."""
        spent = sum(part.seconds for part in self.parts if part.name == name)
        return spent / self.total_s if self.total_s else 0.0


def estimate_time(
    recipe: Recipe, plan: BatchPlan, timings: Timings, eval_rows: int
) -> TimeEstimate | None:
    """Extrapolates what was measured to the whole training; None where its length is not known."""
    steps = plan.total_optimizer_steps
    if steps is None or plan.completions_per_optimizer_step is None:
        return None
    inner = [*_steps(recipe, plan, timings, steps)]
    beside = [*_beside(recipe, plan, timings, steps, eval_rows)]
    step_s = sum(part.seconds for part in inner) / max(steps, 1)
    total_s = sum(part.seconds for part in (*inner, *beside))
    return TimeEstimate((*inner, *beside), step_s, steps, total_s)


def _steps(recipe: Recipe, plan: BatchPlan, timings: Timings, steps: int) -> Iterator[TimePart]:
    iterations = recipe.training.num_iterations
    accumulation = recipe.training.gradient_accumulation_steps
    own = (plan.completions_per_optimizer_step or 0) / plan.num_processes
    sampled = (plan.total_completions or steps * own / iterations) / plan.num_processes
    per_process = f"{sampled:,.0f} completions a process"
    yield TimePart(
        "sampling", sampled * timings.sample_s, f"{per_process} × {timings.sample_s:.3g} s"
    )
    yield TimePart("scoring", sampled * timings.score_s, f"{per_process} × {timings.score_s:.3g} s")
    extra = _extra_passes(recipe, plan)
    if extra:
        micro = accumulation / iterations
        yield TimePart(
            "old and reference probabilities",
            steps * micro * extra * timings.forward_s,
            f"{steps} steps × {micro:g} × {extra} passes × {timings.forward_s:.3g} s",
        )
    yield TimePart(
        "forward and backward",
        steps * accumulation * timings.micro_step_s,
        f"{steps} steps × {accumulation} × {timings.micro_step_s:.3g} s",
    )
    yield TimePart("update", steps * timings.update_s, f"{steps} steps × {timings.update_s:.3g} s")


def _extra_passes(recipe: Recipe, plan: BatchPlan) -> int:
    """Forward passes beside the loss: old log-probabilities, and the reference model's.

    Source: trl 1.16, `GRPOTrainer._generate_and_score_completions`.
    """
    every = (plan.steps_per_generation or 1) * recipe.training.num_iterations
    corrected = recipe.generation.backend == "vllm" and read_setting(
        recipe, "vllm_importance_sampling_correction"
    )
    old = recipe.training.gradient_accumulation_steps % every != 0 or bool(corrected)
    return int(old) + int(bool(read_setting(recipe, "beta")))


def _beside(
    recipe: Recipe, plan: BatchPlan, timings: Timings, steps: int, eval_rows: int
) -> Iterator[TimePart]:
    each = timings.sample_s + timings.score_s
    limit = recipe.evaluation.limit
    measured = eval_rows if limit is None else min(limit, eval_rows)
    if measured:
        # Greedy completions of a prompt are all the same, and sampled once.
        greedy = recipe.evaluation.temperature == 0
        samples = 1 if greedy else recipe.evaluation.samples_per_prompt
        times = f" × {samples} completions" if samples > 1 else ""
        yield TimePart(
            _BESIDE,
            2 * measured * samples / plan.num_processes * each,
            f"twice {measured} prompts{times} × {each:.3g} s",
        )
    if plan.eval_completions:
        rounds = _evaluations(recipe, plan, steps)
        count = rounds * plan.eval_completions / plan.num_processes
        yield TimePart(
            _INSIDE,
            count * each,
            f"{rounds} × {plan.eval_completions} completions × {each:.3g} s",
        )


def _evaluations(recipe: Recipe, plan: BatchPlan, steps: int) -> int:
    if recipe.training.eval_strategy == "epoch":
        return max(steps // max(plan.optimizer_steps_per_epoch or steps, 1), 1)
    return _count(
        read_setting(recipe, "eval_steps") or read_setting(recipe, "logging_steps"), steps
    )


def _count(every: float, steps: int, total: int | None = None) -> int:
    """How often something happens in `steps` that happens every so many steps, or every share of
    `total` (of `steps` where it is not given)."""
    interval = every if every >= 1 else max(every * (total or steps), 1)
    return int(steps // interval) if interval else 0


@dataclass(frozen=True)
class DiskEstimate:
    """What a run folder will take."""

    checkpoint_bytes: int
    checkpoints: int
    """How many are kept."""
    model_bytes: int
    rotates: bool
    """Whether older checkpoints are deleted once a newer one is written."""
    formula: str

    @property
    def total(self) -> int:
        """Bytes at the most; where old checkpoints are deleted, one more while the next is written."""
        writing = 1 if self.rotates else 0
        return (self.checkpoints + writing) * self.checkpoint_bytes + self.model_bytes


def estimate_disk(recipe: Recipe, plan: BatchPlan, shape: ModelShape) -> DiskEstimate:
    """Checkpoints that are kept, and the final model."""
    lora = recipe.model.lora is not None
    model = shape.trainable_bytes if lora else shape.weight_bytes
    states = 0 if read_setting(recipe, "save_only_model") else 2 * shape.trainable_bytes
    steps = plan.total_optimizer_steps or 0
    strategy, saves = read_setting(recipe, "save_strategy"), 0
    if strategy == "steps" and steps:
        # The last step is saved too, wherever it falls (transformers 5.17, `DefaultFlowCallback`).
        saves = _count(read_setting(recipe, "save_steps"), steps - 1, steps) + 1
    elif strategy == "epoch" and steps:
        saves = max(steps // max(plan.optimizer_steps_per_epoch or steps, 1), 1)
    elif strategy == "best":
        # How often the metric gets better nobody knows; at least once.
        saves = 1
    limit = read_setting(recipe, "save_total_limit")
    kept = min(saves, limit) if limit else saves
    what = "adapter" if lora else "weights"
    formula = (
        f"{kept} × ({what} {'and optimizer states' if states else 'only'}) and the final {what}"
    )
    return DiskEstimate(model + states, kept, model, kept < saves, formula)


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
    memory: MemoryEstimate, available: int | None, recipe: Recipe, plan: BatchPlan
) -> Iterator[Finding]:
    """More memory than there is."""
    if available is None or memory.peak_bytes <= NEARLY_FULL * available:
        return
    over = memory.peak_bytes > available
    worst = memory.largest()
    yield Finding(
        "cost: memory",
        "error" if over else "warning",
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
    measuring = time.share(_BESIDE) + time.share(_INSIDE)
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
    beside = time.share(_BESIDE) >= time.share(_INSIDE)
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
        strategy == "steps" and not _count(read_setting(recipe, "save_steps"), steps - 1, steps)
    )
