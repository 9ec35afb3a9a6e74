"""Completions of many prompts at once, with what they have in common computed once.

Owns two savings that leave the distribution as it is: a prompt that is asked for several times is read once,
and rows that have ended are left out while the others go on. The loop over tokens stays transformers'
`generate()`; how a token is drawn is `drawing.py`'s. Does not know the trainer.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo_cli.fast.batch_dependence import find_batch_tie, has_dropout, layer_kinds
from grpo_cli.fast.token_attention import grouped_heads
from grpo_cli.fast.token_sampling import Decoding, Draw

_NEEDED = frozenset({"input_ids", "past_key_values", "position_ids", "logits_to_keep"})
"""What a model must take to be read in two parts."""
_ENDED_SHARE = 0.5
"""Rows are left out as soon as this share of them has ended: each time halves them, so it happens seldom."""


@dataclass(frozen=True)
class Sampled:
    """Completions in the order of the prompts."""

    completion_ids: list[list[int]]
    """Their tokens, with the end-of-sequence token where there is one."""
    entropies: list[list[float]]
    """Of each token: the entropy of the whole distribution at the sampling temperature, in nats. Empty where they
    were not asked for."""


def unsupported_reason(model: Any) -> str | None:
    """Why a model cannot be read in two parts; None where it reads text alone, and remembers all of it.

    Args:
        model: A causal language model of transformers, without peft's wrapper.
    """
    config = model.config
    if (tie := find_batch_tie(config)) is not None:
        return tie
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        return "the model reads more than text"
    # BERT's kin: they count positions by the columns of what they are given.
    if getattr(config, "is_decoder", False):
        return "the model is an encoder that is used as a decoder"
    if missing := sorted(_NEEDED - inspect.signature(model.forward).parameters.keys()):
        return f"the model's forward pass takes no {' and no '.join(missing)}"
    forgetful = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer}
    if DynamicSlidingWindowLayer in forgetful:
        return "the model has sliding windows"
    if forgetful:
        kinds = ", ".join(sorted(layer_kinds(config) - {"full_attention"}))
        return f"the model has layers of the kind {kinds}"
    return None


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    width: int = 1,
    entropies: bool = True,
) -> Sampled:
    """Samples a completion for each prompt; equal prompts are read once.

    Args:
        model: One of which `unsupported_reason` gives none, without peft's wrapper; its adapters take part.
        prompts: Token ids; none is empty.
        decoding: What to sample by.
        width: The prompts are padded to a multiple of this many tokens.
        entropies: Whether to compute them.
    """
    longest = -(-max(map(len, prompts)) // width) * width
    ids = torch.tensor(
        [[decoding.pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts],
        device=model.device,
    )  # [sequences, tokens] int64
    mask = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts],
        device=model.device,
    )  # [sequences, tokens] int64
    cache = _read_prompts(model, prompts, ids, mask)
    own = model.generation_config
    # `generate()` fills what a configuration leaves open from the model's own.
    model.generation_config = GenerationConfig()
    try:
        with grouped_heads():
            return _continue(model, ids, mask, cache, decoding, entropies=entropies)
    finally:
        model.generation_config = own


def _read_prompts(
    model: Any, prompts: Sequence[Sequence[int]], ids: torch.Tensor, mask: torch.Tensor
) -> DynamicCache:
    """Keys and values of all prompt tokens but the last, for every row; none where no two prompts are equal."""
    cache = DynamicCache(config=model.config)
    first: dict[tuple[int, ...], int] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(tuple(prompt), row)
    # With dropout equal prompts are read with different neurons missing.
    alone = len(first) == len(prompts) or (model.training and has_dropout(model))
    if ids.shape[1] == 1 or alone:
        return cache
    distinct = list(first.values())
    seen = mask[distinct, :-1]
    model(
        input_ids=ids[distinct, :-1],
        attention_mask=seen,
        position_ids=(seen.cumsum(-1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        # None is needed: `generate()` reads the last token. 0 would keep all of them.
        logits_to_keep=1,
    )
    place = {row: position for position, row in enumerate(distinct)}
    rows = [place[first[tuple(prompt)]] for prompt in prompts]
    cache.batch_select_indices(torch.tensor(rows, device=ids.device))
    return cache


def _continue(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: DynamicCache,
    decoding: Decoding,
    *,
    entropies: bool,
) -> Sampled:
    """Appends to prompts that have been read; again for the rows that go on after the others' end."""
    found = Sampled([[] for _ in ids], [[] for _ in ids])
    rows = list(range(len(ids)))
    left = decoding.max_new_tokens
    ends = torch.tensor(decoding.eos_token_ids, device=ids.device)
    while rows and left > 0:
        before = ids.shape[1]
        draw = Draw(decoding, entropies=entropies)
        ids = model.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            generation_config=_settings(decoding, left),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([EnoughEnded(len(rows), ends)]),
        )
        new = ids[:, before:]
        left -= new.shape[1]
        lengths, ended = _measure(new, ends)
        noted = torch.stack(draw.entropies, dim=1).tolist() if entropies else [[]] * len(rows)
        for row, length, tokens, entropy in zip(
            rows, lengths.tolist(), new.tolist(), noted, strict=True
        ):
            found.completion_ids[row] += tokens[:length]
            found.entropies[row] += entropy[:length]
        going = (~ended).nonzero().squeeze(1)
        rows = [rows[place] for place in going.tolist()]
        if rows and left > 0:
            cache.batch_select_indices(going)
            ids = ids[going]
            mask = torch.cat([mask, mask.new_ones(len(mask), new.shape[1])], dim=1)[going]
    return found


def _settings(decoding: Decoding, max_new_tokens: int) -> GenerationConfig:
    """`generate()` takes the likeliest token, and `Draw` leaves it one."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=decoding.pad_token_id,
        eos_token_id=decoding.eos_token_ids or None,
        disable_compile=True,
    )


def _measure(new: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each row up to its end, and whether it has one."""
    is_end = torch.isin(new, ends)
    ended = is_end.any(dim=1)
    lengths = torch.where(ended, is_end.int().argmax(dim=1) + 1, new.shape[1])
    return lengths, ended


class EnoughEnded(StoppingCriteria):
    """Stops all rows once enough of them have ended, so that those can be left out."""

    def __init__(self, rows: int, ends: torch.Tensor) -> None:
        self._ends = ends
        self._ended = torch.zeros(rows, dtype=torch.bool, device=ends.device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """For each row `[sequences] bool` whether it stops here."""
        self._ended |= torch.isin(input_ids[:, -1], self._ends)
        return (self._ended.float().mean() >= _ENDED_SHARE).expand(len(self._ended))
