"""What answers in a chat: a model in this process, or a server."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_cli.data.images import ImageError, as_data_url, as_image, decode_image, in_parts
from grpo_cli.errors import RunError, SetupError, UsageError, install_extra
from grpo_cli.launch.server_plan import Served

if TYPE_CHECKING:
    from grpo_cli.fast.tokens import CompletionReader

Message = dict[str, Any]
"""With a role; its content is text, or parts if it may hold images."""
ChatBackend = Callable[[Sequence[Message]], Iterator[str]]
"""Streams the answer to a conversation, piece by piece."""


@dataclass(frozen=True)
class SamplingParams:
    """How answers are sampled."""

    temperature: float
    max_tokens: int
    stop_strings: Sequence[str] = ()
    skip_special_tokens: bool = True


def say(text: str, pictures: Sequence[Any] = ()) -> Message:
    """Return what a user says, after pictures."""
    if not pictures:
        return {"role": "user", "content": text}
    images = [{"type": "image", "image": each} for each in pictures]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def read_picture(path: str) -> Any:
    """Return a picture as training would read it; raises `UsageError` if it cannot be read."""
    try:
        return decode_image(as_image(path, None))
    except ImageError as error:
        raise UsageError(f"--image {error.seen}", error.fix) from error


def open_model(served: Served, sampling: SamplingParams) -> ChatBackend:
    """Load a model into this process."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from grpo_cli.fast.tokens import all_eos_token_ids, build_reader
    from grpo_cli.models.loading import load_adapter, load_generation_config, load_model
    from grpo_cli.models.processor import load_processing_class, tokenizer_of

    disable_progress_bar()
    template = served.template.read_text(encoding="utf-8") if served.template else None
    config = served.settings.model_copy(update={"chat_template": template})
    processing_class = load_processing_class(config, has_images=served.has_images)
    tokenizer = tokenizer_of(processing_class)
    model = load_model(config, tokenizer)
    if served.adapter is not None:
        model = load_adapter(model, served.adapter, served.model)
    if config.quantization is None:
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    reader = build_reader(
        tokenizer,
        all_eos_token_ids(load_generation_config(config), tokenizer),
        stop_strings=sampling.stop_strings,
        skip_special_tokens=sampling.skip_special_tokens,
    )
    return lambda messages: _stream(
        model.eval(), reader, _encode(processing_class, messages, served).to(model.device), sampling
    )


def _encode(processing_class: Any, messages: Sequence[Message], served: Served) -> Any:
    """Return what the model reads of a conversation, a `BatchEncoding` of one row."""
    import torch
    from transformers import BatchEncoding

    from grpo_cli.fast.tokens import encode_prompt, find_image_token

    kwargs = dict(served.template_kwargs or {})
    if served.has_images:
        conversation = in_parts(messages)
        if (token := find_image_token(processing_class, conversation)) is not None:
            fix = "leave it out; --image shows the model a picture"
            raise UsageError(f"`{token}` in a question would stand for a picture", fix)
        return processing_class.apply_chat_template(
            [conversation],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **kwargs,
        )
    # A model without a chat template continues the text itself.
    is_text = served.is_text or not processing_class.chat_template
    prompt = messages[-1]["content"] if is_text else list(messages)
    ids = torch.tensor([encode_prompt(processing_class, prompt, kwargs)])
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def _for_server(content: Any) -> Any:
    """Return a message's content with its pictures as OpenAI's interface takes them."""
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": as_data_url(part["image"])}}
        if part["type"] == "image"
        else part
        for part in content
    ]


def _stream(
    model: Any, reader: "CompletionReader", prompt: Any, params: SamplingParams
) -> Iterator[str]:
    """Generate in a thread, and yield the text as it is made."""
    import torch
    from transformers import GenerationConfig, TextIteratorStreamer

    from grpo_cli.fast.completions import stopping_criteria

    tokenizer = reader.tokenizer
    sampling: dict[str, Any] = {"do_sample": False}
    if params.temperature > 0:
        sampling = {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=params.max_tokens,
        eos_token_id=[*reader.end_ids],
        pad_token_id=tokenizer.pad_token_id,
        # The model would look for an image where it sampled its token.
        suppress_tokens=[model.config.image_token_id] if "pixel_values" in prompt else None,
        **sampling,
    )
    skips = reader.skip_special_tokens
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=skips)
    stopped = threading.Event()
    failed: list[BaseException] = []

    def generate() -> None:
        try:
            model.generate(
                **prompt,
                generation_config=config,
                streamer=streamer,
                stopping_criteria=[
                    lambda *_: torch.tensor([stopped.is_set()], device=model.device),
                    *stopping_criteria(reader.stop_strings),
                ],
            )
        except BaseException as error:
            failed.append(error)
            streamer.end()

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    try:
        yield from streamer if skips else _without_end(streamer, reader)
    finally:
        # Also if the reader stops early: the thread must end before the next answer.
        stopped.set()
        thread.join()
    if failed:
        raise RunError(f"the model failed: {failed[0]}", "a shorter conversation") from failed[0]


def _without_end(pieces: Iterator[str], reader: "CompletionReader") -> Iterator[str]:
    """Leave out the token that ends an answer, which a streamer writes if it keeps special tokens."""
    ends = {reader.tokenizer.decode([token]) for token in reader.end_ids}
    for piece in pieces:
        for end in ends:
            piece = piece.removesuffix(end)
        if piece:
            yield piece


def open_server(
    url: str, name: str | None, sampling: SamplingParams, *, is_text: bool = False
) -> ChatBackend:
    """Return a server with an OpenAI-compatible API at a URL such as `http://127.0.0.1:8000/v1`.

    Without a name it is the last model that it serves, which is the adapter if there is one. `is_text`: the model
    continues the last message as plain text. Raises `SetupError` if no such server answers.
    """
    try:
        import openai
    except ImportError:
        raise SetupError("the openai package is missing", install_extra("judge")) from None
    try:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        model = name or list(client.models.list())[-1].id
    except Exception as error:
        # A server of another kind makes openai fail in many ways.
        raise SetupError(
            f"{url} does not answer like an OpenAI-compatible server: {error}",
            "start one with `grpo serve`",
        ) from None

    options: dict[str, Any] = {
        "model": model,
        "stream": True,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
    }
    if sampling.stop_strings:
        options |= {"stop": list(sampling.stop_strings)}
        options["extra_body"] = {"include_stop_str_in_output": True}
    if not sampling.skip_special_tokens:
        options["extra_body"] = {**options.get("extra_body", {}), "skip_special_tokens": False}

    def stream(messages: Sequence[Message]) -> Iterator[str]:
        written = [{**each, "content": _for_server(each["content"])} for each in messages]
        try:
            if is_text:
                pieces = client.completions.create(prompt=written[-1]["content"], **options)
            else:
                pieces = client.chat.completions.create(messages=written, **options)
            for piece in pieces:
                choice = piece.choices[0] if piece.choices else None
                text = choice and (choice.text if is_text else choice.delta.content)
                if text:
                    yield text
        except Exception as error:
            raise RunError(f"{url}: {str(error).rstrip('.')}", "see the server's log") from None

    return stream
