"""What samples completions for an evaluation: transformers, or vLLM.

Owns loading each model once, and the adapters on top of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import peft
import torch
from transformers.utils.logging import disable_progress_bar

from grpo_cli.eval.request import EvalRequest, Subject
from grpo_cli.models.loading import (
    declared_stops,
    load_model,
    load_tokenizer,
    model_folder_or_id,
)
from grpo_cli.models.sampling import Completion, sample_completions
from grpo_cli.preflight.settings import engine_settings
from grpo_cli.recipe.model import ModelConfig

Sample = Callable[[Sequence[Any], int], list[list[Completion]]]
"""Samples prompts with a seed: the completions of each."""


class VllmModels:
    """An engine for each subject: vLLM cannot change its weights without a trainer."""

    def __init__(self, request: EvalRequest) -> None:
        self._request = request

    @contextmanager
    def open(self, subject: Subject) -> Iterator[tuple[Any, Sample]]:
        """A subject's tokenizer and the way to sample from it."""
        from grpo_cli.models.vllm_sampling import open_vllm

        request, generation = self._request, self._request.recipe.generation
        tokenizer = load_tokenizer(subject.model)
        of_subject = request.recipe.model_copy(update={"model": subject.model})
        with open_vllm(
            model_folder_or_id(subject.model),
            tokenizer,
            stops=declared_stops(subject.model, tokenizer),
            adapter=subject.adapter,
            seed=request.seed,
            engine=engine_settings(of_subject),
        ) as engine:

            def sample(prompts: Sequence[Any], seed: int) -> list[list[Completion]]:
                return engine.sample(
                    prompts,
                    max_new_tokens=generation.max_completion_length,
                    temperature=request.temperature,
                    samples_per_prompt=request.samples,
                    seed=seed,
                    chat_template_kwargs=generation.extras.get("chat_template_kwargs"),
                )

            yield tokenizer, sample


class TransformersModels:
    """Models on one device; the base that several subjects share is loaded once."""

    def __init__(self, request: EvalRequest, device: torch.device) -> None:
        self._request = request
        self._device = device
        self._loaded: tuple[ModelConfig, Any, Any] | None = None
        disable_progress_bar()

    @contextmanager
    def open(self, subject: Subject) -> Iterator[tuple[Any, Sample]]:
        """A subject's tokenizer and the way to sample from it."""
        tokenizer, model = self._load(subject.model)
        with _adapted(model, subject.adapter) as adapted:
            yield tokenizer, self._sampler(tokenizer, adapted)

    def _load(self, config: ModelConfig) -> tuple[Any, Any]:
        plain = config.model_copy(update={"lora": None})
        if self._loaded is None or self._loaded[0] != plain:
            # Let go of the last one first: two may not fit.
            self._loaded = None
            tokenizer = load_tokenizer(plain)
            cuda = self._device.type == "cuda"
            model = load_model(plain, tokenizer, device_is_cuda=cuda)
            if plain.quantization is None:
                model = model.to(self._device)
            self._loaded = (plain, tokenizer, model)
        return self._loaded[1], self._loaded[2]

    def _sampler(self, tokenizer: Any, model: Any) -> Sample:
        request, generation = self._request, self._request.recipe.generation

        def sample(prompts: Sequence[Any], seed: int) -> list[list[Completion]]:
            return sample_completions(
                model,
                tokenizer,
                prompts,
                max_new_tokens=generation.max_completion_length,
                temperature=request.temperature,
                samples_per_prompt=request.samples,
                batch_size=request.chunk_size * request.samples,
                seed=seed,
                chat_template_kwargs=generation.extras.get("chat_template_kwargs"),
            )

        return sample


@contextmanager
def _adapted(model: Any, adapter: str | None) -> Iterator[Any]:
    """The model with an adapter on it, which is taken off again."""
    if adapter is None:
        yield model
        return
    adapted = peft.PeftModel.from_pretrained(model, adapter)
    try:
        yield adapted
    finally:
        adapted.unload()
