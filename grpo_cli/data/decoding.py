"""The feature of `datasets` by which images are decoded when a batch needs them."""

from dataclasses import dataclass
from typing import Any

from datasets import Image

from grpo_cli.data import images
from grpo_cli.errors import RunError


@dataclass
class RgbImage(Image):
    """Images that are decoded as `decode_image` says."""

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Any:
        """Return an RGB `PIL.Image.Image`.

        Raises:
            RunError: It cannot be read.
        """
        if not isinstance(value, dict):
            return value
        try:
            return images.decode_image(value)
        except images.ImageError as error:
            raise RunError(f"an image {error.seen}. Fix: {error.row_fix}") from error
