"""The sizes of a model that determine the memory of a training; `counting.py` counts them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, with its adapters, and of what one token of a training step leaves behind."""

    parameters: int
    trainable: int
    weight_bytes: int
    """All weights, adapters included."""
    trainable_bytes: int
    value_bytes: int
    """Bytes of one value of the model's precision."""
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    cache_bytes_per_token: int
    """Keys and values of all layers for one token."""
    context: int | None
    """Positions the model was made for; None if it names none."""
    head_trained: bool
    """Whether the output head, which may be the embedding too, is among the trained weights."""
    saved_bytes_per_token: float | None
    """Kept of one token for the backward pass, without gradient checkpointing; None if this architecture cannot be
    counted."""
    checkpoint_bytes_per_token: float | None
    """The same with gradient checkpointing, without the one layer that is recomputed."""
    adapted_bytes: int = 0
    """Weights of the layers that have adapters, without these."""
