"""Between texts and tokens: prompts and answers encoded, with images; where completions end, and what they say."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import GenerationConfig, ProcessorMixin, StoppingCriteria, StopStringCriteria

from grpo_cli.data.images import Image, fill_images, in_parts, read_size
from grpo_cli.errors import RecipeError, RunError, recipe_error
from grpo_cli.issues import Issue
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
    if images is None and not isinstance(tokenizer, ProcessorMixin):
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


_NO_TOKEN = 2**31 - 1
"""Stands before the first token; above every token's id."""


class StopStrings(StoppingCriteria):
    """Ends a sequence with the token that completes a stop string, as `generate()` does.

    Source: transformers 5.24, `StopStringCriteria`; a stop string may begin in the prompt, and the token that
    completes it may go on behind it.
    """

    def __init__(self, tokenizer: Any, strings: Collection[str]) -> None:
        """Find how the tokens of a vocabulary can make up the strings.

        Raises:
            RunError: No token can complete any of them.
        """
        try:
            self._criteria = StopStringCriteria(tokenizer, list(strings))
        except ValueError as error:
            raise RunError(
                f"no token of the model can complete {' or '.join(map(repr, strings))}",
                "change `stop_strings` in `generation.generation_kwargs`",
            ) from error
        self.strings = tuple(strings)
        self.window = self._criteria.maximum_token_len
        """The most tokens that a stop string can have."""

    @cached_property
    def last_tokens(self) -> frozenset[int]:
        """The tokens that can complete a stop string."""
        ends = self._criteria.max_valid_positions * self._criteria.num_stop_strings
        completes = (self._criteria.embedding_vec[:, ends:-1] > 0).any(dim=1)
        return frozenset(completes.nonzero().squeeze(1).tolist())

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """Return which sequences have just ended, `[sequences] bool`."""
        return self._criteria(input_ids, scores)

    def is_reached(self, ids: Sequence[int]) -> bool:
        """Return whether the last token of a sequence completes a stop string; reads the newest tokens alone."""
        if ids[-1] not in self.last_tokens:
            return False
        return bool(self(torch.tensor([ids[-self.window :]])))

    def find(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Return which tokens from column `first` on complete a stop string, `[sequences, tokens - first] bool`.

        Args:
            ids: Tokens of prompts and completions, `[sequences, tokens] int64`.
            first: At least 0.
        """
        start = first - self.window + 1
        ids = pad(ids, (max(-start, 0), 0), value=_NO_TOKEN)[:, max(start, 0) :]
        windows = ids.unfold(1, self.window, 1)
        return self(windows.flatten(0, 1)).view(windows.shape[:2])


@dataclass(frozen=True)
class CompletionReader:
    """Where completions of a model end, and their texts."""

    tokenizer: Any
    end_ids: frozenset[int]
    """The tokens that end a completion."""
    stop_strings: StopStrings | None = None
    skip_special_tokens: bool = True
    """Whether texts lack all special tokens, and not the end and padding tokens alone."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, as rewards read it."""
        if self.skip_special_tokens:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        ends = self.end_ids | {self.tokenizer.pad_token_id}
        return str(self.tokenizer.decode([token for token in ids if token not in ends]))

    def cut(self, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> list[int]:
        """Return tokens up to where the completion ends; the end token or stop string is kept."""
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), None)
        row = list(ids if end is None else ids[: end + 1])
        if self.stop_strings is None or self.stop_strings.last_tokens.isdisjoint(row):
            return row
        before = list(prompt_ids[-self.stop_strings.window :])
        ends = self.stop_strings.find(torch.tensor([[*before, *row]]), len(before))[0]
        return row[: int(ends.int().argmax()) + 1] if ends.any() else row

    def is_complete(self, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> bool:
        """Return whether a completion ended by itself: with an end token, or at a stop string."""
        if not ids or ids[-1] in self.end_ids:
            return bool(ids)
        stops = self.stop_strings
        return stops is not None and stops.is_reached([*prompt_ids[-stops.window :], *ids])

    def is_terminated(self, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> bool:
        """Return whether TRL counts a completion as complete: `is_complete`, or its last token is padding."""
        is_padding = bool(ids) and ids[-1] == self.tokenizer.pad_token_id
        return is_padding or self.is_complete(ids, prompt_ids)

    def find_hidden(self, ids: Collection[int]) -> set[int]:
        """Return the special tokens among some that texts lack, besides end and padding tokens."""
        if not self.skip_special_tokens:
            return set()
        added = self.tokenizer.added_tokens_decoder
        special = {token for token, each in added.items() if each.special}
        return special & set(ids) - self.end_ids - {self.tokenizer.pad_token_id}


def build_reader(
    tokenizer: Any,
    end_ids: Collection[int],
    *,
    stop_strings: Collection[str] = (),
    skip_special_tokens: bool = True,
) -> CompletionReader:
    """Return the reader of a model's completions.

    Args:
        tokenizer: The model's.
        end_ids: The tokens that end a completion.
        stop_strings: Texts that do.
        skip_special_tokens: Whether texts lack all special tokens.

    Raises:
        RunError: No token can complete a stop string.
    """
    stops = StopStrings(tokenizer, stop_strings) if stop_strings else None
    return CompletionReader(tokenizer, frozenset(end_ids), stops, skip_special_tokens)


def all_eos_token_ids(config: GenerationConfig, tokenizer: Any) -> list[int]:
    """Return every token that ends a completion: the tokenizer's, and those of the model's generation settings.

    Source: trl 1.16, `GRPOTrainer.__init__`, `self.eos_token_ids`.
    """
    ids = dict.fromkeys([tokenizer.eos_token_id, *declared_eos_token_ids(config)])
    return [token for token in ids if token is not None]


def declared_eos_token_ids(config: GenerationConfig) -> list[int]:
    """Return the end-of-sequence tokens that a model's generation settings name: none, one or several."""
    declared = config.eos_token_id
    if declared is None:
        return []
    return declared if isinstance(declared, list) else [declared]
