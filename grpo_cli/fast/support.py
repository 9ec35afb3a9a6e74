"""Whether less work is exact for a model: features that were tested, and a trial on the loaded model."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from grpo_cli.models.loading import find_prompt_ties

_LAYERS = frozenset({"full_attention"})
_ROTARY = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""Kinds of rotary positions that stay the same whatever the longest row of a call is.

Source: `transformers.modeling_rope_utils.dynamic_rope_update`, 5.17, for those that do not."""
_ABSOLUTE = "llama_4_scaling_beta"
"""Rotary setting by which attention also depends on the column of a token."""
_TOLERANCE = 1e-3
"""Largest difference of log-probabilities in float32, in nats; rounding makes 2e-5 (SmolLM2-135M)."""
_NOISE = 3.0
"""How many times the mean difference in 16 bits may exceed the one that more padding makes in TRL's own pass."""
_SHIFT = 0.3
"""Largest mean difference in 16 bits that more padding may make, in nats; rounding makes 0.06 (SmolLM2-135M in
bfloat16)."""

Reader = Callable[[torch.Tensor, torch.Tensor, int], Any]
"""Token ids and mask, both `[rows, width]`, and the columns of completions, to log-probabilities first."""


def find_batch_tie(config: Any, *, windows: bool = False) -> str | None:
    """Return why a token may depend on the batch it is computed in; None if all features are known not to."""
    kinds = set(getattr(config, "layer_types", None) or ())
    known = _LAYERS | {"sliding_attention"} if windows else _LAYERS
    if other := kinds - known:
        return f"the model has layers of the kind {', '.join(sorted(other))}"
    if getattr(config, "sliding_window", None) and not kinds and not windows:
        return "the model has sliding windows"
    for parameters in _rotary_parameters(config):
        if parameters.get("rope_type", "default") not in _ROTARY:
            return f"positions ({parameters['rope_type']}) may depend on the longest row of a batch"
    if getattr(config, "index_topk", None):
        return "which tokens attention chooses depends on the width of a batch"
    return None


def unsupported_reason(model: Any, bare: Any) -> str | None:
    """Return why prompts cannot be shared, by the model's features; None if they can."""
    config = bare.config.get_text_config()
    if config is not bare.config and getattr(bare.config, "vision_config", None) is not None:
        return "the model reads images"
    if (tie := find_batch_tie(config) or find_prompt_ties(model)) is not None:
        return tie
    if has_dropout(model):
        return (
            "dropout differs between copies of a prompt (`training.disable_dropout: true` turns off that of "
            "dropout layers)"
        )
    return None


def has_dropout(model: Any) -> bool:
    """Return whether a layer of a `torch.nn.Module` drops neurons in training, or adds noise."""
    return any(
        isinstance(share, float) and share > 0
        for module in model.modules()
        for share in _dropout_shares(module)
    )


def _dropout_shares(module: Any) -> Iterator[Any]:
    """`p` of torch's dropout layers, and attributes named after dropout or jitter."""
    if "dropout" in type(module).__name__.lower():
        yield float(getattr(module, "p", 0.0))
    yield from (value for name, value in vars(module).items() if "drop" in name or "jitter" in name)


def _rotary_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """Settings of rotary positions: some models have one set of them for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, Mapping):
        yield parameters
        yield from (each for each in parameters.values() if isinstance(each, Mapping))


def _is_relative(config: Any) -> bool:
    """Return whether positions count only relative to each other."""
    return hasattr(config, "rope_parameters") and not any(
        each.get(_ABSOLUTE) for each in _rotary_parameters(config)
    )


def ignores_padding(plain: Reader, *, bare: Any, coarse: bool) -> bool:
    """Return whether columns that are padding in every row change nothing; `coarse` is a model in 16 bits."""
    config = bare.config.get_text_config()
    if find_batch_tie(config, windows=True) is not None or not _is_relative(config):
        return False
    ids, mask, width = _make_rows(config.vocab_size, bare.device)
    with torch.no_grad():
        expected = plain(ids, mask, width)[0]
        padded = plain(pad(ids, (3, 2)), pad(mask, (3, 2)), width + 2)[0][:, :width]
    differences = (expected - padded)[mask[:, -width:].bool()].abs()
    if coarse:
        return float(differences.mean()) <= _SHIFT
    return float(differences.max()) <= _TOLERANCE


def find_difference(plain: Reader, packed: Reader, *, bare: Any, coarse: bool) -> str | None:
    """Return how a pass differs from TRL's on a few random tokens; `coarse` is a model in 16 bits."""
    config = bare.config.get_text_config()
    if coarse and not hasattr(config, "rope_parameters"):
        return "with learned positions in 16 bits, the trial cannot tell a difference from rounding"
    ids, mask, width = _make_rows(config.vocab_size, bare.device)
    present = mask[:, -width:].bool()
    with torch.no_grad():
        expected = plain(ids, mask, width)[0]
        try:
            values = packed(ids, mask, width)[0]
        except NotImplementedError as error:
            return str(error)
        except (
            Exception
        ) as error:  # a model's code raises anything for a layout it was not written for
            return f"the model's code does not take it ({type(error).__name__})"
        differences = (expected - values)[present].abs()
        difference, tolerance = float(differences.max()), _TOLERANCE
        if coarse:
            padded = plain(pad(ids, (3, 0)), pad(mask, (3, 0)), width)[0]
            noise = float((expected - padded)[present].abs().mean())
            difference, tolerance = float(differences.mean()), _NOISE * noise
    if difference <= tolerance:
        return None
    return (
        f"log-probabilities differ by {difference:.2g} in a trial, and {tolerance:.2g} is rounding"
    )


def _make_rows(vocabulary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Two prompts of 9 and 6 tokens, with completions of 7, 4, 1 and of 5 and 2 tokens."""
    generator = torch.Generator().manual_seed(0)
    edge, width = 9, 7
    rows = [(0, 9, 7), (0, 9, 4), (0, 9, 1), (3, 6, 5), (3, 6, 2)]  # first of the prompt, lengths
    ids = torch.randint(vocabulary, (len(rows), edge + width), generator=generator)
    mask = torch.zeros_like(ids)
    for row, (first, prompt, completion) in enumerate(rows):
        ids[row, :edge] = ids[first, :edge]
        mask[row, edge - prompt : edge + completion] = 1
    return ids.to(device), mask.to(device), width
