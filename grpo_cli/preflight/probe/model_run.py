"""The real model at work: completions sampled with the recipe's own settings, then one training step.

Owns the order, the batches and what becomes of a device that runs out of memory.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from grpo_cli.errors import RunError
from grpo_cli.models.loading import load_model
from grpo_cli.models.sampling import Completion, encode_prompt, sample_completions
from grpo_cli.preflight.probe.rehearsal import Rehearsal, rehearse
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.units import format_duration

_NARROWING = ("top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Outcome:
    """What a model wrote, and how long it took."""

    sampled: list[list[Completion]]
    sample_s: float
    """Seconds a completion, in batches."""
    rehearsal: Rehearsal | None


def run_model(
    recipe: Recipe,
    tokenizer: Any,
    prompts: Sequence[Any],
    *,
    batch_size: int,
    rehearse_step: bool,
    tell: Callable[[str], None],
) -> Outcome:
    """Samples a group for each prompt, and takes one training step where that is wanted.

    Args:
        recipe: The recipe.
        tokenizer: Its tokenizer.
        prompts: Texts or lists of messages.
        batch_size: Completions sampled at a time.
        rehearse_step: Whether to take the step.
        tell: Told what is being done.

    Raises:
        RunError: The device runs out of memory.
        GrpoError: The model cannot be loaded.
    """
    tell("loading the model")
    disable_progress_bar()
    cuda = torch.cuda.is_available() and not recipe.launch.use_cpu
    model = load_model(recipe.model, tokenizer, device_is_cuda=cuda)
    if recipe.model.quantization is None:
        model = model.to("cuda" if cuda else "cpu")
    started = time.perf_counter()
    with _explain_memory("sampling", recipe):
        sampled = _sample(recipe, model, tokenizer, prompts, batch_size, tell)
    spent = time.perf_counter() - started
    done = None
    if rehearse_step:
        tell("taking one training step")
        kwargs = recipe.generation.extras.get("chat_template_kwargs")
        sequences = [
            (encode_prompt(tokenizer, prompt, kwargs), completion.token_ids)
            for prompt, group in zip(prompts, sampled, strict=True)
            for completion in group
        ]
        with _explain_memory("a training step", recipe):
            done = rehearse(recipe, model, tokenizer.pad_token_id, sequences)
    return Outcome(sampled, spent / sum(map(len, sampled)), done)


def _sample(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    batch_size: int,
    tell: Callable[[str], None],
) -> list[list[Completion]]:
    generation, started = recipe.generation, time.perf_counter()

    def report(done: int, total: int) -> None:
        left = (time.perf_counter() - started) * (total - done) / done
        more = f", about {format_duration(left)} left" if done < total else ""
        tell(f"sampling: {done} of {total} completions{more}")

    options = {
        name: value for name in _NARROWING if (value := getattr(generation, name)) is not None
    }
    return sample_completions(
        model,
        tokenizer,
        prompts,
        max_new_tokens=generation.max_completion_length,
        temperature=generation.temperature,
        samples_per_prompt=generation.num_generations,
        batch_size=batch_size,
        seed=recipe.seed,
        chat_template_kwargs=generation.extras.get("chat_template_kwargs"),
        options={**options, **generation.extras.get("generation_kwargs", {})},
        on_progress=report,
    )


@contextmanager
def _explain_memory(what: str, recipe: Recipe) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        sentence = str(error).split(". ")[0]
        raise RunError(
            f"{what} ran out of memory with per_device_train_batch_size "
            f"{recipe.training.per_device_train_batch_size}: {sentence}. Fix: lower it and raise "
            "gradient_accumulation_steps, or see what needs most under `cost`"
        ) from error
