"""Prompts and answers as tokens, with the images of prompts."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

from grpo_cli.data.images import Image, fill_images, in_parts, read_size
from grpo_cli.errors import RecipeError, recipe_error
from grpo_cli.issues import Issue
from grpo_cli.models.processor import tokenizer_of
from grpo_cli.recipe.dataset import IMAGES

Prompt = str | list[dict[str, Any]]
"""Plain text, or messages with `role` and `content`."""


def encode_prompt(
    tokenizer: Any, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the tokens of a prompt, as `GRPOTrainer` makes them.

    Source: trl 1.16, `GRPOTrainer._tokenize_prompts`.

    Raises:
        RecipeError: The prompt is a list of messages, and the tokenizer has no chat template, or one that
            refuses them.
    """
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    if tokenizer.chat_template is None:
        problem = Issue(
            "the prompts are messages, and the tokenizer has no chat template",
            "set `model.chat_template`, or write `dataset.prompt` as one plain text",
            "model.chat_template",
        )
        raise RecipeError([problem])
    options = {"add_generation_prompt": True, **(chat_template_kwargs or {})}
    encoded = apply_template(tokenizer, prompt, tokenize=True, return_dict=True, **options)
    return list(encoded["input_ids"])


def encode_unexpanded(
    processor: Any, prompt: Sequence[dict[str, Any]], kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the tokens of a prompt in which each image is still one placeholder, as vLLM takes it.

    Source: transformers 5.17, `ProcessorMixin.apply_chat_template`, for the special tokens.
    """
    options = {"add_generation_prompt": True, **(kwargs or {})}
    text = apply_template(processor, prompt, tokenize=False, **options)
    adds = not begins_itself(processor.tokenizer, text)
    return list(processor.tokenizer(text, add_special_tokens=adds)["input_ids"])


def begins_itself(tokenizer: Any, text: str) -> bool:
    """Return whether a filled template begins with the token that the tokenizer would put there."""
    return bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)


def encode_answer(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of an answer as the model would have sampled it, with the token that ends it."""
    return [*tokenizer(text=text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def apply_template(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
    """Fill the tokenizer's chat template, as its `apply_chat_template` does.

    Raises:
        RecipeError: The template is wrong, or refuses these messages.
    """
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template is code that ships with a model: it raises anything
        reason = str(error).rstrip(".") or type(error).__name__
        rest = [message for message in messages if message["role"] != "system"]
        if len(rest) < len(messages) and _accepts(tokenizer, rest, options):
            message = f"the chat template takes no system message: {reason}"
            fix = "move its text into `dataset.prompt.user`, or set `model.chat_template` to one that takes it"
            path = "dataset.prompt.system"
        else:
            roles = ", ".join(str(message["role"]) for message in messages)
            line = getattr(error, "lineno", None)
            message = (
                f"line {line} of the chat template is wrong: {reason}"
                if line
                else f"the chat template fails on messages of {roles}: {reason}"
            )
            fix = "correct the template, or set `model.chat_template` to one that takes these messages"
            path = "model.chat_template"
        raise RecipeError([Issue(message, fix, path)]) from error


def _accepts(tokenizer: Any, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> bool:
    try:
        tokenizer.apply_chat_template(messages, **options)
    except Exception:  # as above
        return False
    return True


def count_prompt_tokens(
    tokenizer: Any,
    prompt: Any,
    chat_template_kwargs: dict[str, Any] | None = None,
    *,
    images: Sequence[Image] | None = None,
) -> int:
    """Return how many tokens the model reads before it answers `prompt`.

    Args:
        tokenizer: The tokenizer; a processor if prompts may hold images.
        images: The prompt's images as rows hold them, each read for its size; None if there are none.

    Raises:
        RecipeError: The prompt is a list of messages, and there is no chat template, or one that refuses them.
    """
    if images is None and tokenizer is tokenizer_of(tokenizer):
        return len(encode_prompt(tokenizer, prompt, chat_template_kwargs))
    images, prompt = images or (), in_parts(prompt)
    if (token := find_image_token(tokenizer, prompt)) is not None:
        seen = (
            f"the text of a prompt has `{token}`, by which the model would look for one more image"
        )
        fix = f"take it out, such as by {{{{ question | replace('{token}', '') }}}}; {{{{ image }}}} is for images"
        raise recipe_error(seen, fix, "dataset.prompt")
    options = {"add_generation_prompt": True, **(chat_template_kwargs or {})}
    text = apply_template(tokenizer, prompt, tokenize=False, **options)
    count = _count_text_tokens(tokenizer, text)
    return count + sum(_count_image_tokens(tokenizer, *read_size(image)) for image in images)


def find_image_token(processor: Any, messages: Sequence[dict[str, Any]]) -> str | None:
    """Return the token that stands for an image if the text of messages in parts has it, as LLaVA's data does."""
    token = getattr(processor, "image_token", None)
    texts = (part.get("text") for each in messages for part in each["content"])
    return token if token and any(token in text for text in texts if text) else None


def count_row_tokens(
    processing_class: Any, rows: Any, chat_template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Return the tokens of the prompts of a `Dataset`; see `count_prompt_tokens`."""
    images: Any = repeat(None, len(rows))
    if IMAGES in rows.column_names:
        images = rows.select_columns([IMAGES]).to_dict()[IMAGES]
    return [
        count_prompt_tokens(processing_class, prompt, chat_template_kwargs, images=each)
        for prompt, each in zip(rows["prompt"], images, strict=True)
    ]


def _count_text_tokens(processor: Any, text: str) -> int:
    return len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])


@lru_cache(maxsize=4096)
def _count_image_tokens(processor: Any, width: int, height: int) -> int:
    """Return the tokens that an image has besides the one that stands for it in the text."""
    from PIL import Image as Pillow

    prompt = [{"role": "user", "content": [{"type": "image", "text": None}]}]
    filled = fill_images(prompt, [Pillow.new("RGB", (width, height))])
    encoded = processor.apply_chat_template([filled], tokenize=True, return_dict=True)
    ids = encoded["input_ids"][0]
    token = getattr(processor, "image_token_id", None)
    if token is not None and token not in ids:
        fix = "set `model.chat_template` to one that writes the model's image token for parts of type `image`"
        raise recipe_error("the chat template leaves out the images of prompts", fix, "model.path")
    text = apply_template(processor, prompt, tokenize=False)
    return len(ids) - _count_text_tokens(processor, text)
