"""Samples completions with vLLM, from the same tokens and the same settings as `sampling.py`.

Owns the life of the engine: it is started for one call and ended with it.

Source: vLLM 0.31, `LLM` and `SamplingParams`; trl 1.16, `VLLMGeneration` (which settings it passes on).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm import LLM, SamplingParams

from grpo_cli.models.sampling import Completion, Prompt, encode_prompt

_OPTIONS = ("top_p", "top_k", "min_p", "repetition_penalty")


def sample_with_vllm(
    location: str,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float,
    samples_per_prompt: int = 1,
    seed: int | None = None,
    stop_token_ids: Sequence[int] = (),
    chat_template_kwargs: dict[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[list[Completion]]:
    """Samples completions for each prompt.

    Args:
        location: A model folder or hub id.
        tokenizer: Its tokenizer.
        prompts: Texts or lists of messages.
        max_new_tokens: Longest completion, in tokens.
        temperature: 0 is greedy decoding.
        samples_per_prompt: Completions for each prompt.
        seed: Of the engine.
        stop_token_ids: Tokens that end a completion.
        chat_template_kwargs: More variables for the chat template.
        options: `top_p`, `top_k`, `min_p`, `repetition_penalty`, as `GRPOConfig` names them.
        engine: More arguments for `vllm.LLM`, such as `gpu_memory_utilization`.
        on_progress: Called with 0 and the completions to do once the engine is up, which takes a
            while, and again when they are done.

    Returns:
        `samples_per_prompt` completions for each prompt, in the order of `prompts`.
    """
    encoded = [encode_prompt(tokenizer, prompt, chat_template_kwargs) for prompt in prompts]
    params = SamplingParams(
        n=samples_per_prompt,
        max_tokens=max_new_tokens,
        temperature=temperature,
        stop_token_ids=list(stop_token_ids),
        **_own_options(options or {}),
    )
    llm = LLM(model=location, seed=seed or 0, disable_log_stats=True, **(engine or {}))
    total = samples_per_prompt * len(prompts)
    report = on_progress or (lambda done, total: None)
    try:
        report(0, total)
        answers = llm.generate(
            [{"prompt_token_ids": tokens} for tokens in encoded], params, use_tqdm=False
        )
        report(total, total)
    finally:
        llm.llm_engine.engine_core.shutdown()
    return [[_as_completion(tokenizer, output) for output in answer.outputs] for answer in answers]


def _own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's names are the same; it writes "all tokens" as 0 too."""
    return {name: options[name] for name in _OPTIONS if options.get(name) is not None}


def _as_completion(tokenizer: Any, output: Any) -> Completion:
    tokens = tuple(output.token_ids)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return Completion(text, tokens, clipped=output.finish_reason == "length")
