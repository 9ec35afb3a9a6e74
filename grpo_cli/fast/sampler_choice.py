"""When a training samples by `decoding.py`, and when by the trainer's own way.

Owns that decision and the state of the model meanwhile. What is sampled follows the same distribution
either way; only the random numbers are others.
"""

from typing import Any

from accelerate import DistributedType
from transformers import Trainer
from trl.models import unwrap_model_for_generation

from grpo_cli.fast import decoding
from grpo_cli.fast.decoding import Sampled, decode
from grpo_cli.fast.token_sampling import read_decoding
from grpo_cli.models.adapters import find_prompt_ties, without_wrapper
from grpo_cli.recipe.fast import find_beyond


def unsupported_reason(trainer: Any) -> str | None:
    """Why only the trainer's own way will do; None where this one does.

    Args:
        trainer: A `GRPOTrainer` that samples with transformers.
    """
    whole = trainer.accelerator.unwrap_model(trainer.model)
    model = without_wrapper(whole)
    if shares_weights(trainer):
        # Reading a token takes all processes, and each would stop when its own rows have ended.
        return "each process holds a part of the weights"
    if (tie := find_prompt_ties(whole)) is not None:
        return tie
    if (obstacle := decoding.unsupported_reason(model)) is not None:
        return obstacle
    settings = read_decoding(trainer.generation_config, model.generation_config)
    if settings is None:
        asked = {**model.generation_config.to_dict(), **trainer.generation_config.to_dict()}
        return f"only generate() knows {', '.join(find_beyond(asked)) or 'these settings'}"
    if set(settings.eos_token_ids) != set(trainer.eos_token_ids):
        return "generation_kwargs end completions with other tokens than the tokenizer"
    return None


def sample(trainer: Any, prompt_ids: list[list[int]], *, entropies: bool) -> Sampled | None:
    """Completions of this process's prompts by the present weights.

    Args:
        trainer: A `GRPOTrainer` with no obstacle to it.
        prompt_ids: The tokens of each prompt, as often as it is to be answered.
        entropies: Whether to compute them.

    Returns:
        None where a prompt has no tokens.

    Source: trl 1.16, the last branch of `GRPOTrainer._generate_single_turn`.
    """
    if not all(prompt_ids):
        return None
    with unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        generation_kwargs=trainer.generation_kwargs,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    ) as whole:
        model = without_wrapper(whole)
        settings = read_decoding(trainer.generation_config, model.generation_config)
        if settings is None:
            return None
        width = trainer.pad_to_multiple_of or 1
        return decode(model, prompt_ids, settings, width=width, entropies=entropies)


def shares_weights(trainer: Trainer) -> bool:
    """Return whether the weights are sharded: each process holds a part of them."""
    state = trainer.accelerator.state
    if state.distributed_type == DistributedType.DEEPSPEED:
        return bool(state.deepspeed_plugin.zero_stage == 3)
    return bool(state.distributed_type == DistributedType.FSDP)
