"""Completions sampled outside of training the way `GRPOTrainer` samples them.

Leaves the model and the random state as it found them.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from transformers import GenerationConfig, StoppingCriteriaList

from grpo_cli.data.images import fill_images
from grpo_cli.errors import RunError
from grpo_cli.fast.decoding import (
    Decoding,
    decode,
    pad_prompts,
    read_decoding,
    unsupported_reason,
    without_wrapper,
)
from grpo_cli.fast.tokens import (
    CompletionReader,
    Prompt,
    StopStrings,
    all_eos_token_ids,
    build_reader,
    declared_eos_token_ids,
    encode_prompt,
    encode_unexpanded,
)
from grpo_cli.models.processor import encode_images
from grpo_cli.recipe.training import FastConfig

_FAST = FastConfig()


class Images(NamedTuple):
    """The images of prompts, and what a model reads them by."""

    processor: Any
    """Of transformers, a `ProcessorMixin`."""
    of_prompts: Sequence[Sequence[Any]]
    """For each prompt its `PIL.Image.Image`s; read when they are needed."""


@dataclass(frozen=True)
class Completion:
    """One sampled answer."""

    text: str
    """The answer, as `generation.skip_special_tokens` asks for it."""
    token_ids: tuple[int, ...]
    """Its tokens, with the end-of-sequence token if there is one."""
    clipped: bool
    """Whether it was cut off at `max_new_tokens`."""
    prompt: list[dict[str, Any]] | None = None
    """The prompt of an episode, with what the environment added; None if there was no episode."""
    messages: tuple[dict[str, Any], ...] = ()
    """All messages of an episode after its prompt; empty if the answer is the only one."""
    episode: dict[str, Any] | None = None
    """The record of an episode; None if there was none."""
    sequence: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None
    """Tokens of an episode's prompt and of all that followed, results included, and 1 at the model's own among
    the latter; None if there was none."""
    images: tuple[Any, ...] | None = None
    """The images of an episode, in their order; None if there was none, or the model reads no images."""


def sample_completions(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float,
    samples_per_prompt: int = 1,
    batch_size: int = 32,
    seed: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    stop_strings: Collection[str] = (),
    skip_special_tokens: bool = True,
    fast: FastConfig = _FAST,
    generate: Callable[..., list[list[int]]] | None = None,
    images: Images | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[Completion]]:
    """Sample completions for each prompt, in the order of `prompts`.

    The longest prompts go first, so that memory runs out at once or never. Completions at a temperature above 0
    depend on `seed`, and on `batch_size` too.

    Args:
        temperature: 0 is greedy decoding; the samples of a prompt are then all the same.
        seed: None continues from the current random state.
        options: More of transformers' sampling settings, such as `top_p`; not read by greedy decoding.
        stop_strings: Texts that end a completion; with `skip_special_tokens`, texts lack all special tokens.
        fast: Whether to sample by `decoding.py` or `graph_decoding.py` if they can, not by plain `generate()`.
        generate: Samples a batch instead, from token ids; samples of a prompt are adjacent. With `images`, it also
            gets those of each prompt, and the token ids are of `encode_unexpanded`.
        images: Of the prompts, if they may have some; they are then sampled in their order, by `generate()`.
        on_progress: Called after each batch with the completions done and their total.

    Raises:
        RecipeError: Prompts are messages, and the tokenizer has no chat template.
        RunError: A prompt has no tokens.
    """
    config = _generation_config(model, tokenizer, max_new_tokens, temperature, options or {})
    ends = declared_eos_token_ids(config)
    reader = build_reader(
        tokenizer, ends, stop_strings=stop_strings, skip_special_tokens=skip_special_tokens
    )
    stops = reader.stop_strings
    sample: Callable[[Any], Any]
    if images is None:
        encoded, order = _encode_prompts(tokenizer, prompts, chat_template_kwargs)
        sample = generate or _pick_sampler(model, config, fast, stops)
    else:
        encoded = order = [*range(len(prompts))]
        about = prompts, images, chat_template_kwargs
        sample = _pick_image_sampler(model, config, stops, generate, *about)
    distinct = samples_per_prompt if temperature > 0 else 1
    queue = [index for index in order for _ in range(distinct)]
    results: list[list[Completion]] = [[] for _ in prompts]
    with torch.no_grad(), sampling_state(model, config, seed):
        for index, row in _in_batches(sample, encoded, queue, batch_size, on_progress):
            results[index].append(_as_completion(reader, row, () if images else encoded[index]))
    return [samples * (samples_per_prompt // distinct) for samples in results]


def _in_batches(
    sample: Callable[[Any], Any],
    encoded: Sequence[Any],
    queue: Sequence[int],
    batch_size: int,
    on_progress: Callable[[int, int], None],
) -> Iterator[tuple[int, Any]]:
    """Yield the number of each prompt in a queue with its sampled tokens."""
    for start in range(0, len(queue), batch_size):
        batch = queue[start : start + batch_size]
        yield from zip(batch, sample([encoded[index] for index in batch]), strict=True)
        on_progress(start + len(batch), len(queue))


def _encode_prompts(
    tokenizer: Any, prompts: Sequence[Prompt], kwargs: dict[str, Any] | None
) -> tuple[list[Any], list[int]]:
    """Return the tokens of prompts, and their places with the longest first."""
    encoded = [encode_prompt(tokenizer, prompt, kwargs) for prompt in prompts]
    if not all(encoded):
        raise RunError("a prompt has no tokens", "remove empty prompts from the data")
    return encoded, sorted(range(len(encoded)), key=lambda place: -len(encoded[place]))


@contextlib.contextmanager
def open_sampler(
    model: Any,
    tokenizer: Any,
    *,
    temperature: float,
    batch_size: int = 32,
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
    stop_strings: Collection[str] = (),
    fast: FastConfig = _FAST,
    processor: Any = None,
) -> Iterator[Callable[..., list[list[int]]]]:
    """Yield a function that samples answers to prompts of token ids, each of at most `max_new_tokens` tokens.

    Arguments as for `sample_completions`. With a `processor` the function takes the `images` of each prompt too.
    An answer ends where a completion does: with an end token or a stop string, if there is one.
    """
    longest = _generation_config(model, tokenizer, 1, temperature, options or {})
    ends = declared_eos_token_ids(longest)
    reader = build_reader(tokenizer, ends, stop_strings=stop_strings)

    def sample(
        prompt_ids: list[list[int]], most: int, images: Sequence[Sequence[Any]] | None = None
    ) -> list[list[int]]:
        config = _generation_config(model, tokenizer, most, temperature, options or {})
        if images is not None:
            config.suppress_tokens = [model.config.image_token_id]
        without_wrapper(model).generation_config = config
        draw = _pick_sampler(model, config, fast, reader.stop_strings)
        rows: list[list[int]] = []
        for start in range(0, len(prompt_ids), batch_size):
            part = slice(start, start + batch_size)
            if images is None:
                rows += draw(prompt_ids[part])
            else:
                fields = encode_images(processor, images[part], prompt_ids[part])
                rows += _generate(model, prompt_ids[part], config, reader.stop_strings, fields)
        return [reader.cut(row, ids) for row, ids in zip(rows, prompt_ids, strict=True)]

    with torch.no_grad(), sampling_state(model, longest, seed):
        yield sample


def check_context(tokens: int, config: Any) -> None:
    """Check that a prompt with its answer, `tokens` tokens, fits the model's context.

    Raises:
        RunError: It does not.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and tokens > context:
        raise RunError(
            f"a prompt and its answer have {tokens} tokens together, and the model reads {context}",
            "lower `generation.max_completion_length`, or `dataset.max_prompt_length`, which leaves rows out",
        )


def _as_completion(
    reader: CompletionReader, row: Sequence[int], prompt_ids: Sequence[int]
) -> Completion:
    """Cut a generated row of tokens where the completion ends."""
    tokens = reader.cut(row, prompt_ids)
    is_complete = reader.is_complete(tokens, prompt_ids)
    return Completion(reader.decode(tokens), tuple(tokens), clipped=not is_complete)


def _generation_config(
    model: Any,
    tokenizer: Any,
    max_new_tokens: int,
    temperature: float,
    options: Mapping[str, Any],
) -> GenerationConfig:
    """Settings for plain sampling, without the model's own (top-p, penalties)."""
    # Greedy decoding must not even mention `temperature` and `top_k`: transformers would warn.
    plain = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    sampling = {**plain, **options} if temperature > 0 else {}
    fixed = {
        "max_new_tokens": max_new_tokens,
        "do_sample": temperature > 0,
        "eos_token_id": all_eos_token_ids(model.generation_config, tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": True,
        "disable_compile": True,
    }
    return GenerationConfig(**{**fixed, **sampling})


def _find_decoding(
    model: Any, config: GenerationConfig, stops: StopStrings | None
) -> Decoding | None:
    """Settings of `decode`; None if the model or a setting needs plain `generate()`."""
    return None if unsupported_reason(model) else read_decoding(config, config, stops)


def _pick_sampler(
    model: Any, config: GenerationConfig, fast: FastConfig, stops: StopStrings | None
) -> Callable[[list[list[int]]], list[list[int]]]:
    decoding = _find_decoding(model, config, stops) if fast.sampling else None
    if decoding is None:
        return lambda ids: _generate(model, ids, config, stops)
    bare = without_wrapper(model)
    sample = decode
    if fast.cuda_graphs:
        from grpo_cli.fast.graph_decoding import decode_with_graphs, graph_unsupported_reason

        if graph_unsupported_reason(model) is None:
            sample = decode_with_graphs
    return lambda ids: sample(bare, ids, decoding, entropies=False).completion_ids


@contextlib.contextmanager
def sampling_state(model: Any, config: GenerationConfig | None, seed: int | None) -> Iterator[None]:
    """Evaluation mode, `config` (if any) as the model's own, and a random state of our own; all are restored.

    `generate` fills what a configuration leaves open from the model's own (transformers issue 42762), so ours
    takes its place.
    """
    owner = without_wrapper(model)
    own_config = owner.generation_config
    modes = [(module, module.training) for module in model.modules()]
    cuda = [model.device] if model.device.type == "cuda" else []
    # On a GPU, an engine of vLLM in this process draws from it (0.31, `v1/worker/gpu/sample/states.py`).
    numpy_state = numpy.random.get_state()
    with torch.random.fork_rng(devices=cuda):
        try:
            owner.generation_config = config or own_config
            model.eval()
            if seed is not None:
                numpy.random.seed(seed % 2**32)
                # Not `torch.manual_seed`: states of other devices would not be restored.
                torch.random.default_generator.manual_seed(seed)
                for device in cuda:
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(seed)
            yield
        finally:
            numpy.random.set_state(numpy_state)
            owner.generation_config = own_config
            for module, training in modes:
                module.training = training


def _pick_image_sampler(
    model: Any,
    config: GenerationConfig,
    stops: StopStrings | None,
    generate: Callable[..., list[list[int]]] | None,
    *about: Any,
) -> Callable[[list[int]], list[list[int]]]:
    """Return what samples completions of prompts with images; `about` are the last arguments of both."""
    if generate is not None:
        return _generate_from_images(generate, *about)
    return _sample_from_images(model, config, stops, *about)


def _sample_from_images(
    model: Any,
    config: GenerationConfig,
    stops: StopStrings | None,
    prompts: Sequence[Any],
    images: Images,
    chat_template_kwargs: dict[str, Any] | None,
) -> Callable[[list[int]], list[list[int]]]:
    """Return a function that samples a completion for each of some prompts, which it takes by number.

    Source: trl 1.16, `GRPOTrainer._tokenize_prompts` and `_generate_single_turn`.
    """
    # As TRL: the model would look for an image where it sampled its token.
    config.suppress_tokens = [model.config.image_token_id]
    options = {"add_generation_prompt": True, **(chat_template_kwargs or {})}

    def sample(numbers: list[int]) -> list[list[int]]:
        inputs = images.processor.apply_chat_template(
            [fill_images(prompts[number], images.of_prompts[number]) for number in numbers],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
            **options,
        ).to(model.device)
        output = model.generate(
            **inputs, generation_config=config, stopping_criteria=stopping_criteria(stops)
        )
        return list(output[:, inputs["input_ids"].shape[1] :].tolist())

    return sample


def _generate_from_images(
    generate: Callable[..., list[list[int]]],
    prompts: Sequence[Any],
    images: Images,
    chat_template_kwargs: dict[str, Any] | None,
) -> Callable[[list[int]], list[list[int]]]:
    """Return the same as `_sample_from_images`, with a function that samples a batch."""

    def sample(numbers: list[int]) -> list[list[int]]:
        encoded = [
            encode_unexpanded(images.processor, prompts[number], chat_template_kwargs)
            for number in numbers
        ]
        return generate(encoded, [images.of_prompts[number] for number in numbers])

    return sample


def stopping_criteria(stops: StopStrings | None) -> StoppingCriteriaList:
    """Return what `generate()` takes to end completions at stop strings."""
    return StoppingCriteriaList([] if stops is None else [stops])


def _generate(
    model: Any,
    prompts: list[list[int]],
    config: GenerationConfig,
    stops: StopStrings | None,
    fields: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Return the tokens that plain `generate()` appends to each prompt; after the end there may be padding.

    `fields` are those of the prompts' images, as `encode_images` returns them.
    """
    longest, device = max(map(len, prompts)), model.device
    ids, mask = pad_prompts(prompts, longest, config.pad_token_id, device)
    more = {
        name: value.to(device)
        if isinstance(value, torch.Tensor)
        else pad_prompts(value, longest, 0, device)[0]
        for name, value in (fields or {}).items()
        if name != "num_tiles"
    }
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        **more,
        generation_config=config,
        stopping_criteria=stopping_criteria(stops),
    )
    return output[:, longest:].tolist()
