"""Whether a model may read prompts once: looked up in its settings, and tried on itself.

Owns the reasons against that only a loaded model tells. Those of the recipe are `recipe/fast.py`'s.
"""

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel

_TOLERANCE = 1e-3
"""Largest difference of log-probabilities in float32, in nats; rounding makes 2e-5 (SmolLM2-135M)."""
_COARSE_TOLERANCE = 0.2
"""Largest mean difference in 16 bits, in nats: rounding makes 0.05 (SmolLM2-135M in bfloat16, random tokens)."""

Reader = Callable[[torch.Tensor, torch.Tensor, int], Any]
"""Token ids and mask, both `[rows, width]`, and the columns of completions, to log-probabilities first."""


def find_obstacle(model: Any, bare: Any) -> str | None:
    """What about a model's settings forbids that prompts are shared; None where nothing does.

    Args:
        model: As it is trained, with adapters, but without what processes wrap around it.
        bare: The `PreTrainedModel` itself.
    """
    config = bare.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        return f"the model has layers of the kind {', '.join(sorted(kinds))}"
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return "the adapter puts tokens of its own before the prompt"
    dropouts = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    shares = [dropout.p for dropout in dropouts] + [getattr(config, "attention_dropout", 0.0)]
    if any(shares):
        return "dropout draws anew for each copy of a prompt (training.disable_dropout: true ends that)"
    return None


def compare(plain: Reader, packed: Reader, *, bare: Any) -> str | None:
    """Reads a few random tokens in both ways.

    Args:
        plain: TRL's way.
        packed: Ours.
        bare: The model, for its vocabulary, precision and device.

    Returns:
        How they differ; None where they agree.
    """
    ids, mask, width = _make_rows(bare.config.get_text_config().vocab_size, bare.device)
    with torch.no_grad():
        wanted = plain(ids, mask, width)[0]
        try:
            found = packed(ids, mask, width)[0]
        # Whatever a model's code makes of a layout that it was not written for.
        except Exception as error:
            return f"the model does not take it: {str(error).splitlines()[0][:200]}"
    differences = (wanted - found).abs()[mask[:, -width:].bool()]
    coarse = bare.dtype in (torch.bfloat16, torch.float16)
    largest = float(differences.mean() if coarse else differences.max())
    if largest <= (_COARSE_TOLERANCE if coarse else _TOLERANCE):
        return None
    return f"log-probabilities differ by {largest:.2g} in a trial"


def _make_rows(vocabulary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Two prompts of 9 and 6 tokens, with completions of 7, 4, 1 and of 5 and 2 tokens."""
    dice = torch.Generator().manual_seed(0)
    shapes = [(9, (7, 4, 1)), (6, (5, 2))]
    rows = sum(len(lengths) for _, lengths in shapes)
    width, edge = 7, 9
    ids = torch.randint(vocabulary, (rows, edge + width), generator=dice)
    mask = torch.zeros_like(ids)
    row = 0
    for prompt_length, lengths in shapes:
        first = row
        for length in lengths:
            ids[row, :edge] = ids[first, :edge]
            mask[row, edge - prompt_length : edge + length] = 1
            row += 1
    return ids.to(device), mask.to(device), width
