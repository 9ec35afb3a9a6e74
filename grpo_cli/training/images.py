"""What TRL (1.16) does not pass to models that read images, or passes wrongly."""

from collections.abc import Iterable
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch

from grpo_cli.fast.decoding import without_wrapper
from grpo_cli.models.processor import encode_images, pads_images
from grpo_cli.training.rollout.rollout import Rollout

_FIELDS = (
    "pixel_values pixel_attention_mask image_grid_thw image_sizes image_position_ids spatial_shapes"
).split()
"""What a processor makes of images."""


class ImageFields:
    """Completes the fields of images in batches and in calls of a model."""

    def __init__(self, processing_class: Any, models: Iterable[Any]) -> None:
        """Complete all calls of some models from now on."""
        self._processor = processing_class
        self._pads = pads_images(processing_class)
        self._of_episodes: dict[str, Any] | None = None
        for model in models:
            # Not of the model itself: peft's layers call its `forward` past all hooks.
            backbone = without_wrapper(model).base_model
            complete = partial(_complete, pads_images=self._pads)
            backbone.register_forward_pre_hook(complete, with_kwargs=True)

    def add(self, fields: dict[str, Any], token_ids: torch.Tensor, rollout: Rollout | None) -> None:
        """Add the images of a rollout's episodes to fields: TRL reads those of prompts alone.

        Args:
            token_ids: Of prompts and completions, padded, `[rows, tokens] int64`.
            rollout: Of which TRL makes a batch; None while it learns from one.
        """
        if rollout is not None and rollout.images is not None:
            if self._of_episodes is None:
                self._of_episodes = self._encode(rollout.images, token_ids)
            fields.update(self._of_episodes)
        self.mark_padded(fields)

    def forget(self) -> None:
        """Forget the images of the last rollout."""
        self._of_episodes = None

    def mark_padded(self, fields: dict[str, Any]) -> None:
        """Make TRL slice images that are padded for each row by rows.

        TRL (1.16) slices them by images if images and rows are equal in number, which may be by chance.
        """
        if self._pads and fields.get("num_images") is not None:
            fields["num_images"] = [0] * len(fields["num_images"])

    def _encode(self, images: list[list[Any]], token_ids: torch.Tensor) -> dict[str, Any]:
        fields = encode_images(self._processor, images, token_ids.tolist())
        tensors = {
            name: torch.as_tensor(value).to(token_ids.device)
            for name, value in fields.items()
            if name != "num_tiles"
        }
        counts = {"num_images": [len(own) for own in images]} if fields else {}
        return {**fields, **tensors, **counts}


def _complete(
    model: Any, args: Any, fields: dict[str, Any], *, pads_images: bool
) -> tuple[Any, dict[str, Any]] | None:
    """Mend what TRL (1.16) passes to the part of a model that reads images.

    Rows without images get none, since a vision part reads at least one. Of several images in a row,
    LLaVA-OneVision's processor makes one patch each, which the model has to know.
    """
    pixels, ids = fields.get("pixel_values"), fields.get("input_ids")
    if pixels is None:
        return None
    is_padding = pads_images and ids is not None and not (ids == model.config.image_token_id).any()
    if not len(pixels) or is_padding:
        return args, {name: each for name, each in fields.items() if name not in _FIELDS}
    if model.config.model_type == "llava_onevision" and fields.get("batch_num_images") is None:
        in_patches = pixels[:, 1:].flatten(1).any(dim=1).tolist()
        runs = [(is_cut, len([*run])) for is_cut, run in groupby(in_patches)]
        counts = [[1] * size if is_cut else [size] for is_cut, size in runs]
        return args, {**fields, "batch_num_images": [*chain.from_iterable(counts)]}
    return None
