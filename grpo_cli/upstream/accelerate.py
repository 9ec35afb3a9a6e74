"""Internal names of accelerate. Does not import it."""

from typing import Any

VERSION = "1.15.0"

METHODS = {"accelerate.state.GradientState._set_sync_gradients": "sync_gradients"}


def set_gradient_sync(accelerator: Any, sync: bool) -> None:
    """Set whether processes exchange gradients in the next backward pass."""
    accelerator.gradient_state._set_sync_gradients(sync)
