"""How the next token is drawn: by which settings of `generate()`, and with one random number a row.

Owns reading those settings, and says where plain `generate()` is needed for them. Does not run a model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_cli.recipe.fast import find_beyond


@dataclass(frozen=True)
class Decoding:
    """Settings of `generate()` that this file can honour."""

    max_new_tokens: int
    eos_token_ids: list[int]
    pad_token_id: int
    greedy: bool = False
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    narrowing: tuple[LogitsProcessor, ...] = ()
    """What leaves unlikely tokens out, in the order of `generate()`."""


def read_decoding(given: GenerationConfig, own: GenerationConfig) -> Decoding | None:
    """What to sample by; None where a setting is asked for that only plain `generate()` honours.

    Args:
        given: The settings asked for.
        own: The model's, which fill what those leave open.

    Source: transformers 5.17, `GenerationMixin._prepare_generation_config` and `_get_logits_processor`.
    """
    asked = {**_told(own), **_told(given)}
    if find_beyond(asked):
        return None
    ends = asked.get("eos_token_id", [])
    pad, longest = asked.get("pad_token_id"), asked.get("max_new_tokens")
    if pad is None or longest is None:
        return None
    return Decoding(
        max_new_tokens=longest,
        eos_token_ids=ends if isinstance(ends, list) else [ends],
        pad_token_id=pad,
        greedy=not asked.get("do_sample", False),
        temperature=float(asked.get("temperature", 1.0)),
        repetition_penalty=float(asked.get("repetition_penalty", 1.0)),
        narrowing=_narrowing(asked),
    )


def _told(config: GenerationConfig) -> dict[str, Any]:
    """What a configuration says; not what it leaves open."""
    return {name: value for name, value in config.to_dict().items() if value is not None}


def _narrowing(asked: dict[str, Any]) -> tuple[LogitsProcessor, ...]:
    found: list[LogitsProcessor] = []
    if asked.get("top_k", 50):
        found.append(TopKLogitsWarper(asked.get("top_k", 50)))
    if asked.get("top_p", 1.0) < 1.0:
        found.append(TopPLogitsWarper(asked["top_p"]))
    if asked.get("min_p") is not None:
        found.append(MinPLogitsWarper(asked["min_p"]))
    return tuple(found)


class Draw(LogitsProcessor):
    """Draws the next token of each row and leaves only that one; notes how open the choice was."""

    def __init__(self, decoding: Decoding, *, entropies: bool) -> None:
        self.entropies: list[torch.Tensor] = []
        """For each step `[sequences] float32`, in nats, where they are wanted."""
        self._decoding = decoding
        self._wants_entropies = entropies
        self._penalty = (
            RepetitionPenaltyLogitsProcessor(decoding.repetition_penalty)
            if decoding.repetition_penalty != 1.0
            else None
        )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores of a step, `[sequences, vocabulary] float32`, as `generate()` goes on with them."""
        decoding = self._decoding
        chances: torch.Tensor | None = None
        if self._wants_entropies:
            chances = (scores / decoding.temperature).softmax(dim=-1)
            self.entropies.append(torch.special.entr(chances).sum(dim=-1))
        if self._penalty is not None:
            scores = self._penalty(input_ids, scores)
        if decoding.greedy:
            return scores
        if chances is None or self._penalty is not None or decoding.narrowing:
            scores = scores / decoding.temperature
            for narrow in decoding.narrowing:
                scores = narrow(input_ids, scores)
            chances = scores.softmax(dim=-1)
        return torch.full_like(scores, -torch.inf).scatter_(1, draw(chances), 0.0)


def draw(chances: torch.Tensor) -> torch.Tensor:
    """One token of each row, by its chances.

    On a CPU `torch.multinomial` takes a random number for every word of the vocabulary; here it is one for
    every row, looked up in the running sum. In float64, so that the smallest chance keeps its share.

    Args:
        chances: `[sequences, vocabulary] float32`, each row adding up to 1.

    Returns:
        `[sequences, 1] int64`.

    Raises:
        RuntimeError: The chances are no numbers.
    """
    if chances.device.type != "cpu":
        return torch.multinomial(chances, num_samples=1)
    reached = chances.cumsum(dim=-1, dtype=torch.float64)
    total = reached[:, -1:]
    if not torch.isfinite(total).all():
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    return torch.searchsorted(reached, torch.rand_like(total) * total, right=True)
