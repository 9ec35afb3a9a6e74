"""Settings that are allowed, run to the end, and are wrong more often than not.

Owns the rules that need no model and no data: a recipe and a machine are enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_cli.checks.settings import read_setting
from grpo_cli.errors import install_extra
from grpo_cli.issues import Finding
from grpo_cli.recipe.rates import LORA, rates_of
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.registry import KINDS

MOST_BETA = 1.0
"""Published runs use 0.001 to 0.04; from here on the KL term outweighs the reward."""
HELD_RATE = 1e-5
"""Up to it, clipped gradients alone have held full fine-tuning without a KL term in published runs."""
FEWEST_GENERATIONS = 4
LEAST_TEMPERATURE = 0.3


@dataclass(frozen=True)
class Setting:
    """What the rules look at."""

    recipe: Recipe
    num_processes: int
    gpus: int
    """Visible CUDA devices of this machine."""

    @property
    def on_gpu(self) -> bool:
        """Whether training will run on GPUs."""
        return self.gpus > 0 and not self.recipe.launch.use_cpu


def find_risks(setting: Setting) -> Iterator[Finding]:
    """Every rule that speaks up."""
    for rule in (
        _check_rate,
        _check_hold,
        _check_weights,
        _check_groups,
        _check_backend,
        _check_sampling,
        _check_devices,
        _check_truncation,
    ):
        yield from rule(setting)


def _check_rate(setting: Setting) -> Iterator[Finding]:
    rate, path = setting.recipe.training.learning_rate, "training.learning_rate"
    if rate == 0:
        yield Finding(
            "setting: learning rate",
            "error",
            "learning_rate is 0",
            f"set `learning_rate: {'1e-4' if setting.recipe.model.lora else '1e-6'}`",
            "no weight will change",
            path,
        )
        return
    if setting.recipe.model.lora is not None and rate < LORA.least:
        given = "learning_rate" in setting.recipe.training.model_fields_set
        yield Finding(
            "setting: learning rate",
            "warning",
            f"learning_rate is {rate:g}{'' if given else ' (the default)'} with LoRA",
            "set `learning_rate: 1e-4`",
            "adapters hardly move at a rate meant for full fine-tuning, and the reward stays flat",
            path,
        )
    lora = setting.recipe.model.lora is not None
    if rate > rates_of(setting.recipe).most:
        yield Finding(
            "setting: learning rate",
            "warning",
            f"learning_rate is {rate:g} {'with' if lora else 'without'} LoRA",
            "set `learning_rate: 1e-4`"
            if lora
            else "set `learning_rate: 1e-6`, or add `model.lora`",
            "a policy trained at this rate most often collapses within tens of steps",
            path,
        )


def _check_hold(setting: Setting) -> Iterator[Finding]:
    recipe, beta = setting.recipe, read_setting(setting.recipe, "beta") or 0.0
    if beta > MOST_BETA:
        yield Finding(
            "setting: KL term",
            "warning",
            f"beta is {beta:g}",
            "set `training.beta: 0.04`, or less",
            "the KL term outweighs the reward, and the policy stays where it is",
            "training.beta",
        )
    if beta or recipe.model.lora or recipe.training.early_stopping or not recipe.is_sampled:
        return
    norm, rate = read_setting(recipe, "max_grad_norm"), recipe.training.learning_rate
    if norm and rate <= HELD_RATE:
        return
    loose = f"learning_rate {rate:g}" if norm else "no gradient clipping (max_grad_norm: 0)"
    yield Finding(
        "setting: nothing holds the policy",
        "warning",
        f"beta is 0, all weights are trained, and {loose}",
        "set `training.beta: 0.001` to `0.04`, or `learning_rate: 1e-6`, or add `model.lora`",
        "nothing keeps the model near the one it started from when the reward can be gamed",
        "training.beta",
    )


def _check_weights(setting: Setting) -> Iterator[Finding]:
    rewards = setting.recipe.rewards
    if rewards and all(reward.weight == 0 for reward in rewards):
        yield Finding(
            "setting: reward weights",
            "error",
            "every reward has weight 0",
            "give the one that judges answers `weight: 1.0`",
            "the total reward is 0 for every completion, so there is no gradient",
            "rewards",
        )
    for index, reward in enumerate(rewards):
        judges = reward.kind in KINDS and KINDS[reward.kind].right_answer is not None
        if reward.weight < 0 and judges and reward.kind != "contains":
            yield Finding(
                "setting: reward weights",
                "warning",
                f"`{reward.kind}` has weight {reward.weight:g}",
                f"set `weight: {-reward.weight:g}`",
                "right answers are punished, and the policy learns to avoid them",
                f"rewards.{index}.weight",
            )


def _check_groups(setting: Setting) -> Iterator[Finding]:
    size = setting.recipe.generation.num_generations
    if size < FEWEST_GENERATIONS:
        yield Finding(
            "setting: group size",
            "warning",
            f"num_generations is {size}",
            "set `num_generations: 8` (and a batch size it divides: grpo check-batch)",
            f"advantages compare {size} completions only: most groups are all right or all wrong, "
            "and the rest are noise",
            "generation.num_generations",
        )


def _check_backend(setting: Setting) -> Iterator[Finding]:
    recipe = setting.recipe
    vllm, bits = recipe.generation.backend == "vllm", recipe.model.quantization
    if vllm and bits is not None:
        reason = (
            "vLLM cannot quantize to 8 bits while loading"
            if bits == "8bit"
            else "syncing 4-bit weights into vLLM fails on their packed shape"
        )
        yield Finding(
            "setting: quantization with vLLM",
            "error",
            f"quantization is {bits} and backend is vllm",
            "remove `model.quantization`, or set `generation.backend: transformers`",
            reason,
            "model.quantization",
        )
    if not vllm and setting.on_gpu and setting.num_processes > 1:
        yield Finding(
            "setting: generation backend",
            "warning",
            f"backend is {recipe.generation.backend} on {setting.num_processes} GPUs",
            f"set `generation.backend: vllm` ({install_extra('vllm')})",
            "sampling takes most of a step, and every GPU waits for the slowest one's generate()",
            "generation.backend",
        )


def _check_sampling(setting: Setting) -> Iterator[Finding]:
    generation = setting.recipe.generation
    narrowed = [
        f"{name}: {getattr(generation, name):g}"
        for name, neutral in (
            ("top_p", 1),
            ("top_k", 0),
            ("min_p", None),
            ("repetition_penalty", 1),
        )
        if getattr(generation, name) not in (neutral, 0 if name == "min_p" else neutral)
    ]
    if narrowed and generation.backend == "vllm":
        first = narrowed[0].split(":")[0]
        yield Finding(
            "setting: narrowed sampling",
            "warning",
            f"{', '.join(narrowed)} with vLLM",
            "remove it; `temperature` alone keeps the two in step",
            "vLLM draws from a narrowed distribution, the trainer's log-probabilities are of the "
            "whole one, so importance ratios are wrong",
            f"generation.{first}",
        )
    cold = generation.temperature < LEAST_TEMPERATURE
    if cold or generation.top_k == 1:
        yield Finding(
            "setting: temperature",
            "warning",
            f"temperature is {generation.temperature:g}" if cold else "top_k is 1",
            "set `temperature: 1.0`" if cold else "set `top_k: 0`",
            "the completions of a group come out nearly the same, and equal rewards teach nothing",
            "generation.temperature" if cold else "generation.top_k",
        )


def _check_devices(setting: Setting) -> Iterator[Finding]:
    here = setting.num_processes // setting.recipe.launch.num_machines
    if setting.on_gpu and here > setting.gpus:
        yield Finding(
            "machine: devices",
            "error",
            f"{here} processes on this machine, which has {setting.gpus} visible GPUs",
            "set `launch.num_processes: auto`",
            "two processes on one GPU end in `NCCL error: invalid usage`",
            "launch.num_processes",
        )


def _check_truncation(setting: Setting) -> Iterator[Finding]:
    """Completions too short to hold what a recipe asks for."""
    recipe = setting.recipe
    length = recipe.generation.max_completion_length
    if length < 64 and any(reward.kind == "think_format" for reward in recipe.rewards):
        yield Finding(
            "setting: completion length",
            "warning",
            f"max_completion_length is {length}, and think_format wants a written-out thought",
            "set `max_completion_length: 256` or more",
            "a completion that is cut off before `</think>` never gets the reward",
            "generation.max_completion_length",
        )
