"""How vLLM's engine is set up for a recipe, in a process or as a server. Pure; imports no vLLM."""

from typing import Any, Literal

from grpo_cli.recipe.recipe import Recipe

Device = Literal["cpu", "cuda"]
AUTOMATIC = -1
"""For `max_model_len`: vLLM takes the longest that its memory has room for, up to the model's own."""
CPU_MEMORY = 0.2
"""Share of the machine's memory for keys and values; vLLM itself would take nearly all."""
_ALONE = 0.9
"""Share of a GPU's memory for an engine beside which nothing trains."""


def pick_dtype(recipe: Recipe, device: Device) -> str | None:
    """Return the precision to sample in: that which training computes in; None leaves it to the weights.

    On a GPU that is the autocast's, bf16 unless told otherwise, whatever the weights are in.
    """
    mixed = recipe.training.mixed_precision(cpu=False) if device == "cuda" else "no"
    if mixed != "no":
        return "float16" if mixed == "fp16" else "bfloat16"
    return None if recipe.model.dtype == "auto" else recipe.model.dtype


def model_length(recipe: Recipe) -> int:
    """Return the tokens of the longest sequence that the engine must hold, prompt and completion.

    That is `generation.vllm.max_model_length`, or what the lengths of prompts and completions come to.
    `AUTOMATIC` if prompts have no limit: a model's own 32k or 128k may not fit beside the training.
    """
    told = recipe.generation.vllm.extras.get("max_model_length")
    if told is not None:
        return int(told)
    prompt = recipe.dataset.max_prompt_length
    return AUTOMATIC if prompt is None else prompt + recipe.generation.max_completion_length


def engine_settings(recipe: Recipe, device: Device) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for an engine that measures or probes: nothing trains beside it."""
    vllm = recipe.generation.vllm
    told = vllm.extras.get("gpu_memory_utilization")
    if device == "cuda" and (told is None or vllm.mode == "colocate"):
        # The share of a colocated engine leaves room for the training.
        told = _ALONE
    return {
        "dtype": pick_dtype(recipe, device) or "auto",
        "gpu_memory_utilization": CPU_MEMORY if told is None else told,
        "max_model_len": model_length(recipe),
        "trust_remote_code": recipe.model.trust_remote_code,
        "revision": recipe.model.revision,
    }
