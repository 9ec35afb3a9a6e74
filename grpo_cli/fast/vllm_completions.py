"""Samples completions with vLLM outside of training, from the same tokens and settings as `completions.py`.

Source: vLLM 0.31, `LLM`, `LoRARequest` and `SamplingParams`; trl 1.16, `VLLMGeneration` (its settings).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from grpo_cli.fast.completions import Completion, Images
from grpo_cli.fast.tokens import (
    CompletionReader,
    Prompt,
    build_reader,
    encode_prompt,
    encode_unexpanded,
)
from grpo_cli.models.processor import ban_image_token
from grpo_cli.models.vllm_engine import read_vllm_rank
from grpo_cli.recipe.generation import stop_params

_OPTIONS = ("top_p", "top_k", "min_p", "repetition_penalty")
_APART = 1_000_003
"""Between the seeds of two calls of one sampler: more than prompts of one call."""


class VllmSampler:
    """A running engine; an adapter is passed to vLLM with each request, not merged."""

    def __init__(self, llm: LLM, reader: CompletionReader, adapter: str | None) -> None:
        self._llm = llm
        self._reader = reader
        stops = reader.stop_strings
        self._ends = {"stop_token_ids": [*reader.end_ids]}
        self._ends |= stop_params(stops.strings if stops else ())
        self._adapter = None if adapter is None else LoRARequest("adapter", 1, adapter)

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        temperature: float,
        samples_per_prompt: int = 1,
        seed: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        images: Images | None = None,
    ) -> list[list[Completion]]:
        """Sample completions for each prompt; arguments and result as for `sample_completions`.

        Each prompt has its own seed, so that its completions do not depend on the other prompts.
        """
        distinct = samples_per_prompt if temperature > 0 else 1
        params: dict[str, Any] = {"n": distinct, "max_tokens": max_new_tokens}
        params["temperature"] = temperature
        if images is None:
            encoded = [
                {
                    "prompt_token_ids": encode_prompt(
                        self._reader.tokenizer, prompt, chat_template_kwargs
                    )
                }
                for prompt in prompts
            ]
        else:
            encoded = _encode_with_images(prompts, images, chat_template_kwargs)
            params["logit_bias"] = ban_image_token(images.processor)
        answers = self._generate(encoded, params, seed, options)
        repeats = samples_per_prompt // distinct
        return [
            [self._as_completion(each) for each in answer.outputs] * repeats for answer in answers
        ]

    def open_sampler(
        self, *, temperature: float, seed: int, options: Mapping[str, Any] | None = None
    ) -> Callable[[list[list[int]], int], list[list[int]]]:
        """Return a function as `completions.open_sampler` yields it; each of its calls has other seeds."""
        calls = itertools.count()

        def sample(prompt_ids: list[list[int]], most: int) -> list[list[int]]:
            params = {"max_tokens": most, "temperature": temperature}
            encoded = [{"prompt_token_ids": ids} for ids in prompt_ids]
            answers = self._generate(encoded, params, seed + next(calls) * _APART, options)
            return [list(answer.outputs[0].token_ids) for answer in answers]

        return sample

    def _generate(
        self,
        prompts: Sequence[dict[str, Any]],
        params: Mapping[str, Any],
        seed: int | None,
        options: Mapping[str, Any] | None,
    ) -> list[Any]:
        values = {name: (options or {}).get(name) for name in _OPTIONS}
        narrowed = {name: value for name, value in values.items() if value is not None}
        each = [
            SamplingParams(
                **self._ends,
                seed=None if seed is None else (seed + number) % 2**31,
                **params,
                **narrowed,
            )
            for number in range(len(prompts))
        ]
        return list(self._llm.generate(prompts, each, use_tqdm=False, lora_request=self._adapter))

    def _as_completion(self, output: Any) -> Completion:
        tokens = tuple(output.token_ids)
        text = self._reader.decode(tokens)
        return Completion(text, tokens, clipped=output.finish_reason == "length")


def _encode_with_images(
    prompts: Sequence[Any], images: Images, kwargs: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Return prompts with their images, for each of which vLLM replaces a placeholder."""
    return [
        {
            "prompt_token_ids": encode_unexpanded(images.processor, prompt, kwargs),
            **({"multi_modal_data": {"image": list(own)}} if own else {}),
        }
        for prompt, own in zip(prompts, images.of_prompts, strict=True)
    ]


@contextmanager
def open_vllm(
    location: str,
    tokenizer: Any,
    *,
    stops: Sequence[int],
    stop_strings: Sequence[str] = (),
    skip_special_tokens: bool = True,
    adapter: str | None = None,
    seed: int = 0,
    engine: Mapping[str, Any] | None = None,
) -> Iterator[VllmSampler]:
    """Start an engine, which takes seconds to minutes, and end it.

    Args:
        location: A model folder or hub id.
        tokenizer: Its tokenizer.
        stops: Tokens that end a completion.
        stop_strings: Texts that do.
        skip_special_tokens: Whether texts lack all special tokens.
        adapter: Folder of a LoRA adapter on top of it.
        seed: Of the engine.
        engine: More arguments for `vllm.LLM`, such as `gpu_memory_utilization`.
    """
    reading: dict[str, Any] = {"skip_special_tokens": skip_special_tokens}
    reader = build_reader(tokenizer, stops, stop_strings=stop_strings, **reading)
    lora: dict[str, Any] = {}
    if adapter is not None:
        lora = {"enable_lora": True, "max_lora_rank": read_vllm_rank(Path(adapter))}
    llm = LLM(model=location, seed=seed, disable_log_stats=True, **lora, **(engine or {}))
    try:
        yield VllmSampler(llm, reader, adapter)
    finally:
        llm.llm_engine.engine_core.shutdown()
