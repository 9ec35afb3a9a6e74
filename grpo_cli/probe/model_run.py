"""The real model at work: completions sampled with the recipe's own settings, then one training step.

Owns the order, the batches and what becomes of a device that runs out of memory.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from grpo_cli.checks.fast import settle_fast
from grpo_cli.errors import GrpoError, RunError
from grpo_cli.fast.batch_dependence import has_dropout
from grpo_cli.fast.completions import (
    Completion,
    all_eos_token_ids,
    encode_prompt,
    reads_prompts_once,
    sample_completions,
)
from grpo_cli.machine import pick_device
from grpo_cli.models.loading import load_generation_config, load_model
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.models.vllm_engine import engine_settings
from grpo_cli.probe.step_timing import StepTiming, prepare, time_step
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.units import format_duration

_WARM_UP = {"max_new_tokens": 2, "samples_per_prompt": 2}
_NARROWING = ("top_p", "top_k", "min_p", "repetition_penalty")


class _Watch:
    """Takes the time of sampling, and tells how much is left."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._started = time.perf_counter()
        self.seconds = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Hears how many completions are done; 0 starts the watch anew."""
        if not done:
            self._started = time.perf_counter()
        self.seconds = time.perf_counter() - self._started
        left = self.seconds * (total - done) / done if done else 0.0
        more = f", about {format_duration(left)} left" if left else ""
        self._tell(f"sampling: {done} of {total} completions{more}")


@dataclass(frozen=True)
class _Reading:
    """Seconds of reading prompts that a completion takes beyond its share in the probe's batches."""

    trained: float = 0.0
    measured: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What a model wrote, and how long it took."""

    sampled: list[list[Completion]]
    sample_s: float
    """Seconds a completion, as training samples it."""
    measure_s: float
    """Seconds a completion, as measuring before and after training samples it; as `sample_s` with vLLM."""
    timing: StepTiming | None


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
    disable_progress_bar()
    model = None
    if recipe.generation.backend != "vllm":
        tell("loading the model")
        with _explained("loading the model", recipe):
            model = _load(recipe, tokenizer)
    watch = _Watch(tell)
    with _explained("sampling", recipe):
        if model is None:
            tell("starting vLLM")
            sampled = _sample_with_vllm(recipe, tokenizer, prompts, watch)
        else:
            sampled = _sample_with_transformers(
                recipe, model, tokenizer, prompts, batch_size, watch
            )
    done, reading = None, _Reading()
    if rehearse_step:
        if model is not None:
            tell("timing the reading of prompts")
            with _explained("reading prompts", recipe):
                reading = _time_reading(recipe, model, tokenizer, prompts, batch_size)
        tell("taking one training step")
        kwargs = recipe.generation.extras.get("chat_template_kwargs")
        sequences = [
            (encode_prompt(tokenizer, prompt, kwargs), completion.token_ids)
            for prompt, group in zip(prompts, sampled, strict=True)
            for completion in group
        ]
        with _explained("a training step", recipe):
            model = model or _load(recipe, tokenizer)
            done = time_step(recipe, model, tokenizer.pad_token_id, sequences)
    each = watch.seconds / sum(map(len, sampled))
    return Outcome(sampled, each + reading.trained, each + reading.measured, done)


def _load(recipe: Recipe, tokenizer: Any) -> Any:
    device = pick_device(recipe.launch)
    model = load_model(recipe.model, tokenizer, device_is_cuda=device == "cuda")
    placed = model if recipe.model.quantization is not None else model.to(device)
    return prepare(recipe, placed)


def _sample_with_transformers(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    batch_size: int,
    watch: "_Watch",
) -> list[list[Completion]]:
    settings = {**_settings(recipe), "fast": settle_fast(recipe).sampling}
    # The first call makes ready what the others use.
    sample_completions(model, tokenizer, prompts[:1], **{**settings, **_WARM_UP})
    watch(0, recipe.generation.num_generations * len(prompts))
    return sample_completions(
        model, tokenizer, prompts, batch_size=batch_size, on_progress=watch, **settings
    )


def _time_reading(
    recipe: Recipe, model: Any, tokenizer: Any, prompts: Sequence[Any], batch_size: int
) -> _Reading:
    """Reads prompts alone, as many at a time as sampling has read; nothing where each completion reads its own."""
    settings = _settings(recipe)
    options = settings["options"]
    if not settle_fast(recipe).sampling or not reads_prompts_once(
        model, tokenizer, options=options
    ):
        return _Reading()
    sharing = min(recipe.generation.num_generations, batch_size)
    alone = {**settings, "max_new_tokens": 1, "samples_per_prompt": 1}
    began = time.perf_counter()
    sample_completions(model, tokenizer, prompts, batch_size=max(batch_size // sharing, 1), **alone)
    read_s = (time.perf_counter() - began) / len(prompts)
    evaluation = recipe.evaluation
    # Greedy completions of a prompt are all the same, and sampled once.
    samples = evaluation.samples_per_prompt if evaluation.temperature else 1
    measured = 1 / min(samples, evaluation.batch_size) - 1 / sharing
    # With dropout training reads each by itself.
    trained = 1 - 1 / sharing if has_dropout(model) else 0.0
    return _Reading(read_s * trained, read_s * measured)


def _sample_with_vllm(
    recipe: Recipe, tokenizer: Any, prompts: Sequence[Any], watch: "_Watch"
) -> list[list[Completion]]:
    """With an engine of the recipe's settings; in server mode too, since it ends with the probe."""
    from grpo_cli.fast.vllm_completions import open_vllm

    total = recipe.generation.num_generations * len(prompts)
    with open_vllm(
        model_folder_or_id(recipe.model),
        tokenizer,
        stops=all_eos_token_ids(load_generation_config(recipe.model), tokenizer),
        seed=recipe.seed,
        engine=engine_settings(recipe, pick_device(recipe.launch)),
    ) as engine:
        watch(0, total)
        sampled = engine.sample(prompts, **_settings(recipe))
        watch(total, total)
    return sampled


def _settings(recipe: Recipe) -> dict[str, Any]:
    """How the recipe wants completions sampled, as both samplers take it."""
    generation = recipe.generation
    narrowed = {name: getattr(generation, name) for name in _NARROWING}
    given = {name: value for name, value in narrowed.items() if value is not None}
    return {
        "max_new_tokens": generation.max_completion_length,
        "temperature": generation.temperature,
        "samples_per_prompt": generation.num_generations,
        "seed": recipe.seed,
        "chat_template_kwargs": generation.extras.get("chat_template_kwargs"),
        "options": {**given, **generation.extras.get("generation_kwargs", {})},
    }


@contextmanager
def _explained(what: str, recipe: Recipe) -> Iterator[None]:
    try:
        yield
    except GrpoError:
        raise
    except torch.OutOfMemoryError as error:
        sentence = str(error).split(". ")[0]
        raise RunError(
            f"{what} ran out of memory with per_device_train_batch_size "
            f"{recipe.training.per_device_train_batch_size}: {sentence}. Fix: lower it and raise "
            "gradient_accumulation_steps, or see what needs most under `cost`"
        ) from error
    except Exception as error:
        if os.environ.get("GRPO_DEBUG") == "1":
            raise
        # What was found so far must not be lost with it.
        sentence = " ".join(str(error).split())[:300]
        raise RunError(
            f"{what} broke off: {type(error).__name__}: {sentence}. "
            "Fix: see the findings above; GRPO_DEBUG=1 shows the traceback"
        ) from error
