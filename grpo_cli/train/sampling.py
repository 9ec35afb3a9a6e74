"""When a training samples by `models/decoding.py`, and when by the trainer's own way.

Owns that decision and the state of the model meanwhile. What is sampled follows the same distribution
either way; only the random numbers are others.
"""

from typing import Any

from accelerate.utils import DistributedType
from trl.models import unwrap_model_for_generation

from grpo_cli.models.adapters import adds_tokens, without_wrapper
from grpo_cli.models.decoding import Sampled, decode, is_plain
from grpo_cli.models.drawing import read_decoding

_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Each process has the whole model, and samples without waiting for the others."""


def sample(trainer: Any, prompt_ids: list[list[int]]) -> Sampled | None:
    """Completions of this process's prompts by the present weights.

    Args:
        trainer: A `GRPOTrainer`.
        prompt_ids: The tokens of each prompt, as often as it is to be answered.

    Returns:
        None where only the trainer's own way will do: another backend, tools, weights that are spread over
        processes, a model that does not remember every token, or settings beyond the usual.

    Source: trl 1.16, the last branch of `GRPOTrainer._generate_single_turn`.
    """
    if trainer.use_vllm or trainer.use_transformers_continuous_batching or trainer.tools:
        return None
    if trainer.accelerator.distributed_type not in _WHOLE or not all(prompt_ids):
        return None
    with unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        generation_kwargs=trainer.generation_kwargs,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    ) as whole:
        model = without_wrapper(whole)
        if adds_tokens(whole) or not is_plain(model):
            return None
        decoding = read_decoding(trainer.generation_config, model.generation_config)
        if decoding is None:
            return None
        return decode(model, prompt_ids, decoding, width=trainer.pad_to_multiple_of or 1)
