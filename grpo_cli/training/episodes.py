"""Episodes in training: TRL's `rollout_func`, which plays a batch of them with the trainer's own sampling.

Source: trl 1.16, `GRPOTrainer._generate`.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_cli.environments.contract import EpisodeError
from grpo_cli.environments.episode import Episode, Sampled, episode_metrics
from grpo_cli.environments.player import Player
from grpo_cli.models.processor import encode_images
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.rewards.contract import EPISODE
from grpo_cli.upstream import replaced

_PAUSES_S = (1.0, 5.0, 30.0)
"""How long to wait before episodes that could not be begun are begun again."""


class EpisodeRollouts:
    """Plays the episodes of each generation batch."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._episodes: list[Episode] = []

    @property
    def completions(self) -> list[list[dict[str, Any]]]:
        """The messages of each episode that was played last."""
        return [episode.messages for episode in self._episodes]

    @property
    def waited_s(self) -> float:
        """Seconds spent so far on waiting for tools and environments."""
        return self._player.waited_s

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Begin an episode for each row; return the rows with the prompts that the environments add to."""
        self._episodes = self._begin(rows)
        # TRL would look for a row's images in the prompt alone.
        return [
            {name: value for name, value in row.items() if name != IMAGES}
            | {"prompt": episode.prompt}
            for row, episode in zip(rows, self._episodes, strict=True)
        ]

    def _begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Episode]:
        # Before the first batch it is a mistake of the recipe, later more likely a server that is restarted.
        for pause in _PAUSES_S if self._episodes else ():
            try:
                return self._player.begin(rows)
            except EpisodeError as error:
                print(f"warning: {error}\nwarning: next try in {pause:g} s", file=sys.stderr)
                time.sleep(pause)
        return self._player.begin(rows)

    def encode_images(self, processor: Any, token_ids: torch.Tensor) -> dict[str, Any]:
        """Return what TRL's batch has of the images of the episodes that were played last; nothing without any.

        Args:
            processor: The model's.
            token_ids: Of the episodes, padded, [episodes, tokens] int64.
        """
        images = [each.images[: each.images_read] for each in self._episodes]
        fields = encode_images(processor, images, token_ids.tolist())
        tensors = {
            name: torch.as_tensor(value).to(token_ids.device)
            for name, value in fields.items()
            if name != "num_tiles"
        }
        counts = {"num_images": [len(own) for own in images]} if fields else {}
        return {**fields, **tensors, **counts}

    def close(self) -> None:
        """Close the environments that `play` did not come to."""
        self._player.close(self._episodes)

    def play(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Play the episodes that `begin` began, as TRL's `rollout_func`; all processes take part."""

        def sample(prompt_ids: list[list[int]], most: int, images: Any = None) -> Sampled:
            before, fields = len(trainer._sampled_entropies), {}
            if images is not None and any(images):
                fields = encode_images(trainer.processing_class, images, prompt_ids)
                fields.pop("num_tiles", None)
            with _longest_answer(trainer, most):
                # Their histories differ, so no two of them are samples of the same prompt.
                ids, logprobs = trainer._generate_single_turn(prompt_ids, images, fields, 1)
            entropies = trainer._sampled_entropies[before:]
            del trainer._sampled_entropies[before:]
            return Sampled(ids, logprobs, entropies if len(entropies) == len(ids) else None)

        episodes = self._episodes
        self._player.play(episodes, sample, agree_over_processes)
        trainer._sampled_entropies += [each.entropies for each in episodes if each.entropies]
        logprobs = [each.logprobs for each in episodes if each.logprobs is not None]
        return {
            "prompt_ids": [each.prompt_ids for each in episodes],
            "completion_ids": [each.token_ids for each in episodes],
            "logprobs": logprobs or None,
            "env_mask": [each.mask for each in episodes],
        }

    def add_records(
        self, rows: Sequence[Mapping[str, Any]], prompts: Any, completions: Any, ids: Any
    ) -> tuple[Any, ...]:
        """Return what TRL scores, with the records of the episodes and only the model's own tokens."""
        records = [episode.as_json() for episode in self._episodes]
        scored = [{**row, EPISODE: record} for row, record in zip(rows, records, strict=True)]
        if self._player.reads_images:
            pairs = zip(scored, self._episodes, strict=True)
            scored = [{**row, IMAGES: episode.images} for row, episode in pairs]
        return scored, prompts, completions, [episode.own_ids for episode in self._episodes]

    def log_metrics(self, metrics: dict[str, list[float]]) -> None:
        """Append the means over the episodes of all processes."""
        records = gather_object([episode.as_json() for episode in self._episodes])
        names = set().union(*gather_object([self.tool_names]))
        for name, value in episode_metrics(records, sorted(names)).items():
            metrics[name].append(value)

    @property
    def tool_names(self) -> set[str]:
        """The recipe's tools, and those of the episodes that were played last."""
        offered = {tool.name for episode in self._episodes for tool in episode.tools}
        return {*self._player.tool_names, *offered}


def agree_over_processes(count: int, longest: int) -> tuple[int, int]:
    """Return the largest of each number over all processes."""
    numbers = gather_object([(count, longest)])
    return max(count for count, _ in numbers), max(longest for _, longest in numbers)


def _longest_answer(trainer: Any, most: int) -> AbstractContextManager[None]:
    if trainer.use_vllm:
        return replaced(trainer.vllm_generation, max_completion_length=most)
    return replaced(trainer.generation_config, max_new_tokens=most)
