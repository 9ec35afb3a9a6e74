"""From a recipe to `GRPOConfig`: the only file that maps our names to TRL's.

Source: `GRPOConfig` of trl 1.16.0 on transformers 5.17.
"""

from typing import Any

from trl import GRPOConfig

from grpo_cli.errors import RunError
from grpo_cli.models.vllm_engine import model_length
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.trackers.contents import run_name


def build_trl_args(recipe: Recipe, folder: RunFolder, *, cpu: bool) -> GRPOConfig:
    """The trainer's arguments.

    Args:
        recipe: The resolved recipe.
        folder: Checkpoints go to its `checkpoints/`.
        cpu: Whether the run is on the CPU; there bf16 autocast is off unless the recipe asks for it,
            since most processors emulate it.

    Raises:
        RunError: TRL refuses a combination that no earlier check knows of.
    """
    fields: dict[str, Any] = {
        **recipe.training.trl_fields(),
        **recipe.generation.trl_fields(),
        **recipe.logging.trl_fields(),
        **_backend(recipe),
        **_managed_server(recipe, folder),
        **_best_model(recipe),
        # Nothing is sampled to evaluate, and TRL's rule about the size of groups would bind.
        **({} if recipe.is_sampled else {"num_generations_eval": 1}),
        "output_dir": str(folder.checkpoints),
        "seed": recipe.seed,
        "reward_weights": [reward.weight for reward in recipe.rewards] or None,
        "trust_remote_code": recipe.model.trust_remote_code,
        "use_cpu": cpu,
        "disable_tqdm": True,
        "log_completions": False,
    }
    if recipe.training.extras.get("beta") and recipe.model.lora is None:
        fields["model_init_kwargs"] = _reference_model(recipe)
    if recipe.generation.backend == "vllm":
        fields["vllm_max_model_length"] = model_length(recipe)
    if cpu:
        fields.setdefault("bf16", False)
        fields.setdefault("dataloader_pin_memory", False)
    fields.setdefault("run_name", run_name(folder))
    # Trackio's project; W&B's and MLflow's are environment variables.
    fields.setdefault("project", recipe.name)
    try:
        return GRPOConfig(**fields)
    except ValueError as error:
        raise RunError(
            f"TRL refuses these settings: {error} Fix: change them in the recipe"
        ) from error


def _backend(recipe: Recipe) -> dict[str, bool]:
    backend = recipe.generation.backend
    return {
        "use_vllm": backend == "vllm",
        "use_transformers_continuous_batching": backend == "transformers_continuous_batching",
    }


def _managed_server(recipe: Recipe, folder: RunFolder) -> dict[str, Any]:
    """Where the server is that was started with this training, if one was."""
    server = folder.read_plan().get("server")
    if server is None:
        return {}
    address = f"http://{server['host']}:{server['port']}"
    # A server that ends is the supervisor's to notice; one that is alive may take its time to load.
    patience = recipe.generation.vllm.extras.get("server_timeout", 3600.0)
    return {
        "vllm_server_base_url": address,
        "vllm_group_port": server["group_port"],
        "vllm_server_timeout": patience,
    }


def _best_model(recipe: Recipe) -> dict[str, Any]:
    """The metric by which the trainer knows its best checkpoint, and early stopping when to stop."""
    training = recipe.training
    named = training.extras.get("metric_for_best_model")
    if training.early_stopping is not None:
        metric = training.early_stopping.metric
    elif training.eval_strategy != "no" and named is None:
        metric = "eval_reward" if recipe.is_sampled else "eval_ranking"
    else:
        return {}
    return {"metric_for_best_model": metric, "greater_is_better": not metric.endswith("loss")}


def _reference_model(recipe: Recipe) -> dict[str, Any]:
    """Arguments with which TRL loads the reference model that `beta` needs in full fine-tuning."""
    revision = {"revision": recipe.model.revision} if recipe.model.revision else {}
    return {**recipe.model.init_kwargs, **revision}
