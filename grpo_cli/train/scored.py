"""Scored data in the place of sampling: TRL asks for completions, and gets responses of the data.

Owns which responses fill the places of a group, their tokens, and the rewards that go with them. The
loss and the advantages are `GRPOTrainer`'s own.

Source: trl 1.16, `rollout_func` of `GRPOTrainer`, and its treatment of rewards that are None.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from grpo_cli.data.encoding import canonical_json
from grpo_cli.data.prompts import Prompt
from grpo_cli.fast.completions import encode_prompt, encode_response

NAME = "score"
"""What TRL logs the rewards of the data under: `rewards/score/mean`."""


@dataclass(frozen=True)
class TokenizedGroup:
    """The responses of one prompt."""

    row: int
    """The row of the data the prompt is first of, from 0."""
    prompt: Prompt
    prompt_ids: list[int]
    responses: list[list[int]]
    """Token ids of each, with the end-of-sequence token unless it was cut at the longest length."""
    rewards: list[float]

    @property
    def longest(self) -> int:
        """Tokens of the prompt with its longest response."""
        return len(self.prompt_ids) + max(map(len, self.responses))


def tokenize_groups(
    dataset: Dataset,
    tokenizer: Any,
    *,
    max_length: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[TokenizedGroup]:
    """Tokenizes every response, once.

    Args:
        dataset: Rows of `prompt`, `row_id`, `responses` and `rewards`.
        tokenizer: The model's.
        max_length: Longest response, in tokens; longer ones are cut.
        chat_template_kwargs: More variables for the chat template.
    """
    return [
        TokenizedGroup(
            row["row_id"],
            row["prompt"],
            encode_prompt(tokenizer, row["prompt"], chat_template_kwargs),
            [encode_response(tokenizer, text, max_length) for text in row["responses"]],
            row["rewards"],
        )
        for row in dataset
    ]


class ScoredRollouts:
    """What `GRPOTrainer` calls as `rollout_func`."""

    def __init__(self, groups: Sequence[TokenizedGroup], *, eos_token_id: int, seed: int) -> None:
        """Takes the groups of training.

        Args:
            groups: Each prompt once.
            eos_token_id: Stands in places that are left over.
            seed: Of the choice where a group is larger than TRL's.
        """
        self._seed = seed
        self._eos = eos_token_id
        self._groups = {canonical_json(group.prompt): group for group in groups}
        logging.getLogger("trl.trainer.grpo_trainer").addFilter(_is_not_about_empty_places)

    def __call__(self, prompts: Sequence[Prompt], trainer: Any) -> dict[str, Any]:
        """Responses for this process's share of a batch of groups.

        Args:
            prompts: Each prompt as often as TRL's groups are large; a group may go on in the next process.
            trainer: Tells the size of groups, the step and the process.

        Returns:
            Token ids of prompts and responses; `env_mask`, which leaves empty places out of the loss; and
            the rewards under `NAME`, None at empty places, which TRL leaves out of a group's baseline.
        """
        size = trainer.num_generations
        first = trainer.accelerator.process_index * len(prompts)
        answers: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "completion_ids", "env_mask", NAME)
        }
        for place, prompt in enumerate(prompts, first):
            group = self._groups[canonical_json(prompt)]
            # Every process, and a run that goes on, chooses the same ones.
            chosen = self._choose(group, size, trainer.state.global_step)
            slot = place % size
            response = group.responses[chosen[slot]] if slot < len(chosen) else [self._eos]
            answers["prompt_ids"].append(group.prompt_ids)
            answers["completion_ids"].append(response)
            answers["env_mask"].append([int(slot < len(chosen))] * len(response))
            answers[NAME].append(group.rewards[chosen[slot]] if slot < len(chosen) else None)
        return {**answers, "logprobs": None}

    def _choose(self, group: TokenizedGroup, size: int, step: int) -> list[int]:
        count = len(group.responses)
        if count <= size:
            return list(range(count))
        chooser = random.Random(f"{self._seed}:{group.row}:{step}")
        return sorted(chooser.sample(range(count), size))


def score(completions: Sequence[Any], **given: Any) -> list[float | None]:
    """The rewards that `ScoredRollouts` gave along, in the shape of a reward function of TRL's."""
    return list(given[NAME])


def _is_not_about_empty_places(record: logging.LogRecord) -> bool:
    """Drops TRL's warning, with all columns of a row, about a place that is empty on purpose."""
    return "All reward functions returned None" not in record.getMessage()
