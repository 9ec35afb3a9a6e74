"""Completions of many prompts at once, with what they have in common computed once.

Owns three savings that leave the distribution as it is: a prompt that is asked for several times is read
once; rows that have ended are left out while the others go on; and a token is drawn with one random number a
row. The loop over tokens stays transformers' `generate()`. Does not know the trainer.
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
from transformers.cache_utils import DynamicLayer

_KNOWN = frozenset(
    "max_new_tokens max_length do_sample temperature top_k top_p min_p repetition_penalty pad_token_id "
    "bos_token_id eos_token_id disable_compile transformers_version use_cache _from_model_config".split()
)
"""Settings that this file reads, or that change nothing; any other is `generate()`'s alone."""
_OFF = {"num_beams": 1, "num_return_sequences": 1, "typical_p": 1.0, "guidance_scale": 1.0}
"""Values that ask for nothing, where they are not `false`."""
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
    """Of each token: the entropy of the whole distribution at the sampling temperature, in nats."""


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
    if not asked.keys() <= _KNOWN or asked.get("use_cache") is False:
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
    """What a configuration asks for; not what it leaves open, nor what is off."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if value is not None and (name in _KNOWN or not (value is False or _OFF.get(name) == value))
    }


def _narrowing(asked: dict[str, Any]) -> tuple[LogitsProcessor, ...]:
    found: list[LogitsProcessor] = []
    if asked.get("top_k", 50):
        found.append(TopKLogitsWarper(asked.get("top_k", 50)))
    if asked.get("top_p", 1.0) < 1.0:
        found.append(TopPLogitsWarper(asked["top_p"]))
    if asked.get("min_p") is not None:
        found.append(MinPLogitsWarper(asked["min_p"]))
    return tuple(found)


def is_plain(model: Any) -> bool:
    """Whether a model reads text alone, and remembers all of it: keys and values of every token.

    Args:
        model: A causal language model of transformers, without peft's wrapper.
    """
    config = model.config
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        return False
    if not inspect.signature(model.forward).parameters.keys() >= _NEEDED:
        return False
    cache = DynamicCache(config=config)
    return all(type(layer) is DynamicLayer for layer in cache.layers)


@torch.no_grad()
def decode(
    model: Any, prompts: Sequence[Sequence[int]], decoding: Decoding, *, width: int = 1
) -> Sampled:
    """Samples a completion for each prompt; equal prompts are read once.

    Args:
        model: One of which `is_plain` is true, without peft's wrapper; its adapters take part.
        prompts: Token ids; none is empty.
        decoding: What to sample by.
        width: The prompts are padded to a multiple of this many tokens.
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
    return _continue(model, ids, mask, cache, decoding)


def _read_prompts(
    model: Any, prompts: Sequence[Sequence[int]], ids: torch.Tensor, mask: torch.Tensor
) -> DynamicCache:
    """Keys and values of all prompt tokens but the last, for every row."""
    cache = DynamicCache(config=model.config)
    first: dict[tuple[int, ...], int] = {}
    for row, prompt in enumerate(prompts):
        first.setdefault(tuple(prompt), row)
    if ids.shape[1] == 1:
        return cache
    if _has_dropout(model):
        # Equal prompts are read with different neurons missing.
        first = {(row,): row for row in range(len(prompts))}
    distinct = list(first.values())
    seen = mask[distinct, :-1]
    model(
        input_ids=ids[distinct, :-1],
        attention_mask=seen,
        position_ids=(seen.cumsum(-1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        # The words after a prompt come from its last token, which `generate()` reads.
        logits_to_keep=torch.empty(0, dtype=torch.long, device=ids.device),
    )
    if len(distinct) < len(prompts):
        place = {row: position for position, row in enumerate(distinct)}
        rows = [place[first[tuple(prompt)]] for prompt in prompts]
        cache.batch_select_indices(torch.tensor(rows, device=ids.device))
    return cache


def _has_dropout(model: Any) -> bool:
    if not model.training:
        return False
    drops = any(
        isinstance(module, torch.nn.Dropout) and module.p > 0 and module.training
        for module in model.modules()
    )
    return drops or bool(getattr(model.config, "attention_dropout", 0.0))


def _continue(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: DynamicCache,
    decoding: Decoding,
) -> Sampled:
    """Appends to prompts that have been read; again for the rows that go on after the others' end."""
    found = Sampled([[] for _ in ids], [[] for _ in ids])
    rows = list(range(len(ids)))
    left = decoding.max_new_tokens
    ends = torch.tensor(decoding.eos_token_ids, device=ids.device)
    while rows and left > 0:
        before = ids.shape[1]
        draw = Draw(decoding)
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
        entropies = torch.stack(draw.entropies, dim=1).tolist()
        for row, length, tokens, entropy in zip(
            rows, lengths.tolist(), new.tolist(), entropies, strict=True
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
    """`generate()` takes the likeliest token, and `Draw` leaves it one.

    What `Draw` sees to is spelled out as off: `generate()` fills what is left open from the model's own.
    """
    return GenerationConfig(
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        repetition_penalty=1.0,
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


class Draw(LogitsProcessor):
    """Draws the next token of each row and leaves only that one; notes how open the choice was."""

    def __init__(self, decoding: Decoding) -> None:
        self.entropies: list[torch.Tensor] = []
        """For each step `[sequences] float32`, in nats."""
        self._decoding = decoding
        self._penalty = (
            RepetitionPenaltyLogitsProcessor(decoding.repetition_penalty)
            if decoding.repetition_penalty != 1.0
            else None
        )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores of a step, `[sequences, vocabulary] float32`, as `generate()` goes on with them."""
        decoding = self._decoding
        chances = (scores / decoding.temperature).softmax(dim=-1)
        self.entropies.append(torch.special.entr(chances).sum(dim=-1))
        if self._penalty is not None:
            scores = self._penalty(input_ids, scores)
        if decoding.greedy:
            return scores
        if self._penalty is not None or decoding.narrowing:
            scores = scores / decoding.temperature
            for narrow in decoding.narrowing:
                scores = narrow(input_ids, scores)
            chances = scores.softmax(dim=-1)
        return torch.full_like(scores, -torch.inf).scatter_(1, draw(chances), 0.0)


class EnoughEnded(StoppingCriteria):
    """Stops all rows once enough of them have ended, so that those can be left out."""

    def __init__(self, rows: int, ends: torch.Tensor) -> None:
        self._ends = ends
        self._ended = torch.zeros(rows, dtype=torch.bool, device=ends.device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """For each row `[sequences] bool` whether it stops here."""
        self._ended |= torch.isin(input_ids[:, -1], self._ends)
        return (self._ended.float().mean() >= _ENDED_SHARE).expand(len(self._ended))


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
