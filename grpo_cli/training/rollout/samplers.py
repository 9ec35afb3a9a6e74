"""Samples the completions of rows: as single answers, or by playing episodes."""

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from accelerate.utils import gather_object
from transformers import ProcessorMixin
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational, prepare_multimodal_messages

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.episode import Episode, Sampled
from grpo_cli.environments.player import Player
from grpo_cli.fast.completion_reader import CompletionReader
from grpo_cli.fast.prompts import encode_unexpanded
from grpo_cli.fast.sampler import TokenSampler
from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.models.processor import encode_images
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.rewards.contract import EPISODE
from grpo_cli.training.rollout.rollout import Context, Rollout, Row

_PAUSES_S = (1.0, 5.0, 30.0)
"""How long to wait before episodes that could not be begun are begun again."""


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


class EpisodeSampler:
    """Plays an episode for each row, with the sampling of a trainer."""

    in_parts = False

    def __init__(self, trainer: FastTrainer, reader: CompletionReader, player: Player) -> None:
        """Make a sampler; `player` plays."""
        self._processor = trainer.processing_class
        self._tokens = TokenSampler(trainer, reader)
        self._player = player
        self._has_begun = False

    def waits(self) -> dict[str, float]:
        """Return the seconds so far of waiting for tools and environments, and of sending weights to vLLM."""
        return {**self._tokens.waits(), "tools": self._player.waited_s}

    def sample(self, rows: list[Row], context: Context) -> Rollout:
        """Return the episode of each row."""
        episodes = self.begin(rows)
        try:
            self._player.play(episodes, self._sample_answers, agree_over_processes)
        finally:
            # Those that `play` did not come to.
            self._player.close(episodes)
        logprobs = [each.logprobs for each in episodes if each.logprobs is not None]
        entropies = [each.entropies for each in episodes if each.entropies]
        images = [each.images[: each.images_read] for each in episodes]
        return Rollout(
            context,
            [self._record(*pair) for pair in zip(rows, episodes, strict=True)],
            [each.prompt_ids for each in episodes],
            [each.token_ids for each in episodes],
            [each.messages for each in episodes],
            mask=[each.mask for each in episodes],
            logprobs=logprobs or None,
            entropies=entropies if len(entropies) == len(episodes) else None,
            images=images if self._player.reads_images else None,
            tools=frozenset(self._player.tool_names).union(*(_offered(each) for each in episodes)),
        )

    def begin(self, rows: Sequence[Row]) -> list[Episode]:
        """Begin an episode for each row.

        Raises:
            EpisodeError: One cannot be begun, though it was tried again.
        """
        # Before the first batch it is a mistake of the recipe, later more likely a server that is restarted.
        for pause in _PAUSES_S if self._has_begun else ():
            try:
                return self._player.begin(rows)
            except EpisodeError as error:
                print(f"warning: {error}\nwarning: next try in {pause:g} s", file=sys.stderr)
                time.sleep(pause)
        episodes = self._player.begin(rows)
        self._has_begun = True
        return episodes

    def _sample_answers(
        self, prompt_ids: list[list[int]], most: int, images: Any = None
    ) -> Sampled:
        fields: dict[str, Any] = {}
        if images is not None and any(images):
            fields = encode_images(self._processor, images, prompt_ids)
            fields.pop("num_tiles", None)
        # Their histories differ, so no two of them are samples of the same prompt.
        options = {"group_size": 1, "max_new_tokens": most}
        return Sampled(*self._tokens.sample(prompt_ids, images, fields, **options))

    def _record(self, row: Row, episode: Episode) -> Row:
        """Return what rewards read of an episode's row."""
        own = {name: value for name, value in row.items() if name != IMAGES}
        images = {IMAGES: episode.images} if self._player.reads_images else {}
        return {**own, **images, "prompt": episode.prompt, EPISODE: episode.as_json()}


def _offered(episode: Episode) -> list[str]:
    return [tool.name for tool in episode.tools]


def agree_over_processes(count: int, longest: int) -> tuple[int, int]:
    """Return the largest of each number over all processes."""
    numbers = gather_object([(count, longest)])
    return max(count for count, _ in numbers), max(longest for _, longest in numbers)


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
