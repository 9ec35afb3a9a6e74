"""Samples completions with vLLM, from the same tokens and the same settings as `sampling.py`.

Owns the life of the engine. An adapter is handed to vLLM with each request, not merged.

Source: vLLM 0.31, `LLM`, `LoRARequest` and `SamplingParams`; trl 1.16, `VLLMGeneration` (which
settings it passes on).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from grpo_cli.fast.completions import Completion, Prompt, encode_prompt
from grpo_cli.models.adapters import read_vllm_rank

_OPTIONS = ("top_p", "top_k", "min_p", "repetition_penalty")


class VllmSampler:
    """A running engine."""

    def __init__(self, llm: LLM, tokenizer: Any, stops: Sequence[int], adapter: str | None) -> None:
        self._llm = llm
        self._tokenizer = tokenizer
        self._stops = list(stops)
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
    ) -> list[list[Completion]]:
        """Samples completions for each prompt; the arguments are those of `sample_completions`.

        Each prompt is seeded by itself, so that its completions do not depend on its neighbours.

        Returns:
            `samples_per_prompt` completions for each prompt, in the order of `prompts`.
        """
        distinct = samples_per_prompt if temperature > 0 else 1
        given = {
            name: value for name in _OPTIONS if (value := (options or {}).get(name)) is not None
        }
        params = [
            SamplingParams(
                n=distinct,
                max_tokens=max_new_tokens,
                temperature=temperature,
                stop_token_ids=self._stops,
                seed=None if seed is None else (seed + number) % 2**31,
                **given,
            )
            for number in range(len(prompts))
        ]
        encoded = [
            {"prompt_token_ids": encode_prompt(self._tokenizer, prompt, chat_template_kwargs)}
            for prompt in prompts
        ]
        answers = self._llm.generate(encoded, params, use_tqdm=False, lora_request=self._adapter)
        return [
            [self._as_completion(output) for output in answer.outputs]
            * (samples_per_prompt // distinct)
            for answer in answers
        ]

    def _as_completion(self, output: Any) -> Completion:
        tokens = tuple(output.token_ids)
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(text, tokens, clipped=output.finish_reason == "length")


@contextmanager
def open_vllm(
    location: str,
    tokenizer: Any,
    *,
    stops: Sequence[int],
    adapter: str | None = None,
    seed: int = 0,
    engine: Mapping[str, Any] | None = None,
) -> Iterator[VllmSampler]:
    """Starts an engine, which takes seconds to minutes, and ends it.

    Args:
        location: A model folder or hub id.
        tokenizer: Its tokenizer.
        stops: Tokens that end a completion.
        adapter: Folder of a LoRA adapter on top of it.
        seed: Of the engine.
        engine: More arguments for `vllm.LLM`, such as `gpu_memory_utilization`.
    """
    lora = (
        {}
        if adapter is None
        else {"enable_lora": True, "max_lora_rank": read_vllm_rank(Path(adapter))}
    )
    llm = LLM(model=location, seed=seed, disable_log_stats=True, **lora, **(engine or {}))
    try:
        yield VllmSampler(llm, tokenizer, stops, adapter)
    finally:
        llm.llm_engine.engine_core.shutdown()
