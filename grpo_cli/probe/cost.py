"""What a whole training will take: time and disk, from what was measured and from the plan.

Owns the sums. Memory has a module of its own (`memory.py`); the measurements are `rehearsal.py`'s.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_cli.batch import BatchPlan
from grpo_cli.checks.settings import read_setting
from grpo_cli.models.shape import ModelShape
from grpo_cli.recipe.recipe import Recipe

BESIDE, INSIDE = "measuring before and after", "evaluation while training"


@dataclass(frozen=True)
class Timings:
    """Seconds measured on this machine, for one process."""

    sample_s: float
    """For one completion, sampled in a batch, with its share of reading the prompt."""
    measure_s: float
    """For one completion that is sampled before or after training, to measure by."""
    score_s: float
    """For one completion, by all rewards."""
    forward_s: float
    """For one micro-step's forward pass, without gradients."""
    micro_step_s: float
    """For one micro-step's forward and backward pass, over all of its tokens."""
    update_s: float
    """For one update of the weights."""
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
        """A part's share of the whole."""
        spent = sum(part.seconds for part in self.parts if part.name == name)
        return spent / self.total_s if self.total_s else 0.0


def shares_after(silent: float, rounds: int) -> list[float]:
    """Groups without signal after each time of sampling, as shares of those that are learned from.

    Args:
        silent: The share of prompts whose groups have none.
        rounds: How often such groups are replaced.
    """
    return [silent ** (number + 1) for number in range(rounds + 1)]


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
    sampled *= 1 + timings.resampled
    per_process = f"{sampled:,.0f} completions a process"
    if timings.resampled:
        per_process += f" ({timings.resampled:.0%} more by dynamic sampling)"
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
    passes = f"{steps} steps × {accumulation} × {timings.micro_step_s:.3g} s"
    share = f" × {timings.learned:.0%} of the tokens (training.fast)"
    yield TimePart(
        "forward and backward",
        steps * accumulation * timings.micro_step_s * timings.learned,
        passes + (share if timings.learned < 1 else ""),
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
        alone = timings.measure_s + timings.score_s
        yield TimePart(
            BESIDE,
            2 * measured * samples / plan.num_processes * alone,
            f"twice {measured} prompts{times} × {alone:.3g} s",
        )
    if plan.eval_completions:
        rounds = _evaluations(recipe, plan, steps)
        count = rounds * plan.eval_completions / plan.num_processes
        yield TimePart(
            INSIDE,
            count * each,
            f"{rounds} × {plan.eval_completions} completions × {each:.3g} s",
        )


def _evaluations(recipe: Recipe, plan: BatchPlan, steps: int) -> int:
    if recipe.training.eval_strategy == "epoch":
        return max(steps // max(plan.optimizer_steps_per_epoch or steps, 1), 1)
    return count_events(
        read_setting(recipe, "eval_steps") or read_setting(recipe, "logging_steps"), steps
    )


def count_events(every: float, steps: int, total: int | None = None) -> int:
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
        saves = count_events(read_setting(recipe, "save_steps"), steps - 1, steps) + 1
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
