"""Samples the completions of rows by playing episodes."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.episode import Episode, Sampled
from grpo_cli.environments.player import Player
from grpo_cli.fast.tokens import CompletionReader
from grpo_cli.fast.trainer import FastTrainer
from grpo_cli.models.processor import encode_images
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.rewards.contract import EPISODE
from grpo_cli.training.rollout.rollout import Context, Rollout, Row
from grpo_cli.training.rollout.samplers import TokenSampler

_PAUSES_S = (1.0, 5.0, 30.0)
"""How long to wait before episodes that could not be begun are begun again."""


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
