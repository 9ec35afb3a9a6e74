"""Samples completions of many prompts at once: equal prompts are read once, and ended rows are left out.

Both leave the distribution as it is. The loop over tokens stays transformers' `generate()`.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_cli.fast.attention import grouped_heads
from grpo_cli.fast.completion_reader import StopStrings
from grpo_cli.fast.cpu import draw_tokens
from grpo_cli.fast.support import find_batch_tie, has_dropout
from grpo_cli.models.loading import find_prompt_ties, without_wrapper
from grpo_cli.recipe.training import find_beyond
from grpo_cli.upstream import replaced
from grpo_cli.upstream.transformers import cache_argument

_NEEDED = frozenset({"input_ids", "position_ids", "logits_to_keep"})
"""What a model must take, beside its cache, to be read in two parts."""
_ENDED_SHARE = 0.5
"""Rows are left out once this share of them has ended: each time halves them, so it happens seldom."""


@dataclass(frozen=True)
class Decoding:
    """Settings of `generate()` that this file can honour."""

    max_new_tokens: int
    eos_token_ids: list[int]
    pad_token_id: int
    greedy: bool
    temperature: float
    processors: tuple[LogitsProcessor, ...]
    """Repetition penalty, which counts before the temperature."""
    warpers: tuple[LogitsProcessor, ...]
    """What leaves unlikely tokens out, in the order of `generate()`."""
    stops: StopStrings | None = None

    def find_ends(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Return which tokens from column `first` on end a completion, `[sequences, tokens - first] bool`."""
        new = ids[:, first:]
        is_end = torch.zeros_like(new, dtype=torch.bool)
        for token in self.eos_token_ids:
            is_end |= new == token
        return is_end if self.stops is None else is_end | self.stops.find(ids, first)

    def adjust(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores whose softmax a token is drawn from; greedy decoding takes the highest.

        Args:
            ids: Tokens so far, `[sequences, tokens] int64`.
            scores: The model's logits, `[sequences, vocabulary] float32`.
        """
        for processor in self.processors:
            scores = processor(ids, scores)
        if self.greedy:
            return scores
        scores = scores / self.temperature
        for warper in self.warpers:
            scores = warper(ids, scores)
        return scores


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each row, in nats."""
    return torch.special.entr(probabilities).sum(dim=-1)


@dataclass(frozen=True)
class Sampled:
    """Completions in the order of the prompts."""

    completion_ids: list[list[int]]
    """Their tokens, with the end-of-sequence token if there is one."""
    entropies: list[list[float]]
    """Of each token: the entropy of the whole distribution at the sampling temperature, in nats. Empty if they
    were not requested."""


def unsupported_reason(model: Any) -> str | None:
    """Return why a model must sample by plain `generate()`; None if it reads text alone, and remembers it all."""
    if (tie := find_prompt_ties(model)) is not None:
        return tie
    bare = without_wrapper(model)
    config = bare.config
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        return "the model reads more than text"
    if (tie := find_batch_tie(config)) is not None:
        return tie
    # BERT's kin: they count positions by the columns of their input.
    if getattr(config, "is_decoder", False):
        return "the model is an encoder that is used as a decoder"
    missing = sorted(_NEEDED - inspect.signature(bare.forward).parameters.keys())
    if missing := missing + ["cache"] * (cache_argument(bare) is None):
        return f"the model's forward pass takes no {' and no '.join(missing)}"
    return None


def merge_settings(settings: GenerationConfig, own: GenerationConfig) -> dict[str, Any]:
    """Return the settings that are not None; the model's `own` fill those left open.

    Source: transformers 5.24, `GenerationMixin._prepare_generation_config`.
    """
    both = [config.to_dict().items() for config in (own, settings)]
    return {name: value for each in both for name, value in each if value is not None}


def read_decoding(
    settings: GenerationConfig, own: GenerationConfig, stops: StopStrings | None = None
) -> Decoding | None:
    """Return what to sample by; None if a setting needs plain `generate()`.

    Source: transformers 5.24, `GenerationMixin._get_logits_processor`.
    """
    values = merge_settings(settings, own)
    pad, longest = values.get("pad_token_id"), values.get("max_new_tokens")
    if find_beyond(values) or pad is None or longest is None:
        return None
    ends = values.get("eos_token_id", [])
    penalty, top_k = float(values.get("repetition_penalty", 1.0)), values.get("top_k", 50)
    top_p, min_p = values.get("top_p", 1.0), values.get("min_p")
    warpers = [
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1.0 else []),
        *([MinPLogitsWarper(min_p)] if min_p is not None else []),
    ]
    return Decoding(
        max_new_tokens=longest,
        eos_token_ids=ends if isinstance(ends, list) else [ends],
        pad_token_id=pad,
        greedy=not values.get("do_sample", False),
        temperature=float(values.get("temperature", 1.0)),
        processors=(RepetitionPenaltyLogitsProcessor(penalty),) if penalty != 1.0 else (),
        warpers=tuple(warpers),
        stops=stops,
    )


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    width: int = 1,
    entropies: bool = True,
) -> Sampled:
    """Sample a completion for each prompt; equal prompts are read once.

    Args:
        model: One without `unsupported_reason`, and without peft's wrapper; its adapters take part.
        prompts: Token ids; none is empty.
        width: The prompts are padded to a multiple of this many tokens.
    """
    longest = -(-max(map(len, prompts)) // width) * width
    ids, mask = pad_prompts(prompts, longest, decoding.pad_token_id, model.device)
    cache = DynamicCache(config=model.config)
    # `generate()` reads the rest. With dropout equal prompts are read with different neurons missing.
    alone = len(set(map(tuple, prompts))) == len(prompts) or (model.training and has_dropout(model))
    if longest > 1 and not alone:
        cache = read_prompts(model, prompts, ids, mask)
    # `generate()` fills what a configuration leaves open from the model's own.
    with grouped_heads(), replaced(model, generation_config=GenerationConfig()):
        return _continue(model, ids, mask, cache, decoding, entropies=entropies)


def pad_prompts(
    prompts: Sequence[Sequence[int]], width: int, pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids, padded on the left, and their mask, both `[sequences, width] int64`."""
    padding = [width - len(prompt) for prompt in prompts]
    rows = [
        [pad_token_id] * before + list(prompt)
        for before, prompt in zip(padding, prompts, strict=True)
    ]
    columns = torch.arange(width, device=device)
    mask = (columns >= torch.tensor(padding, device=device)[:, None]).long()
    return torch.tensor(rows, device=device), mask


def read_prompts(
    model: Any, prompts: Sequence[Sequence[int]], ids: torch.Tensor, mask: torch.Tensor
) -> DynamicCache:
    """Return keys and values of all prompt tokens but the last, for every row; equal prompts are read once."""
    cache = DynamicCache(config=model.config)
    first: dict[tuple[int, ...], int] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(tuple(prompt), row)
    distinct = list(first.values())
    seen = mask[distinct, :-1]
    model(
        input_ids=ids[distinct, :-1],
        attention_mask=seen,
        position_ids=(seen.cumsum(-1) - 1).clamp(min=0),
        use_cache=True,
        # None is needed: the last token is read next. 0 would keep all of them.
        logits_to_keep=1,
        **{str(cache_argument(model)): cache},
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
    """Append to prompts that have been read; repeat for the rows that go on after the others' end."""
    sampled = Sampled([[] for _ in ids], [[] for _ in ids])
    rows = list(range(len(ids)))
    left = decoding.max_new_tokens
    while rows and left > 0:
        before = ids.shape[1]
        draw = _Draw(decoding, entropies=entropies)
        criteria = [_EnoughEnded(decoding, ids), *([decoding.stops] if decoding.stops else [])]
        ids = model.generate(
            input_ids=ids,
            attention_mask=mask,
            # It takes the likeliest token, and `_Draw` leaves it one.
            generation_config=GenerationConfig(
                max_new_tokens=left,
                do_sample=False,
                pad_token_id=decoding.pad_token_id,
                eos_token_id=decoding.eos_token_ids or None,
                disable_compile=True,
            ),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList(criteria),
            **{str(cache_argument(model)): cache},
        )
        new = ids[:, before:]
        left -= new.shape[1]
        is_end = decoding.find_ends(ids, before)
        ended = is_end.any(dim=1)
        lengths = torch.where(ended, is_end.int().argmax(dim=1) + 1, new.shape[1]).tolist()
        noted = torch.stack(draw.entropies, dim=1).tolist() if entropies else [[]] * len(rows)
        for row, length, tokens, entropy in zip(rows, lengths, new.tolist(), noted, strict=True):
            sampled.completion_ids[row] += tokens[:length]
            sampled.entropies[row] += entropy[:length]
        going = (~ended).nonzero().squeeze(1)
        rows = [rows[place] for place in going.tolist()]
        if rows and left > 0:
            cache.batch_select_indices(going)
            ids = ids[going]
            mask = torch.cat([mask, mask.new_ones(len(mask), new.shape[1])], dim=1)[going]
    return sampled


class _EnoughEnded(StoppingCriteria):
    """Stops all rows once enough of them have ended, so that those can be left out."""

    def __init__(self, decoding: Decoding, ids: torch.Tensor) -> None:
        self._decoding = decoding
        self._ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._ended |= self._decoding.find_ends(input_ids, input_ids.shape[1] - 1)[:, 0]
        return (self._ended.float().mean() >= _ENDED_SHARE).expand(len(self._ended))


class _Draw(LogitsProcessor):
    """Draws the next token of each row and leaves only that one."""

    def __init__(self, decoding: Decoding, *, entropies: bool) -> None:
        self.entropies: list[torch.Tensor] = []
        """For each step `[sequences] float32`, in nats, if they are requested."""
        self._decoding = decoding
        self._notes_entropies = entropies

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        decoding = self._decoding
        adjusted = decoding.adjust(input_ids, scores)
        probabilities = None if decoding.greedy else adjusted.softmax(dim=-1)
        if self._notes_entropies:
            # Unless a setting changes it, what is drawn from is the whole distribution.
            if probabilities is None or decoding.processors or decoding.warpers:
                whole = (scores / decoding.temperature).softmax(dim=-1)
            else:
                whole = probabilities
            self.entropies.append(entropy(whole))
        if probabilities is None:
            return adjusted
        on_cpu = probabilities.device.type == "cpu"
        drawn = draw_tokens(probabilities) if on_cpu else torch.multinomial(probabilities, 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)
