"""Checks of the `training` section: settings without effect, precision, and risks of learning little."""

import math
from collections.abc import Iterator
from dataclasses import replace

from grpo_cli.checks.compatibility import CLIPPED
from grpo_cli.checks.context import CheckContext
from grpo_cli.errors import install_extra
from grpo_cli.issues import Issue, Level
from grpo_cli.recipe.launch import KEEPS_FLOAT32
from grpo_cli.recipe.loading import LoadedRecipe
from grpo_cli.recipe.model import LORA, rates_of
from grpo_cli.recipe.recipe import Recipe

_FINE_ENOUGH = 5e-5
"""The learning rate from which an update by AdamW moves a usual weight, of 0.02, by half a step of bfloat16."""
_COMPENSATED = ("use_kahan_summation", "bf16_stochastic_round", "kahan_sum")
"""`optim_args` of optimizers that do not lose what bfloat16 rounds away."""
_MOST_BETA = 1.0
"""Published runs use 0.001 to 0.04; from here on the KL term outweighs the reward."""
_HELD_RATE = 1e-5
"""Up to it, clipped gradients alone have held full fine-tuning without a KL term in published runs."""
_FEWEST_GENERATIONS = 4
_LEAST_TEMPERATURE = 0.3


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
    is_off = "torch_compile" in recipe.training.model_fields_set
    is_off = is_off and not recipe.setting("torch_compile")
    for name in ("torch_compile_backend", "torch_compile_mode"):
        if is_off and recipe.setting(name) is not None:
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


def resolve_dtype(loaded: LoadedRecipe) -> LoadedRecipe:
    """Replace `model.dtype: auto` by float32 if all weights are trained."""
    recipe = loaded.recipe
    if recipe is None or recipe.model.dtype != "auto" or not _trains_all(recipe):
        return loaded
    model = recipe.model.model_copy(update={"dtype": "float32"})
    return replace(loaded, recipe=recipe.model_copy(update={"model": model}))


def check_precision(context: CheckContext) -> Iterator[Issue]:
    """Find 16-bit weights that lose what they learn, and bfloat16 that the processor emulates.

    Source: trl 1.16, `GRPOTrainer._generate_single_turn`, `unwrapped_model.to(torch.bfloat16)`.
    """
    recipe, cpu = context.recipe, context.on_cpu
    fp16, bf16 = recipe.setting("fp16"), recipe.setting("bf16")
    if fp16 and bf16:
        seen = "`fp16` and `bf16` are both true, and a model is computed in one precision"
        yield Issue(seen, "remove `fp16`", "training.fp16")
    elif fp16 and cpu:
        seen = "fp16 needs a GPU, and this training is on a CPU"
        yield Issue(seen, "remove `fp16`", "training.fp16")
    names = {"bf16": "bfloat16", "fp16": "float16", "no": None}
    mixed, dtype = names[recipe.mixed_precision(cpu=cpu)], recipe.model.dtype
    if _loses_updates(recipe, mixed):
        rate = float(recipe.setting("learning_rate"))
        seen = (
            f"with all weights in bfloat16, a learning rate of {rate:g} is lost: a weight changes only if its "
            "update is more than 1/512 of it, and most updates are rounded away"
        )
        fix = (
            "set `dtype: float32` (on a GPU it is computed in bfloat16 all the same), or add `lora`"
        )
        yield Issue(seen, fix, "model.dtype")
    trained = dtype if _trains_all(recipe) else "float32"
    if mixed == trained == "float16":
        seen = "with fp16, torch scales gradients and refuses those of float16 weights"
        yield Issue(
            seen, "set `dtype: float32`: it is computed in float16 all the same", "model.dtype"
        )
    attention = str(recipe.model.attn_implementation)
    if attention.startswith("flash_attention") and mixed is None and dtype == "float32":
        seen = f"{attention} computes in 16 bits alone, and these weights are float32 without `bf16` or `fp16`"
        yield Issue(seen, "set `training.bf16: true`", "model.attn_implementation", level="warning")
    batching = recipe.generation.backend == "transformers_continuous_batching"
    if batching and mixed not in (None, trained):
        seen = f"before each sampling it turns the whole model to {mixed}, and rounds the trained weights with it"
        fix = "set `backend: vllm` or `backend: transformers`, or `training.bf16: false`"
        yield Issue(seen, fix, "generation.backend")
    if not cpu or context.hardware.bfloat16 is not False:
        return
    for path, is_set, value in (
        ("model.dtype", dtype == "bfloat16", "auto"),
        ("training.bf16", bf16, "false"),
    ):
        if is_set:
            seen = (
                "this processor emulates bfloat16 (it has none of avx512_bf16, amx_bf16 and ARM's bf16), which "
                "takes two to ten times as long as float32"
            )
            yield Issue(seen, f"set `{path}: {value}`", path, level="warning")


def _trains_all(recipe: Recipe) -> bool:
    return recipe.model.lora is None and recipe.model.quantization is None


def _loses_updates(recipe: Recipe, mixed: str | None) -> bool:
    rate, launch = float(recipe.setting("learning_rate")), recipe.launch
    if not _trains_all(recipe) or recipe.model.dtype != "bfloat16" or rate >= _FINE_ENOUGH:
        return False
    if launch.accelerate_config or (mixed and launch.strategy in KEEPS_FLOAT32):
        return False
    options = str(recipe.setting("optim_args") or "").lower().replace(" ", "")
    return not any(f"{name}=true" in options for name in _COMPENSATED)


def check_risks(context: CheckContext) -> Iterator[Issue]:
    """Find settings that run to the end and teach little."""
    recipe, num_processes = context.recipe, context.num_processes
    yield from _check_rate(recipe)
    yield from _check_hold(recipe)
    yield from _check_narrowing(recipe)
    for index, reward in enumerate(recipe.rewards):
        params = context.rewards.get(index)
        judges = params is not None and params.meta.right_answer is not None
        if reward.weight < 0 and judges and reward.kind != "contains":
            seen, fix = (
                f"`{reward.kind}` has weight {reward.weight:g}",
                f"set `weight: {-reward.weight:g}`",
            )
            why = "right answers are punished, and the policy learns to avoid them"
            yield _risk("reward weights", f"rewards.{index}.weight", seen, fix, why)
    size = recipe.generation.num_generations
    if size < _FEWEST_GENERATIONS:
        fix = "set `num_generations: 8` (and a batch size it divides: grpo check-batch)"
        why = f"advantages compare {size} completions only: most groups are all right or all wrong"
        path = "generation.num_generations"
        yield _risk("group size", path, f"num_generations is {size}", fix, why)
    on_gpu = context.hardware.gpus > 0 and not recipe.launch.use_cpu
    if recipe.generation.backend != "vllm" and on_gpu and num_processes > 1:
        seen = f"backend is {recipe.generation.backend} on {num_processes} GPUs"
        fix = f"set `generation.backend: vllm` ({install_extra('vllm')})"
        why = "sampling takes most of a step, and every GPU waits for the slowest one's generate()"
        yield _risk("generation backend", "generation.backend", seen, fix, why)


def _risk(subject: str, path: str, seen: str, fix: str, why: str) -> Issue:
    return Issue(seen, fix, path, level="warning", subject=f"setting: {subject}", why=why)


def _check_rate(recipe: Recipe) -> Iterator[Issue]:
    training, lora = recipe.training, recipe.model.lora is not None
    rate, path, subject = training.learning_rate, "training.learning_rate", "learning rate"
    good = "1e-4" if lora else "1e-6"
    fix = f"set `learning_rate: {good}`"
    if lora and rate < LORA.least:
        default = "" if "learning_rate" in training.model_fields_set else " (the default)"
        seen = f"learning_rate is {rate:g}{default} with LoRA"
        why = "adapters hardly move at a rate meant for full fine-tuning, and the reward stays flat"
        yield _risk(subject, path, seen, fix, why)
    elif rate > rates_of(recipe.model).most:
        seen = f"learning_rate is {rate:g} {'with' if lora else 'without'} LoRA"
        fix += ", or add `model.lora`" if not lora and rate <= LORA.most else ""
        why = "a policy trained at this rate most often collapses within tens of steps"
        yield _risk(subject, path, seen, fix, why)


def _check_hold(recipe: Recipe) -> Iterator[Issue]:
    path, beta = "training.beta", recipe.setting("beta") or 0.0
    if beta > _MOST_BETA:
        why = "the KL term outweighs the reward, and the policy stays where it is"
        fix = "set `training.beta: 0.04`, or less"
        yield _risk("KL term", path, f"beta is {beta:g}", fix, why)
    if (
        recipe.kl_weight
        or recipe.model.lora
        or recipe.training.early_stopping
        or not recipe.is_sampled
    ):
        return
    norm, rate = recipe.setting("max_grad_norm") or 0.0, recipe.training.learning_rate
    clips = norm > 0
    # Beyond the usual rates, `_check_rate` reports it.
    if not clips or _HELD_RATE < rate <= rates_of(recipe.model).most:
        loose, other = f"learning_rate is {rate:g}", "learning_rate: 1e-6"
        if not clips:
            loose, other = (
                f"gradients are not clipped (max_grad_norm: {norm:g})",
                "max_grad_norm: 1.0",
            )
        seen = f"beta is 0, all weights are trained, and {loose}"
        fix = f"set `training.beta: 0.01`, or `training.{other}`, or add `model.lora`"
        why = "nothing keeps the model near the one it started from when the reward can be gamed"
        yield _risk("nothing holds the policy", path, seen, fix, why)


def _check_narrowing(recipe: Recipe) -> Iterator[Issue]:
    generation = recipe.generation
    neutral = {"top_p": (None, 1), "top_k": (None, 0), "min_p": (None, 0)}
    neutral["repetition_penalty"] = (None, 1)
    values = {name: getattr(generation, name) for name in neutral}
    narrowed = {name: value for name, value in values.items() if value not in neutral[name]}
    if narrowed and generation.backend == "vllm":
        seen = ", ".join(f"{name}: {value:g}" for name, value in narrowed.items()) + " with vLLM"
        fix = "remove it; `temperature` alone keeps the two in step"
        why = (
            "vLLM draws from a narrowed distribution, the trainer computes log-probabilities of the full one, so "
            "importance ratios are wrong"
        )
        yield _risk("narrowed sampling", f"generation.{next(iter(narrowed))}", seen, fix, why)
    if generation.temperature < _LEAST_TEMPERATURE:
        why = "the completions of a group come out nearly the same, and equal rewards teach nothing"
        seen, path = f"temperature is {generation.temperature:g}", "generation.temperature"
        yield _risk("temperature", path, seen, "set `temperature: 1.0`", why)
