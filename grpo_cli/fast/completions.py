"""Samples completions outside of training, the way `GRPOTrainer` samples them.

Owns prompts as tokens, and generation in batches with transformers: by `decoding.py`, or by `generate()` alone
where the model or a setting asks for it. Does not score anything, and leaves the model and the random state as it
found them.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from grpo_cli.errors import Problem, RecipeError, RunError
from grpo_cli.fast.decoding import decode, unsupported_reason
from grpo_cli.fast.token_sampling import Decoding, read_decoding
from grpo_cli.models.adapters import find_prompt_ties, without_wrapper

Prompt = str | list[dict[str, Any]]
"""Plain text, or messages with `role` and `content`."""


@dataclass(frozen=True)
class Completion:
    """One sampled answer."""

    text: str
    """The answer without special tokens."""
    token_ids: tuple[int, ...]
    """Its tokens, with the end-of-sequence token where there is one."""
    clipped: bool
    """Whether it was cut off at `max_new_tokens`."""


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
    fast: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[list[Completion]]:
    """Samples completions for each prompt.

    The longest prompts go first, so that memory runs out at once or never. Completions at a
    temperature above 0 depend on `seed`, and on `batch_size` too.

    Args:
        model: A causal language model of transformers, with or without peft's adapters.
        tokenizer: Its tokenizer, with a pad token.
        prompts: Texts or lists of messages.
        max_new_tokens: Longest completion, in tokens.
        temperature: 0 is greedy decoding; the samples of a prompt are then all the same.
        samples_per_prompt: Completions for each prompt.
        batch_size: Completions generated at a time.
        seed: Seed of the sampling; None goes on from the current random state.
        chat_template_kwargs: More variables for the chat template.
        options: More of transformers' sampling settings, such as `top_p`; not read by greedy decoding.
        fast: Whether to sample by `decoding.py` where it can; else by `generate()` alone.
        on_progress: Called after each batch with the completions done and those to do.

    Returns:
        `samples_per_prompt` completions for each prompt, in the order of `prompts`.

    Raises:
        RecipeError: Prompts are messages, and the tokenizer has no chat template.
        RunError: A prompt has no tokens.
    """
    encoded = [_encode_nonempty(tokenizer, prompt, chat_template_kwargs) for prompt in prompts]
    distinct = samples_per_prompt if temperature > 0 else 1
    order = sorted(range(len(encoded)), key=lambda index: -len(encoded[index]))
    queue = [index for index in order for _ in range(distinct)]
    results: list[list[Completion]] = [[] for _ in prompts]
    config = _generation_config(model, tokenizer, max_new_tokens, temperature, options or {})
    ends = declared_eos_token_ids(config)
    sample = _decode if fast else _generate
    with torch.no_grad(), _sampling_state(model, config, seed):
        for start in range(0, len(queue), batch_size):
            batch = queue[start : start + batch_size]
            rows = sample(model, tokenizer, [encoded[index] for index in batch], config)
            for index, row in zip(batch, rows, strict=True):
                results[index].append(as_completion(tokenizer, row, ends))
            if on_progress is not None:
                on_progress(start + len(batch), len(queue))
    return [found * (samples_per_prompt // distinct) for found in results]


def reads_prompts_once(
    model: Any, tokenizer: Any, *, options: Mapping[str, Any] | None = None
) -> bool:
    """Whether `sample_completions` reads a prompt once for all of its samples in a batch, unless told not to.

    Args:
        model: As there.
        tokenizer: As there.
        options: As there.
    """
    config = _generation_config(model, tokenizer, 1, 1.0, options or {})
    return _find_decoding(model, config) is not None


def encode_prompt(
    tokenizer: Any, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """The tokens of a prompt, as `GRPOTrainer` makes them.

    Source: trl 1.16, `GRPOTrainer._tokenize_prompts`.

    Raises:
        RecipeError: The prompt is a list of messages, and the tokenizer has no chat template, or one that
            refuses them.
    """
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    if tokenizer.chat_template is None:
        problem = Problem(
            "the prompts are messages, and the tokenizer has no chat template",
            "set `model.chat_template`, or write `dataset.prompt` as one plain text",
            "model.chat_template",
        )
        raise RecipeError([problem])
    options = {"add_generation_prompt": True, **(chat_template_kwargs or {})}
    encoded = apply_template(tokenizer, prompt, tokenize=True, return_dict=True, **options)
    return list(encoded["input_ids"])


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
        raise RecipeError([Problem(message, fix, path)]) from error


def _accepts(tokenizer: Any, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> bool:
    try:
        tokenizer.apply_chat_template(messages, **options)
    except Exception:  # as above
        return False
    return True


def encode_response(tokenizer: Any, text: str, max_length: int) -> list[int]:
    """The tokens of an answer as the model would have sampled it.

    Args:
        tokenizer: The model's.
        text: The answer.
        max_length: Longest answer, in tokens; a longer one is cut there, and then has no end.

    Returns:
        Its token ids, with the end-of-sequence token; at most `max_length`.
    """
    ids = tokenizer(text=text, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id][:max_length]


def count_prompt_tokens(
    tokenizer: Any, prompt: Prompt, chat_template_kwargs: dict[str, Any] | None = None
) -> int:
    """How many tokens the model reads before it answers `prompt`."""
    return len(encode_prompt(tokenizer, prompt, chat_template_kwargs))


def all_eos_token_ids(config: GenerationConfig, tokenizer: Any) -> list[int]:
    """Every token that ends a completion: the tokenizer's, and those the model declares.

    Args:
        config: The model's own generation settings.
        tokenizer: Its tokenizer.

    Source: trl 1.16, `GRPOTrainer.__init__`, `self.eos_token_ids`.
    """
    ids = dict.fromkeys([tokenizer.eos_token_id, *declared_eos_token_ids(config)])
    return [token for token in ids if token is not None]


def declared_eos_token_ids(config: GenerationConfig) -> list[int]:
    """The end-of-sequence tokens that a model's generation settings name: none, one or several."""
    declared = config.eos_token_id
    if declared is None:
        return []
    return declared if isinstance(declared, list) else [declared]


def _encode_nonempty(tokenizer: Any, prompt: Prompt, kwargs: dict[str, Any] | None) -> list[int]:
    encoded = encode_prompt(tokenizer, prompt, kwargs)
    if not encoded:
        raise RunError("a prompt has no tokens. Fix: remove empty prompts from the data")
    return encoded


def _generation_config(
    model: Any,
    tokenizer: Any,
    max_new_tokens: int,
    temperature: float,
    options: Mapping[str, Any],
) -> GenerationConfig:
    """Settings for plain sampling; nothing of the model's own (top-p, penalties) gets in."""
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


@contextlib.contextmanager
def _sampling_state(model: Any, config: GenerationConfig, seed: int | None) -> Iterator[None]:
    """Evaluation mode, `config` as the model's own, and random numbers of our own; all put back.

    `generate` fills what a configuration leaves open from the model's own (transformers issue
    42762), so ours takes its place for the while.
    """
    owner = without_wrapper(model)
    own_config = owner.generation_config
    modes = [(module, module.training) for module in model.modules()]
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        try:
            owner.generation_config = config
            model.eval()
            _seed(seed, cuda)
            yield
        finally:
            owner.generation_config = own_config
            for module, training in modes:
                module.training = training


def _seed(seed: int | None, cuda: list[torch.device]) -> None:
    """Seeds the CPU and the model's own device; other devices would not be put back."""
    if seed is None:
        return
    torch.random.default_generator.manual_seed(seed)
    for device in cuda:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _decode(
    model: Any, tokenizer: Any, prompts: list[list[int]], config: GenerationConfig
) -> list[list[int]]:
    """As `_generate`, with less work where model and settings allow it."""
    decoding = _find_decoding(model, config)
    if decoding is None:
        return _generate(model, tokenizer, prompts, config)
    return decode(without_wrapper(model), prompts, decoding, entropies=False).completion_ids


def _find_decoding(model: Any, config: GenerationConfig) -> Decoding | None:
    """What `decode` samples by; None where model or settings are not for it."""
    if unsupported_reason(without_wrapper(model)) or find_prompt_ties(model):
        return None
    return read_decoding(config, config)


def _generate(
    model: Any, tokenizer: Any, prompts: list[list[int]], config: GenerationConfig
) -> list[list[int]]:
    """The tokens that the model appends to each prompt; behind the end there may be padding."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), config.pad_token_id)  # [sequences, tokens] int64
    mask = torch.zeros_like(ids)  # [sequences, tokens] int64, 1 at the prompt's tokens
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    output = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=config,
        # `stop_strings` cannot be looked for without it.
        tokenizer=tokenizer if config.stop_strings else None,
    )
    return output[:, longest:].tolist()


def as_completion(tokenizer: Any, row: list[int], eos: list[int]) -> Completion:
    """Cut a generated row of tokens after the first one that ends a completion."""
    end = next((place for place, token in enumerate(row) if token in eos), None)
    tokens = row if end is None else row[: end + 1]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return Completion(text, tuple(tokens), clipped=end is None)
