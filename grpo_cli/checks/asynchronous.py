"""Checks of `training.mode: async`."""

from collections.abc import Iterator

from grpo_cli.checks.context import CheckContext
from grpo_cli.issues import Issue
from grpo_cli.recipe.base import read_fields
from grpo_cli.recipe.generation import GenerationConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.training import TrainingConfig

_SYNC = "or set `training.mode: sync`"

_SAME_KEYS = {
    "training": """mode asynchronous per_device_train_batch_size per_device_eval_batch_size
        gradient_accumulation_steps num_train_epochs max_steps learning_rate stop_when""".split(),
    "generation": """backend vllm num_generations max_completion_length temperature top_p top_k min_p
        repetition_penalty""".split(),
}
"""Our own keys of these sections that mean the same in both modes."""

_UNREAD = frozenset(
    """num_completions_to_print log_completions use_liger_kernel liger_kernel_config
    load_best_model_at_end metric_for_best_model greater_is_better eval_steps ignore_data_skip
    eval_on_start eval_delay data_seed train_sampling_strategy length_column_name
    label_smoothing_factor""".split()
)
"""Fields of its configuration that its trainer refuses, or that would change nothing: it does not evaluate."""

_SERVER_KEYS = frozenset(
    """model_impl max_model_length gpu_memory_utilization tensor_parallel_size group_port
    server_timeout server_base_url server_host server_port""".split()
)
"""Fields of `generation.vllm` that are the server's."""


def check_async(context: CheckContext) -> Iterator[Issue]:
    """Find settings that an asynchronous training lacks or does not read, and note that it is one."""
    recipe = context.recipe
    training, ahead = recipe.training, recipe.training.asynchronous
    if training.mode == "sync":
        seen = "is read only if `mode` is `async`, and it is `sync`"
        fix = "set `training.mode: async`, or remove it"
        yield Issue(seen, fix, "training.asynchronous", level="warning")
        return
    unit = "steps" if ahead.weight_sync_steps == 1 else f"times {ahead.weight_sync_steps} steps"
    seen = (
        "asynchronous training is experimental, in TRL and here: it learns from samples whose weights are up to "
        f"{ahead.max_staleness} {unit} old"
    )
    fix = "nothing, if that is what you want; `grpo diagnose RUN` looks at what comes of it"
    yield Issue(seen, fix, "training.mode", level="note")
    yield from _check_async_needs(recipe)
    for path in _unread_keys(recipe):
        yield Issue("asynchronous training has no such setting", f"remove it, {_SYNC}", path)


def _unread_keys(recipe: Recipe) -> Iterator[str]:
    """Return the keys that change something in a synchronous training, and would not be read."""
    known = read_fields("AsyncGRPOConfig").keys() - _UNREAD
    for section, values, defaults in (
        ("training", recipe.training, TrainingConfig.model_construct()),
        ("generation", recipe.generation, GenerationConfig.model_construct()),
    ):
        for name in type(values).model_fields:
            changed = getattr(values, name) != getattr(defaults, name)
            if changed and name not in _SAME_KEYS[section]:
                yield f"{section}.{name}"
        yield from (f"{section}.{name}" for name in values.extras if name not in known)
    vllm = recipe.generation.vllm.extras
    yield from (f"generation.vllm.{name}" for name in vllm if name not in _SERVER_KEYS)


def _check_async_needs(recipe: Recipe) -> Iterator[Issue]:
    """Find settings that asynchronous training needs."""
    generation = recipe.generation
    if recipe.is_sampled and (generation.backend != "vllm" or generation.vllm.mode != "server"):
        fix = f"set `generation.backend: vllm` and `generation.vllm.mode: server`, {_SYNC}"
        path = "generation.backend" if generation.backend != "vllm" else "generation.vllm.mode"
        yield Issue("asynchronous training samples from a vLLM server", fix, path)
    if recipe.training.max_steps < 1:
        seen = "asynchronous training ends after a number of steps"
        fix = (
            "set `training.max_steps`; `grpo check-batch RECIPE` tells how many steps an epoch has"
        )
        yield Issue(seen, fix, "training.max_steps")
