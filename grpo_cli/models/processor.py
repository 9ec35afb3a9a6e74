"""Loads the processor of a vision-language model, which holds its tokenizer and prepares images."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, ProcessorMixin
from transformers.utils import cached_file

from grpo_cli.errors import RecipeError, SetupError, nearest, pip
from grpo_cli.issues import Issue
from grpo_cli.models.loading import explaining, hub_options, load_tokenizer, settle_tokenizer
from grpo_cli.models.source import model_folder_or_id, reads_images, resolve_source
from grpo_cli.recipe.model import ModelConfig

_PER_CALL = {"data_format", "device", "disable_grouping", "input_data_format", "return_tensors"}
"""Arguments of an image processor's calls, which are not settings."""
_TEXT_FIELDS = {"input_ids", "attention_mask"}

_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Where processors have their settings, beside those of the tokenizer."""


def load_processing_class(model: ModelConfig, *, has_images: bool) -> Any:
    """Return what TRL calls so: the model's processor if prompts may hold images, otherwise its tokenizer."""
    return load_processor(model) if has_images else load_tokenizer(model)


def tokenizer_of(processing_class: Any) -> Any:
    """Return the tokenizer of what `load_processing_class` returned."""
    if isinstance(processing_class, ProcessorMixin):
        return processing_class.tokenizer
    return processing_class


def load_processor(model: ModelConfig) -> Any:
    """Load the processor of a vision-language model; its `tokenizer` is as `load_tokenizer` returns it.

    Raises `RecipeError` if the model has none, or `model.processor` has a setting that it does not know, and
    `SetupError` if it cannot be loaded, or a package is missing.
    """
    options = {"padding_side": "left", "truncation_side": "left", **model.processor}
    with explaining(model):
        try:
            processor = AutoProcessor.from_pretrained(
                model_folder_or_id(model), **options, **hub_options(model)
            )
        except (ImportError, ValueError) as error:
            if isinstance(error, ValueError) and "Missing optional dep" not in str(error):
                raise _bad_settings(model, f"the processor cannot be made: {error}") from error
            named = re.search(r"torchvision|num2words", str(error).lower())
            package = named[0] if named else "pillow"
            message = f"the processor of {model.path} needs {package}, which is not installed"
            raise SetupError(message, pip(f"install {package}"), path="model.path") from error
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        message = f"{model.path} has no processor for images"
        fix = "put its processor_config.json or preprocessor_config.json beside config.json"
        raise RecipeError([Issue(message, fix, "model.path")])
    _check_settings(model, processor.image_processor)
    tokenizer = settle_tokenizer(processor.tokenizer, model)
    for name in model.processor:
        # The tokenizer, which gets them too, would save them.
        tokenizer.init_kwargs.pop(name, None)
    template = tokenizer.chat_template if model.chat_template else processor.chat_template
    processor.chat_template = tokenizer.chat_template = template or tokenizer.chat_template
    return processor


def copy_processor(model: ModelConfig, folder: Path) -> None:
    """Copy the settings of the processor to weights that were trained on text alone, if the model reads images."""
    if not reads_images(model):
        return
    location, revision = model_folder_or_id(model), resolve_source(model).revision
    for name in _FILES:
        file = cached_file(
            location, name, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if file is not None:
            shutil.copyfile(file, folder / name)


def encode_images(
    processor: Any, images: Sequence[Sequence[Any]], token_ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return what a model reads of sequences with images besides their tokens; nothing if there are no images.

    The images are those of all turns, so that the processor cannot have them with the text of a prompt. Returns
    tensors such as `pixel_values`, and lists with a number for each token, such as `mm_token_type_ids`.
    """
    if not any(images):
        return {}
    encoded = dict(_encode_marks(processor, images))
    pixels = encoded["pixel_values"]
    tiles_vary = pixels.ndim == 4 and len(pixels) != sum(map(len, images))
    if "spatial_shapes" in encoded or tiles_vary:
        # TRL's name: how many tiles images were cut into.
        encoded["num_tiles"] = [
            len(_encode_marks(processor, [own])["pixel_values"]) if own else 0 for own in images
        ]
    for name in [name for name in encoded if name.endswith("token_type_ids")]:
        # A token of a video, which a model may sample, stands for none.
        kind = 1 if encoded[name].any() else 0
        kinds = processor.create_mm_token_type_ids(token_ids)
        encoded[name] = [[kind * (each == 1) for each in own] for own in kinds]
    return encoded


def _encode_marks(processor: Any, images: Sequence[Sequence[Any]]) -> Any:
    """Return the fields of messages that have images, and nothing else of interest."""
    text = {"type": "text", "text": ""}
    contents = [[*({"type": "image", "image": each} for each in own), text] for own in images]
    encoded = processor.apply_chat_template(
        [[{"role": "user", "content": content}] for content in contents],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True},
    )
    return {name: value for name, value in encoded.items() if name not in _TEXT_FIELDS}


def pads_images(processor: Any) -> bool:
    """Return whether a processor pads images to equally many for each row, as those of Idefics and SmolVLM do.

    Others return the images of all rows one after the other, whole or in patches.
    """
    from PIL import Image

    encoded = _encode_marks(processor, [[Image.new("RGB", (32, 32), "white")] * 2])
    return len(encoded["pixel_values"]) == 1


def ban_image_token(processor: Any) -> dict[int, float]:
    """Return vLLM's `logit_bias` under which the token that stands for images is not sampled.

    The model would look for an image where it sampled its token.
    Source: trl 1.16, `GRPOTrainer.__init__`, for transformers.
    """
    return {processor.image_token_id: -100.0}


def _check_settings(model: ModelConfig, image_processor: Any) -> None:
    """Refuse settings that the image processor does not have, which transformers passes over, and bad values."""
    fields = {*image_processor.valid_kwargs.__annotations__, *image_processor.to_dict()}
    known = sorted(name for name in fields - _PER_CALL if not name.endswith("_type"))
    problems = []
    for name in sorted(model.processor.keys() - known):
        close = nearest(name, known)
        fix = f"write `{close}`" if close else f"write one of {', '.join(known)}"
        seen = f"{type(image_processor).__name__} has no setting of this name"
        problems.append(Issue(seen, fix, f"model.processor.{name}"))
    if problems:
        raise RecipeError(problems)
    if model.processor:
        from PIL import Image

        try:
            made = image_processor(images=[Image.new("RGB", (640, 480))], return_tensors="pt")
            is_finite = made["pixel_values"].isfinite().all()
        except Exception as error:  # whatever a model's processor makes of a bad value
            seen = f"{type(image_processor).__name__} fails with these settings: {error}"
            raise _bad_settings(model, seen) from error
        if not is_finite:
            raise _bad_settings(model, "with these settings, pixels are not finite numbers")


def _bad_settings(model: ModelConfig, seen: str) -> RecipeError:
    fix = "correct the values; preprocessor_config.json of the model shows their form"
    return RecipeError([Issue(seen, fix, "model.processor" if model.processor else "model.path")])
