"""One micro-step and one update on real sequences, timed, with the loss TRL uses.

Owns nothing of the algorithm: the loss's forward pass is TRL's own, its weighting is left out, since
it costs nothing. The model is changed by it, and is of no further use.

Source: trl 1.16, `GRPOTrainer._get_per_token_logps_and_entropies` and `_compute_loss`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer import add_fused_lm_head

from grpo_cli.checks.settings import read_setting
from grpo_cli.models.loading import add_adapters
from grpo_cli.recipe.recipe import Recipe

_TIMED = 2
"""Passes timed; the fastest counts, since the first one also warms up."""


@dataclass(frozen=True)
class StepTiming:
    """Seconds measured; see `cost.Timings`."""

    forward_s: float
    micro_step_s: float
    update_s: float
    tokens: int
    """Of the micro-batch, with its padding."""


def prepare(recipe: Recipe, model: Any) -> Any:
    """The model as the trainer makes it, to sample and to learn: with TRL's loss and fresh adapters.

    Raises:
        RecipeError: The adapters do not fit the model.

    Source: trl 1.16, `GRPOTrainer.__init__`, for the adapters of a quantized model.
    """
    add_fused_lm_head(
        model, temperature=recipe.generation.temperature, outputs=("log_probs", "entropy")
    )
    if recipe.model.lora is None:
        return model
    model = add_adapters(model, recipe.model.lora)
    if recipe.model.quantization is not None:
        for name, weight in model.named_parameters():
            if weight.requires_grad and "lora_magnitude_vector" not in name:
                weight.data = weight.data.to(torch.bfloat16)
    return model


def time_step(
    recipe: Recipe,
    model: Any,
    pad_token_id: int,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> StepTiming:
    """Takes one training step with a model that has sampled; changes its weights.

    Args:
        recipe: For checkpointing and autocast.
        model: From `prepare`, where it will train.
        pad_token_id: Fills shorter sequences.
        sequences: (prompt, completion) token ids; the first micro-batch of them is taken, again from
            the start where there are fewer.
    """
    if read_setting(recipe, "gradient_checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if recipe.model.lora is not None:
            model.enable_input_require_grads()
    model.train()
    ids, mask, width = _collate(recipe, pad_token_id, sequences)
    ids, mask = ids.to(model.device), mask.to(model.device)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-width] = -100
    kind = model.device.type
    mixed = recipe.training.mixed_precision(cpu=kind == "cpu") == "bf16"
    autocast = torch.autocast(kind, dtype=torch.bfloat16, enabled=mixed)

    def forward() -> Any:
        with autocast:
            return model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)

    def micro_step() -> None:
        forward().log_probs.mean().backward()

    def pass_once() -> None:
        with torch.no_grad():
            forward()

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True)
    micro_step_s = _time(micro_step)
    update_s = _time(optimizer.step, times=1)
    return StepTiming(
        forward_s=_time(pass_once),
        micro_step_s=micro_step_s,
        update_s=update_s,
        tokens=ids.numel(),
    )


def _collate(
    recipe: Recipe, pad: int, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A micro-batch as TRL pads it: prompts on the left, completions on the right.

    Returns:
        Token ids and mask, [sequences, tokens] int64, and the width of the completions.
    """
    size = recipe.training.per_device_train_batch_size
    taken = [sequences[index % len(sequences)] for index in range(size)]
    before = max(len(prompt) for prompt, _ in taken)
    width = max(len(completion) for _, completion in taken)
    ids = torch.full((size, before + width), pad)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(taken):
        start, end = before - len(prompt), before + len(completion)
        ids[row, start:end] = torch.tensor([*prompt, *completion])
        mask[row, start:end] = 1
    return ids, mask, width


def _time(action: Callable[[], Any], times: int = _TIMED) -> float:
    return min(_time_once(action) for _ in range(times))


def _time_once(action: Callable[[], Any]) -> float:
    _wait()
    started = time.perf_counter()
    action()
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
