"""Time and disk of a whole training, and what is too much of either."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_cli.batch.plan import BatchPlan
from grpo_cli.issues import Issue
from grpo_cli.probing.memory import count_state_bytes
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.units import format_duration

if TYPE_CHECKING:
    from grpo_cli.probing.counting import ModelShape

_BESIDE, _INSIDE = "measuring before and after", "evaluation while training"
_SETS = "held-out sets while training"
_TOOLS, _WARMUP = "tools and environments", "warm-up"
_TOO_MUCH = 0.5
"""Share of the time beyond which scoring, or measuring, is worth a warning."""
_LARGE_DISK = 100 * 2**30
_UNSAVED_S = 3600.0
"""A training longer than this should not depend on its last step to be saved."""


@dataclass(frozen=True)
class Timings:
    """Seconds measured on this machine, for one process."""

    sample_s: float
    """For one completion, sampled in a batch, with its share of reading the prompt."""
    forward_s: float
    """For one micro-step's forward pass, without gradients."""
    micro_step_s: float
    """For one micro-step's forward and backward pass, over all of its tokens."""
    update_s: float
    """For one update of the weights."""
    tools_s: float = 0.0
    """For one episode, of the time in which the model waits for tools and environments."""
    score_s: float = 0.0
    """For one completion, by all rewards."""
    learned: float = 1.0
    """Share of a micro-step's tokens, padding included, that `training.fast` computes."""
    resampled: float = 0.0
    """Completions sampled to replace others, for one that is learned from."""


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
        """Return a part's share of the whole."""
        spent = sum(part.seconds for part in self.parts if part.name == name)
        return spent / self.total_s if self.total_s else 0.0


def estimate_time(
    recipe: Recipe,
    plan: BatchPlan,
    timings: Timings,
    eval_rows: int,
    of_sources: Mapping[str, int] | None = None,
) -> TimeEstimate | None:
    """Extrapolate what was measured to the whole training; None if its length is not known.

    Args:
        eval_rows: Held-out rows.
        of_sources: Those of each source of a mixture.
    """
    steps = plan.total_optimizer_steps
    if steps is None or plan.completions_per_optimizer_step is None:
        return None
    inner = [*_steps(recipe, plan, timings, steps)]
    beside = [
        *_warm_up(recipe, plan, timings),
        *_evaluations(recipe, plan, timings, steps, eval_rows, of_sources or {}),
    ]
    step_s = sum(part.seconds for part in inner) / max(steps, 1)
    total_s = sum(part.seconds for part in (*inner, *beside))
    return TimeEstimate((*inner, *beside), step_s, steps, total_s)


def _steps(recipe: Recipe, plan: BatchPlan, timings: Timings, steps: int) -> Iterator[TimePart]:
    iterations = recipe.training.num_iterations
    accumulation = recipe.training.gradient_accumulation_steps
    each = (plan.completions_per_optimizer_step or 0) / plan.num_processes
    sampled = (plan.total_completions or steps * each / iterations) / plan.num_processes
    sampled *= 1 + timings.resampled
    count = f"{sampled:,.0f} completions a process"
    if timings.resampled:
        count += f" ({timings.resampled:.0%} more by dynamic sampling)"
    sample_s, score_s = timings.sample_s, timings.score_s
    yield TimePart("sampling", sampled * sample_s, f"{count} × {sample_s:.3g} s")
    if timings.tools_s:
        seconds, formula = sampled * timings.tools_s, f"{count} × {timings.tools_s:.3g} s"
        yield TimePart(_TOOLS, seconds, formula)
    yield TimePart("scoring", sampled * score_s, f"{count} × {score_s:.3g} s")
    if extra := _extra_passes(recipe, plan):
        micro = accumulation / iterations
        seconds = steps * micro * extra * timings.forward_s
        formula = f"{steps} steps × {micro:g} × {extra} passes × {timings.forward_s:.3g} s"
        yield TimePart("old and reference probabilities", seconds, formula)
    seconds = steps * accumulation * timings.micro_step_s * timings.learned
    formula = f"{steps} steps × {accumulation} × {timings.micro_step_s:.3g} s"
    if timings.learned < 1:
        formula += f" × {timings.learned:.0%} of the tokens (training.fast)"
    yield TimePart("forward and backward", seconds, formula)
    formula = f"{steps} steps × {timings.update_s:.3g} s"
    yield TimePart("update", steps * timings.update_s, formula)


def _extra_passes(recipe: Recipe, plan: BatchPlan) -> int:
    """Return the forward passes beside the loss: old log-probabilities, and the reference model's.

    Source: trl 1.16, `GRPOTrainer._generate_and_score_completions`.
    """
    every = (plan.steps_per_generation or 1) * recipe.training.num_iterations
    vllm = recipe.generation.backend == "vllm"
    corrected = vllm and bool(recipe.setting("vllm_importance_sampling_correction"))
    old = recipe.training.gradient_accumulation_steps % every != 0 or corrected
    return int(old) + int(bool(recipe.kl_weight))


def _warm_up(recipe: Recipe, plan: BatchPlan, timings: Timings) -> Iterator[TimePart]:
    warmup = recipe.warmup
    if warmup is None:
        return
    if warmup.best_of is not None:
        count = warmup.limit * warmup.best_of / plan.num_processes
        each = timings.sample_s + timings.tools_s + timings.score_s
        formula = f"up to {count:,.0f} completions a process × {each:.3g} s"
        yield TimePart(f"{_WARMUP}: sampling", count * each, formula)
    learned = warmup.num_train_epochs * warmup.limit / plan.num_processes
    if warmup.max_steps is not None:
        learned = warmup.max_steps * (
            warmup.per_device_train_batch_size * warmup.gradient_accumulation_steps
        )
    # Its answers are taken to be as long as the completions that were measured.
    each = timings.micro_step_s / recipe.training.per_device_train_batch_size
    formula = f"up to {learned:,.0f} answers a process × {each:.3g} s"
    yield TimePart(_WARMUP, learned * each, formula)


def _evaluations(
    recipe: Recipe,
    plan: BatchPlan,
    timings: Timings,
    steps: int,
    eval_rows: int,
    of_sources: Mapping[str, int],
) -> Iterator[TimePart]:
    evaluation, stages = recipe.evaluation, 2 if recipe.warmup is None else 3
    rounds_of = [(_BESIDE, evaluation, stages, eval_rows)]
    for held_out in evaluation.during:
        rounds = steps // held_out.every
        if not evaluation.repeats(held_out):
            # Before the first step too, and after the last one wherever that falls.
            rounds = 1 + math.ceil(steps / held_out.every)
        own = of_sources.get(held_out.source or "", eval_rows)
        rounds_of.append((_SETS, evaluation.settings_of(held_out), rounds, own))
    for name, settings, rounds, known in rounds_of:
        rows = known if settings.limit is None else min(settings.limit, known)
        if rows and rounds:
            # Greedy completions of a prompt are all the same, and sampled once.
            samples = 1 if settings.temperature == 0 else settings.samples_per_prompt
            times = f" × {samples} completions" if samples > 1 else ""
            each = timings.sample_s + timings.tools_s + timings.score_s
            formula = f"{rounds} × {rows} prompts{times} × {each:.3g} s"
            yield TimePart(name, rounds * rows * samples / plan.num_processes * each, formula)
    if plan.eval_completions:
        every = _eval_interval(recipe)
        # After the last step too, wherever it falls (transformers 5.17, `DefaultFlowCallback`).
        rounds = count_events(every, steps - 1, steps) + 1
        if recipe.training.eval_strategy == "epoch":
            rounds = _count_epochs(plan, steps)
        each = timings.sample_s + timings.tools_s + timings.score_s
        formula = f"{rounds} × {plan.eval_completions} completions × {each:.3g} s"
        seconds = rounds * plan.eval_completions / plan.num_processes * each
        yield TimePart(_INSIDE, seconds, formula)


def _eval_interval(recipe: Recipe) -> float:
    return float(recipe.setting("eval_steps") or recipe.setting("logging_steps"))


def count_events(every: float, steps: int, total: int) -> int:
    """Return how often something happens in `steps`: every so many, or every share of `total`."""
    interval = every if every >= 1 else math.ceil(every * total)
    return int(steps // interval) if interval else 0


def _count_epochs(plan: BatchPlan, steps: int) -> int:
    """Return how many epochs come to an end; the last one may be cut short."""
    return math.ceil(steps / (plan.optimizer_steps_per_epoch or steps or 1))


def judge_time(recipe: Recipe, time: TimeEstimate) -> Iterator[Issue]:
    """Find time that goes elsewhere than into learning, and hours that nothing saves."""
    scoring, subject = time.share("scoring"), "cost: scoring"
    if scoring > _TOO_MUCH:
        seen, why = (
            f"rewards take {scoring:.0%} of the time",
            "the devices wait while completions are scored",
        )
        fix = (
            "set `timeout_s` on the slow one (completions are then scored side by side), or `when` to narrow the "
            "rows it sees"
        )
        yield Issue(seen, fix, "rewards", level="warning", subject=subject, why=why)
    tools = time.share(_TOOLS)
    if tools > _TOO_MUCH:
        yield Issue(
            f"tools and environments take {tools:.0%} of the time",
            f"raise `episode.parallel` (now {recipe.episode.parallel}), or make the slow one faster",
            "episode.parallel",
            level="warning",
            subject="cost: tools",
            why="the model waits while calls run",
        )
    shares = {name: time.share(name) for name in (_BESIDE, _INSIDE, _SETS)}
    measuring, most = sum(shares.values()), max(shares, key=shares.__getitem__)
    if measuring > _TOO_MUCH and time.total_s > _UNSAVED_S:
        path, fix = "training.eval_steps", f"raise `eval_steps` (now {_eval_interval(recipe):g})"
        if most == _SETS:
            path, fix = "evaluation.during", "raise `every`, or lower `limit`"
        elif most == _BESIDE:
            limit = max((recipe.evaluation.limit or 256) // 8, 1)
            path, fix = "evaluation.limit", f"set `evaluation.limit: {limit}`"
        seen = f"evaluation takes {measuring:.0%} of {format_duration(time.total_s)}"
        subject, why = "cost: evaluation", "less than half of the time is training"
        yield Issue(seen, fix, path, level="warning", subject=subject, why=why)
    training_s, path = time.step_s * time.steps, "training.save_strategy"
    strategy, every = recipe.setting("save_strategy"), recipe.setting("save_steps")
    late = strategy == "steps" and not count_events(every, time.steps - 1, time.steps)
    if training_s > _UNSAVED_S and (strategy == "no" or late):
        length = f"the {time.steps} steps take about {format_duration(training_s)}"
        seen = f"{length}, and no checkpoint is saved before the last one"
        often = max(int(_UNSAVED_S / 2 / time.step_s), 1)
        fix = f"set `training.save_strategy: steps` and `training.save_steps: {often}`"
        subject, why = "cost: nothing is saved", "a crash in the last minute loses everything"
        yield Issue(seen, fix, path, level="warning", subject=subject, why=why)


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
        """Bytes at the most; if old checkpoints are deleted, one more while the next is written."""
        return (self.checkpoints + self.rotates) * self.checkpoint_bytes + self.model_bytes


def estimate_disk(recipe: Recipe, plan: BatchPlan, shape: "ModelShape") -> DiskEstimate:
    """Return what the checkpoints that are kept, and the final model, will take."""
    lora = recipe.model.lora is not None
    model = shape.trainable_bytes if lora else shape.weight_bytes
    optimizer = str(recipe.setting("optim"))
    states = count_state_bytes(optimizer, shape.trainable, shape.trainable_bytes)
    states = 0 if recipe.setting("save_only_model") else states
    strategy, steps = recipe.setting("save_strategy"), plan.total_optimizer_steps or 0
    # How often the best metric gets better nobody knows; at least once.
    saves = 1 if strategy == "best" else 0
    if strategy == "steps" and steps:
        # The last step is saved too, wherever it falls (transformers 5.17, `DefaultFlowCallback`).
        saves = count_events(recipe.setting("save_steps"), steps - 1, steps) + 1
    elif strategy == "epoch" and steps:
        saves = _count_epochs(plan, steps)
    limit = recipe.setting("save_total_limit")
    if limit and recipe.best_metric:
        # The newest is kept beside the best (transformers 5.17, `rotate_checkpoints`).
        limit = max(limit, 2)
    kept = min(saves, limit) if limit else saves
    saved = "adapter" if lora else "weights"
    content = f"{saved} {'and optimizer states' if states else 'only'}"
    more = ", once more while the next is written," if kept < saves else ""
    formula = f"{kept} × ({content}){more} and the final {saved}"
    return DiskEstimate(model + states, kept, model, kept < saves, formula)


def judge_disk(disk: DiskEstimate, free: int) -> Iterator[Issue]:
    """Find checkpoints that will not fit, or take much."""
    full = disk.total > free
    if not full and disk.total <= _LARGE_DISK:
        return
    yield Issue(
        f"{disk.total / 2**30:.1f} GiB for checkpoints and model, {free / 2**30:.1f} GiB free",
        "lower `training.save_total_limit`, or set `training.save_only_model: true` (without exact resume)",
        "training.save_total_limit",
        level="error" if full else "warning",
        subject="cost: disk",
        why="a full disk ends the training in the middle of a checkpoint"
        if full
        else "checkpoints hold the optimizer's states too",
    )
