"""Whether a model may read prompts once, and without padding: looked up in its settings, and tried on itself.

Owns the reasons against that only a loaded model tells. Those of the recipe are `recipe/fast.py`'s.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from grpo_cli.fast.batch_dependence import (
    chooses_tokens,
    find_batch_tie,
    has_dropout,
    has_moving_positions,
    layer_kinds,
    longest_at_rest,
    rotary_parameters,
)
from grpo_cli.models.adapters import find_prompt_ties

_TOLERANCE = 1e-3
"""Largest difference of log-probabilities in float32, in nats; rounding makes 2e-5 (SmolLM2-135M)."""
_NOISE = 3.0
"""By how much the mean difference in 16 bits may be above the one that other padding makes in TRL's own way."""

_SHIFT = 0.3
"""Largest mean difference in 16 bits that other places in the row may make, in nats; rounding makes 0.06
(SmolLM2-135M in bfloat16)."""
_SHIFTABLE = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers to which it is nothing where in the row its tokens begin."""

Reader = Callable[[torch.Tensor, torch.Tensor, int], Any]
"""Token ids and mask, both `[rows, width]`, and the columns of completions, to log-probabilities first."""


def unsupported_reason(model: Any, bare: Any) -> str | None:
    """What about a model's settings forbids that prompts are shared; None where nothing does.

    Args:
        model: As it is trained, with adapters, but without what processes wrap around it.
        bare: The `PreTrainedModel` itself.
    """
    config = bare.config.get_text_config()
    if kinds := layer_kinds(config) - {"full_attention"}:
        return f"the model has layers of the kind {', '.join(sorted(kinds))}"
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        return "the model has sliding windows"
    if (tie := find_prompt_ties(model)) is not None:
        return tie
    if has_dropout(model):
        return (
            "dropout draws anew for each copy of a prompt (training.disable_dropout: true ends that of "
            "layers made for it)"
        )
    return find_batch_tie(config)


def widest_cut(bare: Any) -> int | None:
    """Columns up to which padding behind all completions may go; None where it always may."""
    config = bare.config.get_text_config()
    return 0 if chooses_tokens(config) else longest_at_rest(config)


def is_relative(bare: Any) -> bool:
    """Whether positions count only relative to each other, or nearly so."""
    config = bare.config.get_text_config()
    return hasattr(config, "rope_parameters") and not has_moving_positions(config)


def ignores_padding(plain: Reader, *, bare: Any, coarse: bool) -> bool:
    """Whether padding in front of all prompts may go: by the settings, and by a trial with more of it.

    Args:
        plain: TRL's way, without dropout.
        bare: The model, for its settings, vocabulary and device.
        coarse: Whether it computes in 16 bits.
    """
    config = bare.config.get_text_config()
    if (
        not is_relative(bare)
        or chooses_tokens(config)
        or layer_kinds(config) - _SHIFTABLE
        # Convolutions read the padding before a token, in recurrent layers too.
        or any(isinstance(module, torch.nn.Conv1d) for module in bare.modules())
        or getattr(config, "attn_temperature_tuning", None)
        or any(each.get("llama_4_scaling_beta") for each in rotary_parameters(config))
    ):
        return False
    ids, mask, width = _make_rows(config.vocab_size, bare.device)
    with torch.no_grad():
        wanted = plain(ids, mask, width)[0]
        found = plain(pad(ids, (3, 0)), pad(mask, (3, 0)), width)[0]
    differences = (wanted - found)[mask[:, -width:].bool()].abs()
    if coarse:
        return float(differences.mean()) <= _SHIFT
    return float(differences.max()) <= _TOLERANCE


def compare(plain: Reader, packed: Reader, *, bare: Any, coarse: bool) -> str | None:
    """Reads a few random tokens in both ways.

    Args:
        plain: TRL's way.
        packed: Ours.
        bare: The model, for its vocabulary and device.
        coarse: Whether it computes in 16 bits.

    Returns:
        How they differ; None where they agree.
    """
    if coarse and not is_relative(bare):
        return "learned positions cannot be told from rounding in 16 bits"
    ids, mask, width = _make_rows(bare.config.get_text_config().vocab_size, bare.device)
    present = mask[:, -width:].bool()
    with torch.no_grad():
        wanted = plain(ids, mask, width)[0]
        try:
            found = packed(ids, mask, width)[0]
        except NotImplementedError as error:
            return str(error)
        # Whatever a model's code makes of a layout that it was not written for.
        except Exception as error:
            return f"the model's code does not take it ({type(error).__name__})"
        differences = (wanted - found)[present].abs()
        if not coarse:
            return _judge(differences.max(), _TOLERANCE)
        padded = plain(pad(ids, (3, 0)), pad(mask, (3, 0)), width)[0]
    return _judge(differences.mean(), _NOISE * float((wanted - padded)[present].abs().mean()))


def _judge(difference: torch.Tensor, bearable: float) -> str | None:
    if float(difference) <= bearable:
        return None
    return f"log-probabilities differ by {float(difference):.2g} in a trial, and {bearable:.2g} is rounding"


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
