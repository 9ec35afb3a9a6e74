"""Settings of `training` that have no effect, leave nothing to learn, or do the opposite of what is meant."""

import math
from collections.abc import Iterator

from grpo_cli.checks.context import CheckContext
from grpo_cli.checks.partners import CLIPPED
from grpo_cli.issues import Issue, Level
from grpo_cli.recipe.recipe import Recipe


def check_training(context: CheckContext) -> Iterator[Issue]:
    """Find settings that have no effect, leave nothing to learn, or do the opposite of what is meant."""
    recipe = context.recipe
    if recipe.setting("sync_ref_model") and not recipe.kl_weight:
        seen = "there is no reference model to synchronize: `training.beta` is 0"
        fix = "set `training.beta: 0.04` or the like, or remove `sync_ref_model`"
        yield Issue(seen, fix, "training.sync_ref_model")
    yield from _check_optimization(recipe)
    yield from _check_compilation(recipe)
    if context.steps:
        yield from _check_beyond_the_end(recipe, context.steps)


def _check_compilation(recipe: Recipe) -> Iterator[Issue]:
    """Find settings that compile the model although `torch_compile` is false.

    Source: transformers 5.24, `TrainingArguments.__post_init__`.
    """
    extras = recipe.training.extras
    for name in ("torch_compile_backend", "torch_compile_mode"):
        if extras.get("torch_compile") is False and extras.get(name) is not None:
            seen = "compiles the model although `torch_compile` is false"
            fix = "remove it, or set `training.torch_compile: true`"
            yield Issue(seen, fix, f"training.{name}")


def _check_optimization(recipe: Recipe) -> Iterator[Issue]:
    """Find a learning rate and a clipping bound with which completions teach nothing.

    Source: trl 1.16, `GRPOTrainer._compute_loss`, `torch.clamp(coef_1, max=self.args.delta)`.
    """
    if not recipe.training.learning_rate:
        seen, fix = "is 0, so the weights never change", "set it to 1e-6, or 1e-5 with LoRA"
        yield Issue(seen, fix, "training.learning_rate", level="warning")
    first, second = recipe.setting("adam_beta1"), recipe.setting("adam_beta2")
    if first > second:
        seen = f"{first:g} is above `adam_beta2` ({second:g}), the slower average"
        fix = f"if they are swapped, set `adam_beta1: {second:g}` and `adam_beta2: {first:g}`"
        yield Issue(seen, fix, "training.adam_beta1", level="warning")
    if recipe.setting("loss_type") not in CLIPPED:
        return
    delta = recipe.setting("delta")
    high = recipe.setting("epsilon_high")
    low = recipe.setting("epsilon")
    bound = 1 + (low if high is None else high)
    if low >= 1:
        seen = f"is the distance from a probability ratio of 1: with {low:g} nothing is clipped from below"
        fix = f"set it to {low - 1:.2g}" if 1 < low < 2 else "set it to 0.2"
        yield Issue(seen, fix, "training.epsilon", level="warning")
    if high is not None and high < low:
        seen = (
            f"{high:g} is below `epsilon` ({low:g}), which bounds the probability ratio from below"
        )
        fix = f"if they are swapped, set `epsilon: {high:g}` and `epsilon_high: {low:g}`"
        yield Issue(seen, fix, "training.epsilon_high", level="warning")
    if delta is not None and delta <= bound:
        seen = (
            f"{delta:g} is not above 1 + epsilon ({bound:g}): better completions whose probability ratio is above "
            f"{delta:g} get no gradient, and every ratio starts at 1"
        )
        level: Level = "error" if delta < 1 else "warning"
        yield Issue(seen, "set it to 4, say, or remove it", "training.delta", level=level)


def _check_beyond_the_end(recipe: Recipe, steps: int) -> Iterator[Issue]:
    training, saves = recipe.training, recipe.setting("save_strategy")
    # Both come after the last step too, wherever it falls (transformers 5.17, `DefaultFlowCallback`).
    for key, strategy, effect in (
        ("eval", training.eval_strategy, "evaluated"),
        ("save", saves, "saved"),
    ):
        name = f"{key}_steps"
        every = recipe.setting(name) or 0
        if strategy == "steps" and name in training.model_fields_set and every > steps:
            seen = f"{every:g} is after the last step of this training ({steps}); only the last step is {effect}"
            fix = f"set it to {max(steps // 4, 1)}, say"
            yield Issue(seen, fix, f"training.{name}", level="warning")
    delay = recipe.setting("eval_delay") or 0
    # Counted in the units of `eval_strategy`.
    length = {"steps": steps, "epoch": training.num_train_epochs}.get(training.eval_strategy, delay)
    if delay > length and (training.eval_strategy == "steps" or training.max_steps < 1):
        seen = f"{delay:g} is after the end of this training ({length:g}), so nothing is evaluated"
        yield Issue(seen, "lower it, or remove it", "training.eval_delay", level="warning")
    every = recipe.setting("eval_steps") or 0
    every = math.ceil(every * steps) if every < 1 else every
    stopping, evaluations = training.early_stopping, math.ceil(steps / every) if every else 0
    if stopping and training.eval_strategy == "steps" and 0 < evaluations <= stopping.patience:
        seen = (
            f"{stopping.patience} is never reached: there are {evaluations} evaluations, and the first is the "
            "best so far whatever it gives"
        )
        fix = "set a smaller `training.eval_steps`, to evaluate more often"
        if evaluations > 2:
            fix = f"set it to {evaluations - 2} or less, or {fix}"
        yield Issue(seen, fix, "training.early_stopping.patience", level="warning")
    warmup = recipe.setting("warmup_steps") or 0
    if warmup >= steps:
        seen = (
            f"{warmup:g} warm-up steps of {steps} in all: the learning rate never reaches its value"
        )
        fix = f"set `warmup_steps: {max(steps // 10, 1)}`, or a fraction of the steps such as 0.1"
        yield Issue(seen, fix, "training.warmup_steps", level="warning")
