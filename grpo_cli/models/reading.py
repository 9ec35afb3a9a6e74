"""What about a model forbids that a token is read apart from the batch it came in.

Owns two traits, looked up in the loaded model: dropout or noise that is active, and positions that hang on the
longest row. Heavy libraries are not imported here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_MOVING = {"dynamic", "longrope"}
"""Kinds of rotary positions that change with the longest row of a call.

Source: `transformers.modeling_rope_utils.dynamic_rope_update`, 5.17."""


def has_dropout(model: Any) -> bool:
    """Whether some layer drops neurons in training, by a layer for it or by a number of its own, or adds noise.

    Args:
        model: A `torch.nn.Module`.
    """
    return any(
        isinstance(share, float) and share > 0
        for module in model.modules()
        for share in _shares(module)
    )


def _shares(module: Any) -> Iterator[Any]:
    """What a layer might drop or shake: `p` of torch's dropout layers, and numbers named so."""
    if "dropout" in type(module).__name__.lower():
        yield float(getattr(module, "p", 0.0))
    yield from (value for name, value in vars(module).items() if "drop" in name or "jitter" in name)


def has_moving_positions(config: Any) -> bool:
    """Whether the position of a token depends on how long the longest row is.

    Args:
        config: A `PreTrainedConfig` of a language model.
    """
    return any(kind in _MOVING for kind in _rope_types(getattr(config, "rope_parameters", None)))


def _rope_types(parameters: Any) -> Iterator[Any]:
    """Of all layers: some models have one set of parameters for each kind of layer."""
    if isinstance(parameters, Mapping):
        yield parameters.get("rope_type")
        for value in parameters.values():
            yield from _rope_types(value)
