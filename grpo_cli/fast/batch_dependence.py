"""What about a model forbids that a token is read apart from the batch it came in.

Owns three traits, looked up in the loaded model: dropout or noise that is active, positions that hang on the
longest row, and attention that chooses among tokens. Heavy libraries are not imported here.
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
    return longest_at_rest(config) is not None


def longest_at_rest(config: Any) -> int | None:
    """Columns up to which positions that move stay where they are; None where they never move.

    Args:
        config: A `PreTrainedConfig` of a language model.
    """
    limits = [
        parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        for parameters in rotary_parameters(config)
        if parameters.get("rope_type") in _MOVING
    ]
    return min(limits, default=None)


def find_batch_tie(config: Any) -> str | None:
    """What makes a token hang on how wide its batch is, padding too; None where nothing does.

    Args:
        config: A `PreTrainedConfig` of a language model.
    """
    if has_moving_positions(config):
        return "positions depend on the longest row of a batch"
    if chooses_tokens(config):
        return "which tokens attention chooses depends on the width of a batch"
    return None


def chooses_tokens(config: Any) -> bool:
    """Whether attention takes the best few tokens of a row: which of equals, hangs on its width.

    Args:
        config: A `PreTrainedConfig` of a language model.
    """
    return bool(getattr(config, "index_topk", None)) or any(
        word in kind for kind in layer_kinds(config) for word in ("sparse", "compressed")
    )


def layer_kinds(config: Any) -> set[str]:
    """What kinds of layers a model names, such as `full_attention`; none where it names none."""
    return set(getattr(config, "layer_types", None) or [])


def rotary_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """Settings of rotary positions: some models have one set of them for each kind of layer.

    Args:
        config: A `PreTrainedConfig` of a language model.
    """
    given = [getattr(config, "rope_parameters", None)]
    while given:
        parameters = given.pop()
        if isinstance(parameters, Mapping):
            yield parameters
            given += parameters.values()
