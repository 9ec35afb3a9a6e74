"""An episode's messages as tokens: what follows an answer, and the calls that an answer makes."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.data.images import images_of, in_parts
from grpo_cli.environments.calls import Content, as_text
from grpo_cli.environments.contract import EpisodeError, Tool, tool_template_fix
from grpo_cli.fast.tokens import apply_template, begins_itself, build_reader
from grpo_cli.models.processor import tokenizer_of
from grpo_cli.rewards.answers import after_thinking

Message = dict[str, Any]
_QUESTION: Message = {"role": "user", "content": "q"}
_MARK = "ANSWER-8d1f"
"""Stands for an answer."""
_LEFT_OUT = " … [shortened] … "


@dataclass(frozen=True)
class Answer:
    """What the model wrote in a turn."""

    message: Message
    calls: Sequence[Mapping[str, Any]] = ()
    fault: str = ""
    """Why a call could not be parsed; empty if all could."""

    @property
    def said(self) -> str:
        """What an environment gets: as rewards, the text after the thinking, which the history keeps."""
        content = str(self.message["content"])
        said = after_thinking(content)
        return content if said == content else said.lstrip()


class Dialogue:
    """Renders what the model did not write, and parses what it did; tokens that it wrote are never made again."""

    def __init__(
        self,
        processing_class: Any,
        *,
        has_tools: bool,
        template_kwargs: Mapping[str, Any] | None = None,
        stops: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """Check the chat template of a tokenizer, or of the processor of a model that reads images.

        Without a response template, the model's calls are read by TRL's. Answers end at `stops`, by default the
        tokenizer's, and at `stop_strings`. Raises `EpisodeError` if it cannot render a dialogue, or tools.
        """
        # A response template of TRL's is not for the trainer: it would parse whole episodes as one answer.
        self.tokenizer = tokenizer = copy.copy(tokenizer_of(processing_class))
        self.reads_images = processing_class is not tokenizer_of(processing_class)
        self._renderer = tokenizer
        """What renders messages: the processor, or the tokenizer."""
        self._image_marks: set[str] = set()
        """What stands for an image in a text."""
        if self.reads_images:
            self._renderer = processor = copy.copy(processing_class)
            processor.tokenizer = tokenizer
            tokens = tokenizer.convert_ids_to_tokens(processor.image_token_ids)
            self._image_marks = {processor.image_token, *tokens}
        self.has_tools = has_tools
        self._kwargs = dict(template_kwargs or {})
        self.reader = build_reader(
            tokenizer,
            stops if stops is not None else [tokenizer.eos_token_id],
            stop_strings=stop_strings,
            skip_special_tokens=skip_special_tokens,
        )
        self.stops = self.reader.end_ids
        if self._renderer.chat_template is None:
            raise EpisodeError(
                "an episode is a dialogue, and the tokenizer has no chat template",
                "set `model.chat_template`",
            )
        if has_tools:
            self._prepare_tools()

    def _prepare_tools(self) -> None:
        from trl.chat_template_utils import (
            add_response_schema,
            get_training_chat_template,
            is_chat_template_prefix_preserving,
            supports_tool_calling,
        )

        if not supports_tool_calling(self._renderer):
            raise EpisodeError(
                "the model's chat template leaves out tools, calls or their results",
                tool_template_fix(),
            )
        own = ("response_template", "response_schema")
        if all(getattr(self.tokenizer, name, None) is None for name in own):
            try:
                add_response_schema(self._renderer)
            except ValueError as error:
                raise EpisodeError(
                    "how the model writes calls is not known: its tokenizer has no response template, and TRL "
                    "does not know its chat template",
                    tool_template_fix(),
                ) from error
        if is_chat_template_prefix_preserving(self._renderer):
            return
        try:
            self._kwargs["chat_template"] = get_training_chat_template(self._renderer)
        except ValueError as error:
            raise EpisodeError(
                "the chat template changes a call once its result follows, and TRL has no other for this model",
                tool_template_fix(),
            ) from error

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a prompt, which holds its images, with the schemas of its tools."""
        # Some templates print a heading for an empty list.
        schemas = [dict(tool.schema) for tool in tools] or None
        return self._render(messages, tools=schemas, add_generation_prompt=True)

    def encode_replies(self, replies: Sequence[Message], *, has_end: bool = True) -> list[int]:
        """Return the tokens from the end of an answer to the beginning of the next: messages that follow it.

        They hold their images. An answer that ended at a stop string has no end token (`has_end` is false): the
        token is then the first.

        Source: `GRPOTrainer._get_tool_suffix_ids` (trl 1.16): they are cut out of a short dialogue.

        Raises `EpisodeError` if they cannot be cut out.
        """
        is_tool = replies[0]["role"] == "tool"
        ids = self._encode_results(replies, has_end) if is_tool else self._encode_texts(replies)
        # The model wrote it already; in some templates it begins the next message.
        return ids[1:] if has_end and ids and ids[0] in self.stops else ids

    def _encode_results(self, replies: Sequence[Message], has_end: bool) -> list[int]:
        before = [_QUESTION, _make_call(replies[0]["name"], {})]
        start = self._render(before, add_generation_prompt=False)
        whole = self._render([*before, *replies], add_generation_prompt=True)
        # Templates may write a line break after the end of an answer, which the model does not.
        end = next(
            (place for place in range(len(start), 0, -1) if start[place - 1] in self.stops), 0
        )
        if end and not self.tokenizer.decode(start[end:]).strip():
            start = start[: end if has_end else end - 1]
        if whole[: len(start)] != start:
            raise EpisodeError(
                "the chat template changes a call once its result follows, so the results cannot be cut out of "
                "what it renders",
                tool_template_fix(),
            )
        return whole[len(start) :]

    def _encode_texts(self, replies: Sequence[Message]) -> list[int]:
        # Templates may render an earlier answer in another way than the last one: only what follows it counts.
        messages = [_QUESTION, {"role": "assistant", "content": _MARK}, *replies]
        text = self._fill_template(messages, add_generation_prompt=True)
        _, mark, after = text.partition(_MARK)
        if not mark:
            raise EpisodeError(
                "the chat template leaves out the model's answers",
                "set `model.chat_template` to another",
            )
        return self._encode(after, images_of(replies))

    def _fill_template(self, messages: Sequence[Message], **options: Any) -> str:
        options = {**self._kwargs, "tokenize": False, **options}
        messages = in_parts(messages) if self.reads_images else list(messages)
        return str(apply_template(self._renderer, messages, **options))

    def _render(self, messages: Sequence[Message], **options: Any) -> list[int]:
        text = self._fill_template(messages, **options)
        # As `apply_chat_template` of processors does, and not that of tokenizers.
        adds = self.reads_images and not begins_itself(self.tokenizer, text)
        return self._encode(text, images_of(messages), add_special_tokens=adds)

    def _encode(
        self, text: str, images: Sequence[Any], *, add_special_tokens: bool = False
    ) -> list[int]:
        """Return the tokens of a text in which images have their places."""
        if not self.reads_images:
            return self.encode_text(text)
        try:
            encoded = self._renderer(
                text=[text],
                images=[list(images)] if images else None,
                add_special_tokens=add_special_tokens,
            )
        except Exception as error:  # processors raise what they meet in images
            sizes = ", ".join(f"{each.width}x{each.height}" for each in images)
            raise EpisodeError(
                f"the model's processor refuses {len(images)} images ({sizes} pixels): {error}",
                "return images of another size, or change `model.processor`",
            ) from error
        return list(encoded["input_ids"][0])

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text, without any that the tokenizer would add."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return a call as the chat template writes it; None if it cannot be cut out of the dialogue."""
        messages = [_QUESTION, _make_call(name, dict(arguments))]
        start = self._fill_template(messages[:1], add_generation_prompt=True)
        whole = self._fill_template(messages, add_generation_prompt=False)
        if not whole.startswith(start):
            return None
        text = whole[len(start) :]
        return text.rpartition(self.tokenizer.eos_token)[0] or text

    def read_answer(
        self, token_ids: Sequence[int], context: Sequence[int], tools: Sequence[Tool]
    ) -> Answer:
        """Parse what the model wrote after `context`."""
        text = self.reader.decode(token_ids)
        plain = {"role": "assistant", "content": text}
        if not tools:
            return Answer(plain)
        schemas = [dict(tool.schema) for tool in tools]
        new = getattr(self.tokenizer, "response_template", None) is not None
        options = {"prefix": list(context), "tools": schemas} if new else {}
        end = self.tokenizer.eos_token or ""
        try:
            message = self.tokenizer.parse_response(list(token_ids), **options)
            if message is None:
                return Answer(plain)
            message = _repair(message)
            calls = [_read_call(each) for each in message.get("tool_calls") or ()]
        except RecursionError:
            return Answer(plain, fault="it is nested too deeply")
        except (ValueError, TypeError) as error:
            return Answer(plain, fault=str(error).replace(end, "").strip() or "it is not a call")
        content = (message.get("content") or "").removesuffix(end)
        return Answer({**message, "role": "assistant", "content": content}, calls)

    def shorten(self, content: Content, most: int) -> tuple[Content, bool]:
        """Return what a message says with each text at most about `most` tokens, and whether any was longer.

        What stands for an image in the model's prompts is replaced in the texts.
        """
        if isinstance(content, str):
            return self._shorten_text(content, most)
        texts = [
            self._shorten_text(part["text"], most) if part["type"] == "text" else ("", False)
            for part in content
        ]
        parts = [
            {**part, "text": text} if part["type"] == "text" else part
            for part, (text, _) in zip(content, texts, strict=True)
        ]
        return parts, any(was_long for _, was_long in texts)

    def _shorten_text(self, text: str, most: int) -> tuple[str, bool]:
        """Return a text of at most about `most` tokens, and whether its middle was left out."""
        for mark in self._image_marks:
            text = text.replace(mark, "[image]")
        # A text that is far too long would take long to tokenize.
        parts = [text] if len(text) <= 64 * most else [text[: 32 * most], text[-32 * most :]]
        ids = list(map(self.encode_text, parts))
        if len(parts) == 1 and len(ids[0]) <= most:
            return text, False
        middle = self.encode_text(_LEFT_OUT)
        half = max((most - len(middle)) // 2, 1)
        return self.tokenizer.decode([*ids[0][:half], *middle, *ids[-1][-half:]]), True


def _make_call(name: str, arguments: dict[str, Any]) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _repair(value: Any) -> Any:
    """Return JSON without halves of surrogate pairs, which tokenizers and files refuse."""
    if isinstance(value, Mapping):
        return {_repair(key): _repair(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_repair(each) for each in value]
    return as_text(value) if isinstance(value, str) else value


def _read_call(entry: Any) -> Mapping[str, Any]:
    """Return a call's name and arguments; raises ValueError if they have another form."""
    function = entry.get("function") if isinstance(entry, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ValueError(f"a call needs a name and arguments, not {json.dumps(function)[:200]}")
    arguments = function.get("arguments")
    if arguments is None:
        return {"name": name, "arguments": {}}
    if isinstance(arguments, str):
        arguments = _repair(json.loads(arguments))
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"the arguments of {name} should be an object, not {json.dumps(arguments)[:200]}"
        )
    return {"name": name, "arguments": dict(arguments)}


def append_content(prompt: list[Message], said: Content) -> list[Message]:
    """Add what an environment says first to the end of a prompt."""
    last = prompt[-1]["content"]
    if not said or not last:
        return [*prompt[:-1], {**prompt[-1], "content": said or last}]
    if isinstance(last, str) and isinstance(said, str):
        return [*prompt[:-1], {**prompt[-1], "content": f"{last}\n\n{said}"}]
    both = in_parts([{"content": last}, {"content": said}])
    first, then = (each["content"] for each in both)
    if first[-1]["type"] == then[0]["type"] == "text":
        joined = f"{first[-1]['text']}\n\n{then[0]['text']}"
        first, then = first[:-1], [{"type": "text", "text": joined}, *then[1:]]
    return [*prompt[:-1], {**prompt[-1], "content": [*first, *then]}]
