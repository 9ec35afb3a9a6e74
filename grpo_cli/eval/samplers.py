"""What samples completions for an evaluation: transformers, or vLLM.

Owns loading each model once, and the adapters on top of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from grpo_cli.eval.request import EvalRequest, Subject
from grpo_cli.fast.completions import Completion, all_eos_token_ids, sample_completions
from grpo_cli.machine import pick_device
from grpo_cli.models.adapters import find_prompt_ties, load_adapter
from grpo_cli.models.loading import (
    load_generation_config,
    load_model,
    load_tokenizer,
)
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.models.vllm_engine import engine_settings
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
        from grpo_cli.fast.vllm_completions import open_vllm

        request = self._request
        tokenizer = load_tokenizer(subject.model)
        of_subject = request.recipe.model_copy(update={"model": subject.model})
        with open_vllm(
            model_folder_or_id(subject.model),
            tokenizer,
            stops=all_eos_token_ids(load_generation_config(subject.model), tokenizer),
            adapter=subject.adapter,
            seed=request.seed,
            engine=engine_settings(of_subject, pick_device(request.recipe.launch)),
        ) as engine:
            yield (
                tokenizer,
                lambda prompts, seed: engine.sample(prompts, seed=seed, **_settings(request)),
            )


class TransformersModels:
    """Models on one device, one at a time; a model that two subjects in turn share is loaded once."""

    def __init__(self, request: EvalRequest, device: torch.device) -> None:
        self._request = request
        self._device = device
        self._loaded: tuple[ModelConfig, Any, Any] | None = None
        disable_progress_bar()

    @contextmanager
    def open(self, subject: Subject) -> Iterator[tuple[Any, Sample]]:
        """A subject's tokenizer and the way to sample from it."""
        tokenizer, model = self._load(subject.model)
        if subject.adapter is None:
            yield tokenizer, self._sampler(tokenizer, model)
            return
        # Not every adapter can be taken off without a trace: the next subject gets a model of its own.
        self._loaded = None
        adapted = load_adapter(model, Path(subject.adapter), subject.model.path)
        whole = model.dtype == torch.float32 and subject.model.quantization is None
        if whole and find_prompt_ties(adapted) is None:
            # Merged it samples faster; coarser weights would be rounded by it, and are measured as they were
            # trained.
            adapted = adapted.merge_and_unload()
        yield tokenizer, self._sampler(tokenizer, adapted)

    def _load(self, config: ModelConfig) -> tuple[Any, Any]:
        if self._loaded is None or self._loaded[0] != config:
            # Let go of the last one first: two may not fit.
            self._loaded = None
            tokenizer = load_tokenizer(config)
            cuda = self._device.type == "cuda"
            model = load_model(config, tokenizer, device_is_cuda=cuda)
            if config.quantization is None:
                model = model.to(self._device)
            self._loaded = (config, tokenizer, model)
        return self._loaded[1], self._loaded[2]

    def _sampler(self, tokenizer: Any, model: Any) -> Sample:
        request = self._request
        return lambda prompts, seed: sample_completions(
            model,
            tokenizer,
            prompts,
            batch_size=request.batch_size,
            seed=seed,
            fast=request.recipe.training.fast.sampling,
            **_settings(request),
        )


def _settings(request: EvalRequest) -> dict[str, Any]:
    """How completions are sampled, as both samplers take it."""
    generation = request.recipe.generation
    return {
        "max_new_tokens": generation.max_completion_length,
        "temperature": request.temperature,
        "samples_per_prompt": request.samples,
        "chat_template_kwargs": generation.extras.get("chat_template_kwargs"),
    }
