"""What samples completions for an evaluation: transformers, or vLLM."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from grpo_cli.data.table import list_rows
from grpo_cli.environments.player import open_player, sample_episodes
from grpo_cli.eval.request import EvalRequest, Subject
from grpo_cli.fast.completions import Completion, Images, sample_completions
from grpo_cli.fast.completions import open_sampler as open_token_sampler
from grpo_cli.fast.decoding import find_prompt_ties
from grpo_cli.fast.tokens import all_eos_token_ids
from grpo_cli.machine import pick_device
from grpo_cli.models.loading import load_adapter, load_generation_config, load_model
from grpo_cli.models.processor import load_processing_class, tokenizer_of
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.models.vllm_engine import engine_settings
from grpo_cli.recipe.dataset import IMAGES

Sample = Callable[[Any, int], list[list[Completion]]]
"""Samples the rows of a dataset with a seed: the completions of each."""
_EPISODES = 256
"""Episodes that are played side by side with vLLM."""


@contextmanager
def open_sampler(request: EvalRequest, subject: Subject, device: Any) -> Iterator[Sample]:
    """Load a subject, and give the function that samples from it; two models may not fit in memory."""
    has_images = request.recipe.has_images
    processing_class = load_processing_class(subject.model, has_images=has_images)
    tokenizer = tokenizer_of(processing_class)
    if request.recipe.has_episodes:
        with _open_player(request, subject, processing_class, device) as play:
            yield play
        return
    generation = request.recipe.generation
    settings: dict[str, Any] = {
        "max_new_tokens": generation.max_completion_length,
        "temperature": request.temperature,
        "samples_per_prompt": request.samples,
        "chat_template_kwargs": request.recipe.setting("chat_template_kwargs"),
    }
    reading = generation.reading

    def find_images(rows: Any) -> Images | None:
        return Images(processing_class, rows[IMAGES]) if has_images else None

    if request.backend == "vllm":
        with _open_vllm(request, subject, tokenizer) as engine:
            yield lambda rows, seed: engine.sample(
                list(rows["prompt"]), seed=seed, images=find_images(rows), **settings
            )
        return
    settings["batch_size"] = request.batch_size
    settings["fast"] = request.recipe.training.fast
    model = load_subject(subject, tokenizer, device)

    def sample(rows: Any, seed: int) -> list[list[Completion]]:
        prompts, images = list(rows["prompt"]), find_images(rows)
        shared = {**settings, **reading, "images": images, "seed": seed}
        return sample_completions(model, tokenizer, prompts, **shared)

    yield sample


@contextmanager
def _open_player(
    request: EvalRequest, subject: Subject, processing_class: Any, device: Any
) -> Iterator[Sample]:
    """Load a subject, and yield the function that plays episodes with it."""
    recipe, size, tokenizer = request.recipe, request.batch_size, tokenizer_of(processing_class)
    stops = all_eos_token_ids(load_generation_config(subject.model), tokenizer)
    with ExitStack() as stack:
        # Before the model, which takes longer: a tool that is missing ends it at once.
        player = stack.enter_context(open_player(recipe, processing_class, stops=stops))
        if request.backend == "vllm":
            engine, size = stack.enter_context(_open_vllm(request, subject, tokenizer)), _EPISODES

            def open_draw(seed: int) -> Any:
                return nullcontext(engine.open_sampler(temperature=request.temperature, seed=seed))
        else:
            open_draw = partial(
                open_token_sampler,
                load_subject(subject, tokenizer, device),
                tokenizer,
                temperature=request.temperature,
                batch_size=size,
                fast=recipe.training.fast,
                stop_strings=recipe.generation.reading["stop_strings"],
                processor=processing_class,
            )

        def play(rows: Any, seed: int) -> list[list[Completion]]:
            with open_draw(seed=seed) as draw:
                return sample_episodes(
                    player,
                    list_rows(rows),
                    draw,
                    samples_per_prompt=request.samples,
                    batch_size=size,
                )

        yield play


def _open_vllm(request: EvalRequest, subject: Subject, tokenizer: Any) -> Any:
    """Return an engine of the subject's own: vLLM cannot change its weights without a trainer."""
    from grpo_cli.fast.vllm_completions import open_vllm

    recipe = request.recipe.model_copy(update={"model": subject.model})
    return open_vllm(
        model_folder_or_id(subject.model),
        tokenizer,
        stops=all_eos_token_ids(load_generation_config(subject.model), tokenizer),
        **recipe.generation.reading,
        adapter=subject.adapter,
        seed=request.seed,
        engine=engine_settings(recipe, pick_device(recipe.launch)),
    )


def load_subject(subject: Subject, tokenizer: Any, device: Any) -> Any:
    """Return a subject's model, with its adapter, on a device."""
    disable_progress_bar()
    config = subject.model
    model = load_model(config, tokenizer, device_is_cuda=device.type == "cuda")
    if config.quantization is None:
        model = model.to(device)
    if subject.adapter is None:
        return model
    adapted = load_adapter(model, Path(subject.adapter), config.path)
    exact = model.dtype == torch.float32 and config.quantization is None
    if exact and find_prompt_ties(adapted) is None:
        # Merged it samples faster. Coarser weights would be rounded, and are measured as they were trained.
        return adapted.merge_and_unload()
    return adapted
