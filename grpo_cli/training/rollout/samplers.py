"""Samples the completions of rows as single answers."""

from collections.abc import Sequence
from typing import Any, Protocol

from transformers import ProcessorMixin
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational, prepare_multimodal_messages

from grpo_cli.fast.completion_reader import CompletionReader
from grpo_cli.fast.prompts import encode_unexpanded
from grpo_cli.fast.sampler import TokenSampler
from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.training.rollout.rollout import Context, Rollout, Row


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
