"""How completions end and what they say: end tokens, stop strings, and special tokens in texts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import StoppingCriteria, StopStringCriteria

from grpo_cli.errors import RunError

_NO_TOKEN = 2**31 - 1
"""Stands before the first token; above every token's id."""


class StopStrings(StoppingCriteria):
    """Ends a sequence with the token that completes a stop string, as `generate()` does.

    Source: transformers 5.24, `StopStringCriteria`; a stop string may begin in the prompt, and the token that
    completes it may go on behind it.
    """

    def __init__(self, tokenizer: Any, strings: Collection[str]) -> None:
        """Find how the tokens of a vocabulary can make up the strings.

        Raises:
            RunError: No token can complete any of them.
        """
        try:
            self._criteria = StopStringCriteria(tokenizer, list(strings))
        except ValueError as error:
            raise RunError(
                f"no token of the model can complete {' or '.join(map(repr, strings))}",
                "change `stop_strings` in `generation.generation_kwargs`",
            ) from error
        self.strings = tuple(strings)
        self.window = self._criteria.maximum_token_len
        """The most tokens that a stop string can have."""

    @cached_property
    def last_tokens(self) -> frozenset[int]:
        """The tokens that can complete a stop string."""
        ends = self._criteria.max_valid_positions * self._criteria.num_stop_strings
        completes = (self._criteria.embedding_vec[:, ends:-1] > 0).any(dim=1)
        return frozenset(completes.nonzero().squeeze(1).tolist())

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """Return which sequences have just ended, `[sequences] bool`."""
        return self._criteria(input_ids, scores)

    def is_reached(self, ids: Sequence[int]) -> bool:
        """Return whether the last token of a sequence completes a stop string; reads the newest tokens alone."""
        if ids[-1] not in self.last_tokens:
            return False
        return bool(self(torch.tensor([ids[-self.window :]])))

    def find(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Return which tokens from column `first` on complete a stop string, `[sequences, tokens - first] bool`.

        Args:
            ids: Tokens of prompts and completions, `[sequences, tokens] int64`.
            first: At least 0.
        """
        start = first - self.window + 1
        ids = pad(ids, (max(-start, 0), 0), value=_NO_TOKEN)[:, max(start, 0) :]
        windows = ids.unfold(1, self.window, 1)
        return self(windows.flatten(0, 1)).view(windows.shape[:2])


@dataclass(frozen=True)
class CompletionReader:
    """Where completions of a model end, and their texts."""

    tokenizer: Any
    end_ids: frozenset[int]
    """The tokens that end a completion."""
    stop_strings: StopStrings | None = None
    skip_special_tokens: bool = True
    """Whether texts lack all special tokens, and not the end and padding tokens alone."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, as rewards read it."""
        if self.skip_special_tokens:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        ends = self.end_ids | {self.tokenizer.pad_token_id}
        return str(self.tokenizer.decode([token for token in ids if token not in ends]))

    def cut(self, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> list[int]:
        """Return tokens up to where the completion ends; the end token or stop string is kept."""
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), None)
        row = list(ids if end is None else ids[: end + 1])
        if self.stop_strings is None or self.stop_strings.last_tokens.isdisjoint(row):
            return row
        before = list(prompt_ids[-self.stop_strings.window :])
        ends = self.stop_strings.find(torch.tensor([[*before, *row]]), len(before))[0]
        return row[: int(ends.int().argmax()) + 1] if ends.any() else row

    def is_complete(self, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> bool:
        """Return whether a completion ended by itself: with an end token, or at a stop string."""
        if not ids or ids[-1] in self.end_ids:
            return bool(ids)
        stops = self.stop_strings
        return stops is not None and stops.is_reached([*prompt_ids[-stops.window :], *ids])

    def is_terminated(self, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> bool:
        """Return whether TRL counts a completion as complete: `is_complete`, or its last token is padding."""
        is_padding = bool(ids) and ids[-1] == self.tokenizer.pad_token_id
        return is_padding or self.is_complete(ids, prompt_ids)

    def find_hidden(self, ids: Collection[int]) -> set[int]:
        """Return the special tokens among some that texts lack, besides end and padding tokens."""
        if not self.skip_special_tokens:
            return set()
        added = self.tokenizer.added_tokens_decoder
        special = {token for token, each in added.items() if each.special}
        return special & set(ids) - self.end_ids - {self.tokenizer.pad_token_id}


def build_reader(
    tokenizer: Any,
    end_ids: Collection[int],
    *,
    stop_strings: Collection[str] = (),
    skip_special_tokens: bool = True,
) -> CompletionReader:
    """Return the reader of a model's completions.

    Args:
        tokenizer: The model's.
        end_ids: The tokens that end a completion.
        stop_strings: Texts that do.
        skip_special_tokens: Whether texts lack all special tokens.

    Raises:
        RunError: No token can complete a stop string.
    """
    stops = StopStrings(tokenizer, stop_strings) if stop_strings else None
    return CompletionReader(tokenizer, frozenset(end_ids), stops, skip_special_tokens)
