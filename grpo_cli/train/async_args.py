"""From a recipe with `training.mode: async` to `AsyncGRPOConfig`.

The counterpart of `trl_args.py`. What the class does not know was refused before the launch
(`checks/asynchronous.py`); what it knows by another name is given it here.

Source: `AsyncGRPOConfig` of trl 1.16.0.
"""

from dataclasses import fields
from typing import Any

from trl.experimental.async_grpo import AsyncGRPOConfig

from grpo_cli.errors import RunError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trackers.contents import run_name

_PATIENCE_S = 3600.0
"""Longest wait for a server that loads."""


def build_async_args(recipe: Recipe, folder: RunFolder, *, cpu: bool) -> AsyncGRPOConfig:
    """The trainer's arguments.

    Args:
        recipe: The resolved recipe.
        folder: Checkpoints go to its `checkpoints/`.
        cpu: Whether the run is on the CPU.

    Raises:
        RunError: transformers refuses a combination that no earlier check knows of.
    """
    known = {each.name for each in fields(AsyncGRPOConfig)}
    asynchronous = recipe.training.asynchronous
    given: dict[str, Any] = {
        # The class has defaults of its own, where a recipe's should mean the same in both modes.
        "lr_scheduler_type": "linear",
        **recipe.training.trl_fields(),
        **recipe.generation.trl_fields(),
        **recipe.logging.trl_fields(),
        "max_staleness": asynchronous.max_staleness,
        "weight_sync_steps": asynchronous.weight_sync_steps,
        # 0 is what leaves the micro-batch to `per_device_train_batch_size`.
        "token_budget": asynchronous.token_budget or 0,
        "vllm_server_base_url": server_address(recipe, folder),
        "vllm_server_timeout": recipe.generation.vllm.extras.get("server_timeout", _PATIENCE_S),
        "dtype": recipe.model.dtype,
        "model_init_kwargs": {
            **recipe.model.init_kwargs,
            **({"revision": recipe.model.revision} if recipe.model.revision else {}),
        },
        "trust_remote_code": recipe.model.trust_remote_code,
        "output_dir": str(folder.checkpoints),
        "seed": recipe.seed,
        "use_cpu": cpu,
        "disable_tqdm": True,
        "log_completions": False,
    }
    if cpu:
        given.setdefault("bf16", False)
        given.setdefault("dataloader_pin_memory", False)
    given.setdefault("run_name", run_name(folder))
    given.setdefault("project", recipe.name)
    try:
        return AsyncGRPOConfig(**{name: value for name, value in given.items() if name in known})
    except ValueError as error:
        raise RunError(
            f"TRL refuses these settings: {error} Fix: change them in the recipe"
        ) from error


def server_address(recipe: Recipe, folder: RunFolder) -> str:
    """The root of the server: the one that was started with this training, else the recipe's.

    Raises:
        RunError: There is neither.
    """
    server = folder.read_plan().get("server")
    if server is not None:
        return f"http://{server['host']}:{server['port']}"
    if recipe.generation.vllm.address is None:
        raise RunError(
            "there is no vLLM server to sample from. Fix: start the run with `grpo train`, or name one with "
            "`generation.vllm.base_url`"
        )
    return recipe.generation.vllm.address
