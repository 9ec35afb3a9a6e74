"""Samples the completions of rows as single answers: with the exact sampler, or with TRL's backends.

Source: trl 1.16, `GRPOTrainer._generate_single_turn`.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from transformers import ProcessorMixin
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational, prepare_multimodal_messages
from trl.models import unwrap_model_for_generation

from grpo_cli.fast import decoding
from grpo_cli.fast.completions import stopping_criteria
from grpo_cli.fast.decoding import without_wrapper
from grpo_cli.fast.tokens import CompletionReader, StopStrings, encode_unexpanded
from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.training.rollout.rollout import Context, Rollout, Row
from grpo_cli.upstream import replaced
from grpo_cli.upstream.transformers import requests_ending


class Sampler(Protocol):
    """Makes completions of rows."""

    in_parts: bool
    """Whether parts of a batch may be sampled one after the other."""

    def waits(self) -> dict[str, float]:
        """Return the seconds so far that sampling has waited for others, by phase of a step."""

    def sample(self, rows: list[Row], context: Context) -> Rollout:
        """Return a completion of each row; all processes take part, each with equally many rows."""


class AnswerSampler:
    """Samples single answers with the backend of a trainer."""

    def __init__(self, trainer: FastTrainer, reader: CompletionReader) -> None:
        """Make a sampler; `reader` tells where completions end, and reads them."""
        self._trainer = trainer
        self._reader = reader
        self._tokens = TokenSampler(trainer, reader)
        # Of several processes, one may have no images.
        self.in_parts = not isinstance(trainer.processing_class, ProcessorMixin)

    def waits(self) -> dict[str, float]:
        """Return the seconds so far in which weights were sent to vLLM."""
        return self._tokens.waits()

    def sample(self, rows: list[Row], context: Context) -> Rollout:
        """Return a completion of each row.

        Source: trl 1.16, `GRPOTrainer._generate_and_score_completions` and `_generate`.
        """
        trainer, prompts = self._trainer, [row["prompt"] for row in rows]
        if any(row.get(IMAGES) for row in rows):
            images = [row.get(IMAGES) or [] for row in rows]
            pairs = zip(prompts, images, strict=True)
            prompts = [prepare_multimodal_messages(prompt, images=own) for prompt, own in pairs]
        prompt_ids, of_prompts, fields = trainer._tokenize_prompts(prompts)
        # TRL has None for a prompt without images, which processors refuse beside others with some.
        pictures = of_prompts and [each or [] for each in of_prompts]
        if pictures and trainer.use_vllm:
            sampled = self._sample_unexpanded(prompts, prompt_ids, pictures, fields, context)
        else:
            sampled = self._tokens.sample(
                prompt_ids, pictures, fields, group_size=context.group_size
            )
        rows = [dict(row) for row in rows]
        completions = read_completions(
            self._reader, [row["prompt"] for row in rows], prompt_ids, sampled.ids
        )
        return Rollout(
            context,
            rows,
            prompt_ids,
            sampled.ids,
            completions,
            logprobs=sampled.logprobs,
            entropies=sampled.entropies,
        )

    def _sample_unexpanded(
        self,
        prompts: list[Any],
        prompt_ids: list[list[int]],
        images: Any,
        fields: Any,
        context: Context,
    ) -> Any:
        """Sample with vLLM, which would expand the tokens of images that TRL (1.16) gives it (trl issue 6294)."""
        trainer = self._trainer
        unexpanded = [
            encode_unexpanded(
                trainer.processing_class,
                prepare_multimodal_messages(prompt),
                trainer.chat_template_kwargs,
            )
            for prompt in prompts
        ]
        size = context.group_size
        sampled = self._tokens.sample(unexpanded, images, fields, group_size=size)
        trainer.vllm_generation.check_read(prompt_ids)
        return sampled


def read_completions(
    reader: CompletionReader,
    prompts: Sequence[Any],
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
) -> list[Any]:
    """Return completions as rewards take them: texts, or lists of one message.

    Source: trl 1.16, `GRPOTrainer._generate`.
    """
    conversational = is_conversational({"prompt": prompts[0]})
    tokenizer, templates = reader.tokenizer, ("response_template", "response_schema")
    parses = any(getattr(tokenizer, name, None) is not None for name in templates)
    if conversational and parses and reader.skip_special_tokens:
        return [
            [parse_response(tokenizer, ids, prefix=prefix)]
            for ids, prefix in zip(completion_ids, prompt_ids, strict=True)
        ]
    texts = [reader.decode(ids) for ids in completion_ids]
    return [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts


class SampledTokens(NamedTuple):
    """Completions in the order of their prompts."""

    ids: list[list[int]]
    """With the token that ends a completion, if there is one."""
    logprobs: list[list[float]] | None = None
    """Of these tokens; None if the backend returns none."""
    entropies: list[list[float]] | None = None
    """Of the distributions that they were sampled from, in nats; None if they were not computed."""


class TokenSampler:
    """Samples from a trainer's model as it is."""

    def __init__(self, trainer: FastTrainer, reader: CompletionReader) -> None:
        """Make a sampler; `reader` tells where completions end."""
        self._trainer = trainer
        self._reader = reader

    def waits(self) -> dict[str, float]:
        """Return the seconds so far of sending weights to vLLM, under `sync`; nothing without it."""
        seconds = getattr(getattr(self._trainer, "vllm_generation", None), "synced_s", None)
        return {} if seconds is None else {"sync": seconds}

    def sample(
        self,
        prompt_ids: list[list[int]],
        images: Sequence[Any] | None = None,
        fields: Mapping[str, Any] | None = None,
        *,
        group_size: int,
        max_new_tokens: int | None = None,
    ) -> SampledTokens:
        """Sample one completion of each prompt; equal ones of a group stand side by side.

        Args:
            prompt_ids: Tokens of the prompts, with those of their images.
            images: Those of each prompt; None if the model reads text alone.
            fields: What the processor made of all images.
            group_size: How many equal prompts stand side by side.
            max_new_tokens: The most tokens of a completion, if not those of the training.
        """
        trainer = self._trainer
        with self._at_most(max_new_tokens):
            if trainer.fast.sampling and not (images or fields) and all(prompt_ids):
                sampled = self._decode(prompt_ids)
                entropies = sampled.entropies if trainer.notes_entropies else None
                return SampledTokens(sampled.completion_ids, None, entropies)
            arguments = prompt_ids, images, dict(fields or {}), group_size
            stops = self._reader.stop_strings
            if stops is None or trainer.use_vllm:
                return SampledTokens(*trainer._generate_single_turn(*arguments))
            with self._stopping_at(stops):
                ids, _ = trainer._generate_single_turn(*arguments)
        pairs = zip(ids, prompt_ids, strict=True)
        return SampledTokens([self._reader.cut(*pair) for pair in pairs])

    @contextlib.contextmanager
    def _at_most(self, tokens: int | None) -> Iterator[None]:
        trainer = self._trainer
        if tokens is None:
            yield
        elif trainer.use_vllm:
            with replaced(trainer.vllm_generation, max_completion_length=tokens):
                yield
        else:
            with replaced(trainer.generation_config, max_new_tokens=tokens):
                yield

    @contextlib.contextmanager
    def _stopping_at(self, stops: StopStrings) -> Iterator[None]:
        """End what transformers samples inside at stop strings."""
        trainer = self._trainer
        model = without_wrapper(trainer.accelerator.unwrap_model(trainer.model_wrapped))
        generate = partial(model.generate, stopping_criteria=stopping_criteria(stops))
        batched = trainer.use_transformers_continuous_batching
        requests = requests_ending(stops.is_reached) if batched else contextlib.nullcontext()
        with replaced(model, generate=generate), requests:
            yield

    def _decode(self, prompt_ids: list[list[int]]) -> decoding.Sampled:
        trainer = self._trainer
        with unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as unwrapped:
            model = without_wrapper(unwrapped)
            configs = trainer.generation_config, model.generation_config
            settings = decoding.read_decoding(*configs, self._reader.stop_strings)
            decode = decoding.decode
            if trainer.fast.cuda_graphs:
                from grpo_cli.fast.graph_decoding import decode_with_graphs as decode
            return decode(
                model,
                prompt_ids,
                settings,
                width=trainer.pad_to_multiple_of or 1,
                entropies=trainer.notes_entropies,
            )
