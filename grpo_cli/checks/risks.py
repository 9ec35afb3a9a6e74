"""Settings with which a training runs to the end and learns little."""

from collections.abc import Iterator

from grpo_cli.checks.context import CheckContext
from grpo_cli.errors import install_extra
from grpo_cli.issues import Issue
from grpo_cli.recipe.model import LORA, rates_of
from grpo_cli.recipe.recipe import Recipe

_MOST_BETA = 1.0
"""Published runs use 0.001 to 0.04; from here on the KL term outweighs the reward."""
_HELD_RATE = 1e-5
"""Up to it, clipped gradients alone have held full fine-tuning without a KL term in published runs."""
_FEWEST_GENERATIONS = 4
_LEAST_TEMPERATURE = 0.3


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
