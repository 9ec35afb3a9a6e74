"""What `training.mode: async` cannot do: named before a launch, each with the edit that mends it.

TRL's `AsyncGRPOTrainer` knows fewer settings than `GRPOTrainer`, and passes over none in silence here. Owns
which of ours reach it; which fields it has is read from its sources.
"""

from collections.abc import Iterator

from grpo_cli.errors import Problem
from grpo_cli.recipe.asynchronous import AsyncConfig
from grpo_cli.recipe.base import OpenSection
from grpo_cli.recipe.generation import GenerationConfig
from grpo_cli.recipe.grpo_fields import read_async_fields
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.training import TrainingConfig

_SYNC = "or set `training.mode: sync`"
_TRAINING = frozenset(
    """mode asynchronous per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
    num_train_epochs max_steps learning_rate stop_when""".split()
)
"""Our own keys of `training` that mean the same in both modes."""
_GENERATION = frozenset(
    """backend vllm num_generations max_completion_length temperature top_p top_k min_p
    repetition_penalty""".split()
)
"""Our own keys of `generation` that do."""
_UNREAD = frozenset(
    """num_completions_to_print log_completions use_liger_kernel liger_kernel_config
    load_best_model_at_end metric_for_best_model greater_is_better eval_steps ignore_data_skip
    eval_on_start eval_delay data_seed train_sampling_strategy length_column_name
    label_smoothing_factor""".split()
)
"""Fields of its configuration that its trainer refuses, or that would change nothing: it does not evaluate."""
_VLLM = frozenset(
    """model_impl max_model_length gpu_memory_utilization tensor_parallel_size group_port
    server_timeout server_base_url server_host server_port""".split()
)
"""Fields of `generation.vllm` that are the server's."""
_STRATEGIES = ("auto", "single", "ddp")


def check_async(recipe: Recipe) -> Iterator[Problem]:
    """What keeps an asynchronous training from being launched, and that it is one."""
    training = recipe.training
    if training.mode == "sync":
        if training.asynchronous != AsyncConfig():
            yield Problem(
                "is read where `mode` is `async`, and it is `sync`",
                "set `training.mode: async`, or remove it",
                "training.asynchronous",
                level="warning",
            )
        return
    ahead = training.asynchronous
    unit = "steps" if ahead.weight_sync_steps == 1 else f"times {ahead.weight_sync_steps} steps"
    yield Problem(
        "asynchronous training is experimental, in TRL and here: it learns from samples whose weights are "
        f"up to {ahead.max_staleness} {unit} old",
        "nothing, if that is what you want; `grpo diagnose RUN` looks at what comes of it",
        "training.mode",
        level="note",
    )
    yield from _check_parts(recipe)
    known = read_async_fields() - _UNREAD
    yield from _check_section("training", training, TrainingConfig(), _TRAINING, known)
    yield from _check_section(
        "generation", recipe.generation, GenerationConfig(), _GENERATION, known
    )
    for name in recipe.generation.vllm.extras:
        if name not in _VLLM:
            yield _unknown(f"generation.vllm.{name}")


def _check_section(
    place: str,
    given: OpenSection,
    usual: OpenSection,
    own: frozenset[str],
    known: frozenset[str],
) -> Iterator[Problem]:
    """Keys of a section that say something, and that nothing would read."""
    for name in type(given).model_fields:
        if name not in own and getattr(given, name) != getattr(usual, name):
            yield _unknown(f"{place}.{name}")
    for name in given.extras:
        if name not in known:
            yield _unknown(f"{place}.{name}")


def _unknown(path: str) -> Problem:
    return Problem("asynchronous training has no such setting", f"remove it, {_SYNC}", path)


def _check_parts(recipe: Recipe) -> Iterator[Problem]:
    """What the other sections must say."""
    generation, launch = recipe.generation, recipe.launch
    if not recipe.is_sampled:
        yield Problem(
            "scored data is not sampled, so there is nothing to do at the same time",
            "set `training.mode: sync`",
            "training.mode",
        )
    elif generation.backend != "vllm" or generation.vllm.mode != "server":
        yield Problem(
            "asynchronous training samples from a vLLM server",
            f"set `generation.backend: vllm` and `generation.vllm.mode: server`, {_SYNC}",
            "generation.backend" if generation.backend != "vllm" else "generation.vllm.mode",
        )
    if recipe.training.max_steps < 1:
        yield Problem(
            "asynchronous training ends after a number of steps",
            "set `training.max_steps`; `grpo check-batch RECIPE` tells how many steps an epoch has",
            "training.max_steps",
        )
    if recipe.model.quantization is not None:
        yield Problem(
            "quantized weights are handed to no server",
            f"remove it, {_SYNC}",
            "model.quantization",
        )
    if recipe.model.attn_implementation is not None:
        yield Problem(
            "asynchronous training has an attention of its own",
            f"remove it, {_SYNC}",
            "model.attn_implementation",
        )
    if launch.strategy not in _STRATEGIES or launch.accelerate_config is not None:
        yield Problem(
            "asynchronous training is tried with whole models alone",
            f"set `launch.strategy: ddp`, {_SYNC}",
            "launch.strategy" if launch.accelerate_config is None else "launch.accelerate_config",
        )
    if launch.num_machines > 1:
        yield Problem(
            "asynchronous training is tried on one machine alone",
            f"set it to 1, {_SYNC}",
            "launch.num_machines",
        )
