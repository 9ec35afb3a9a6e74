"""From a recipe to `GRPOConfig` and `AsyncGRPOConfig`: the mapping of our names to TRL's."""

import os
from dataclasses import fields
from typing import Any

from trl import GRPOConfig

from grpo_cli.errors import RunError
from grpo_cli.models.source import reads_images
from grpo_cli.recipe.dataset import MixtureDataset
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trackers import run_name

_SERVER_TIMEOUT_S = 3600.0
"""Longest wait for a vLLM server to load; the supervisor notices a server that ends."""


def build_trl_args(recipe: Recipe, folder: RunFolder, *, cpu: bool) -> Any:
    """Return the trainer's arguments: a `GRPOConfig`, or an `AsyncGRPOConfig` with `training.mode: async`.

    On a CPU bf16 autocast is off unless the recipe asks for it: most processors emulate it.

    Raises:
        RunError: TRL refuses a combination that no earlier check covers.
    """
    asynchronous = recipe.training.mode == "async"
    values: dict[str, Any] = {
        # The same default in both modes.
        "lr_scheduler_type": "linear",
        **recipe.trl_fields(),
        **(_async_fields(recipe) if asynchronous else _grpo_fields(recipe)),
        **_server_fields(recipe, folder.read_plan().get("server")),
        "output_dir": str(folder.checkpoints),
        "seed": recipe.seed,
        "trust_remote_code": recipe.model.trust_remote_code,
        "use_cpu": cpu,
        "disable_tqdm": True,
        "log_completions": False,
        "log_multimodal": False,
    }
    if isinstance(recipe.dataset, MixtureDataset) or recipe.dataset.streams:
        # Their rows are in the order in which they are drawn.
        values["shuffle_dataset"] = False
    if recipe.loads_best and values.get("save_total_limit") == 1:
        # With 1, transformers (5.17, `Trainer._finalize_training`) removes the newest in the end, also if a stop
        # was requested.
        values["save_total_limit"] = 2
    if recipe.is_reentrant:
        # Transformers (5.24) looks for unused parameters of a PEFT model, and a reentrant backward pass would
        # then mark a parameter ready twice.
        values.setdefault("ddp_find_unused_parameters", False)
    elif reads_images(recipe.model):
        # TRL (1.16) sets it if prompts may have images; without, DDP would wait for the vision part's gradients.
        values.setdefault("ddp_find_unused_parameters", True)
    if cpu:
        values.setdefault("bf16", False)
        values.setdefault("dataloader_pin_memory", False)
    values.setdefault("run_name", run_name(folder))
    # Trackio's project; W&B's and MLflow's are environment variables.
    values.setdefault("project", recipe.name)
    config: Any = GRPOConfig
    if asynchronous:
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        from trl.experimental.async_grpo import AsyncGRPOConfig

        config = AsyncGRPOConfig
        # What the class does not know was refused before the launch, by `checks`.
        known = {field.name for field in fields(config)}
        values = {name: value for name, value in values.items() if name in known}
    try:
        arguments = config(**values)
    except ValueError as error:
        raise RunError(
            f"TRL refuses these settings: {str(error).rstrip('.')}", "change them in the recipe"
        ) from error
    arguments.load_best_model_at_end = recipe.loads_best
    return arguments


def _grpo_fields(recipe: Recipe) -> dict[str, Any]:
    backend = recipe.generation.backend
    values: dict[str, Any] = {
        "use_vllm": backend == "vllm",
        "use_transformers_continuous_batching": backend == "transformers_continuous_batching",
        "reward_weights": [reward.weight for reward in recipe.rewards] or None,
        **_best_model(recipe),
    }
    if recipe.setting("generation_kwargs"):
        values["generation_kwargs"] = recipe.generation.backend_kwargs
    if recipe.model.lora is not None:
        # TRL refuses it; `reference.sync_adapter` does it.
        values["sync_ref_model"] = False
    if not recipe.is_sampled:
        # Evaluation samples nothing, but TRL's rule about group sizes would still apply.
        values["num_generations_eval"] = 1
    if recipe.setting("beta") and recipe.model.lora is None:
        # TRL loads the reference model itself.
        values["model_init_kwargs"] = _model_kwargs(recipe)
    if backend == "vllm":
        from grpo_cli.models.vllm_engine import model_length

        values["vllm_max_model_length"] = model_length(recipe)
    return values


def _async_fields(recipe: Recipe) -> dict[str, Any]:
    asynchronous, address = recipe.training.asynchronous, recipe.generation.vllm.address
    return {
        "max_staleness": asynchronous.max_staleness,
        "weight_sync_steps": asynchronous.weight_sync_steps,
        # 0 leaves the micro-batch to `per_device_train_batch_size`.
        "token_budget": asynchronous.token_budget or 0,
        "vllm_server_base_url": address,
        "vllm_server_timeout": _server_timeout(recipe),
        "dtype": recipe.model.dtype,
        "model_init_kwargs": _model_kwargs(recipe),
    }


def _server_fields(recipe: Recipe, server: dict[str, Any] | None) -> dict[str, Any]:
    """Return where the server that `grpo train` started is; None if it started none."""
    if server is None:
        return {}
    return {
        "vllm_server_base_url": f"http://{server['host']}:{server['port']}",
        "vllm_group_port": server["group_port"],
        "vllm_server_timeout": _server_timeout(recipe),
    }


def _server_timeout(recipe: Recipe) -> Any:
    return recipe.generation.vllm.extras.get("server_timeout", _SERVER_TIMEOUT_S)


def _best_model(recipe: Recipe) -> dict[str, Any]:
    """Return the metric that decides on the best checkpoint and on early stopping."""
    metric = recipe.best_metric
    if metric is None:
        return {}
    greater = recipe.setting("greater_is_better")
    if greater is None:
        greater = not metric.endswith(("loss", "kl"))
    return {"metric_for_best_model": metric, "greater_is_better": greater}


def _model_kwargs(recipe: Recipe) -> dict[str, Any]:
    revision = {"revision": recipe.model.revision} if recipe.model.revision else {}
    return {**recipe.model.init_kwargs, **revision}
