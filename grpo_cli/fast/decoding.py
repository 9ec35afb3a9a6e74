"""Samples completions of many prompts at once: equal prompts are read once, and ended rows are left out.

Both leave the distribution as it is. The loop over tokens stays transformers' `generate()`. At the end: for which
models less work is exact, by features that were tested and by a trial on the loaded model.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
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
from grpo_cli.fast.tokens import StopStrings
from grpo_cli.recipe.training import find_beyond
from grpo_cli.upstream import replaced
from grpo_cli.upstream.transformers import cache_argument

NO_NUMBERS = "probability tensor contains either `inf`, `nan` or element < 0"
"""What `torch.multinomial` says (torch 2.13)."""
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


_LAYERS = frozenset({"full_attention"})
_ROTARY = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""Kinds of rotary positions that stay the same whatever the longest row of a call is.

Source: `transformers.modeling_rope_utils.dynamic_rope_update`, 5.17, for those that do not."""
_ABSOLUTE = "llama_4_scaling_beta"
"""Rotary setting by which attention also depends on the column of a token."""
_TOLERANCE = 1e-3
"""Largest difference of log-probabilities in float32, in nats; rounding makes 2e-5 (SmolLM2-135M)."""
_NOISE = 3.0
"""How many times the mean difference in 16 bits may exceed the one that more padding makes in TRL's own pass."""
_SHIFT = 0.3
"""Largest mean difference in 16 bits that more padding may make, in nats; rounding makes 0.06 (SmolLM2-135M in
bfloat16)."""

Reader = Callable[[torch.Tensor, torch.Tensor, int], Any]
"""Token ids and mask, both `[rows, width]`, and the columns of completions, to log-probabilities first."""


def find_batch_tie(config: Any, *, windows: bool = False) -> str | None:
    """Return why a token may depend on the batch it is computed in; None if all features are known not to."""
    kinds = set(getattr(config, "layer_types", None) or ())
    known = _LAYERS | {"sliding_attention"} if windows else _LAYERS
    if other := kinds - known:
        return f"the model has layers of the kind {', '.join(sorted(other))}"
    if getattr(config, "sliding_window", None) and not kinds and not windows:
        return "the model has sliding windows"
    for parameters in _rotary_parameters(config):
        if parameters.get("rope_type", "default") not in _ROTARY:
            return f"positions ({parameters['rope_type']}) may depend on the longest row of a batch"
    if getattr(config, "index_topk", None):
        return "which tokens attention chooses depends on the width of a batch"
    return None


def sharing_unsupported_reason(model: Any, bare: Any) -> str | None:
    """Return why prompts cannot be shared, by the model's features; None if they can."""
    config = bare.config.get_text_config()
    if config is not bare.config and getattr(bare.config, "vision_config", None) is not None:
        return "the model reads images"
    if (tie := find_batch_tie(config) or find_prompt_ties(model)) is not None:
        return tie
    if has_dropout(model):
        return (
            "dropout differs between copies of a prompt (`training.disable_dropout: true` turns off that of "
            "dropout layers)"
        )
    return None


def has_dropout(model: Any) -> bool:
    """Return whether a layer of a `torch.nn.Module` drops neurons in training, or adds noise."""
    return any(
        isinstance(share, float) and share > 0
        for module in model.modules()
        for share in _dropout_shares(module)
    )


def _dropout_shares(module: Any) -> Iterator[Any]:
    """`p` of torch's dropout layers, and attributes named after dropout or jitter."""
    if "dropout" in type(module).__name__.lower():
        yield float(getattr(module, "p", 0.0))
    yield from (value for name, value in vars(module).items() if "drop" in name or "jitter" in name)


def _rotary_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """Settings of rotary positions: some models have one set of them for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, Mapping):
        yield parameters
        yield from (each for each in parameters.values() if isinstance(each, Mapping))


def _is_relative(config: Any) -> bool:
    """Return whether positions count only relative to each other."""
    return hasattr(config, "rope_parameters") and not any(
        each.get(_ABSOLUTE) for each in _rotary_parameters(config)
    )


def ignores_padding(plain: Reader, *, bare: Any, coarse: bool) -> bool:
    """Return whether columns that are padding in every row change nothing; `coarse` is a model in 16 bits."""
    config = bare.config.get_text_config()
    if find_batch_tie(config, windows=True) is not None or not _is_relative(config):
        return False
    ids, mask, width = _make_rows(config.vocab_size, bare.device)
    with torch.no_grad():
        expected = plain(ids, mask, width)[0]
        padded = plain(pad(ids, (3, 2)), pad(mask, (3, 2)), width + 2)[0][:, :width]
    differences = (expected - padded)[mask[:, -width:].bool()].abs()
    if coarse:
        return float(differences.mean()) <= _SHIFT
    return float(differences.max()) <= _TOLERANCE


def find_difference(plain: Reader, packed: Reader, *, bare: Any, coarse: bool) -> str | None:
    """Return how a pass differs from TRL's on a few random tokens; `coarse` is a model in 16 bits."""
    config = bare.config.get_text_config()
    if coarse and not hasattr(config, "rope_parameters"):
        return "with learned positions in 16 bits, the trial cannot tell a difference from rounding"
    ids, mask, width = _make_rows(config.vocab_size, bare.device)
    present = mask[:, -width:].bool()
    with torch.no_grad():
        expected = plain(ids, mask, width)[0]
        try:
            values = packed(ids, mask, width)[0]
        except NotImplementedError as error:
            return str(error)
        except (
            Exception
        ) as error:  # a model's code raises anything for a layout it was not written for
            return f"the model's code does not take it ({type(error).__name__})"
        differences = (expected - values)[present].abs()
        difference, tolerance = float(differences.max()), _TOLERANCE
        if coarse:
            padded = plain(pad(ids, (3, 0)), pad(mask, (3, 0)), width)[0]
            noise = float((expected - padded)[present].abs().mean())
            difference, tolerance = float(differences.mean()), _NOISE * noise
    if difference <= tolerance:
        return None
    return (
        f"log-probabilities differ by {difference:.2g} in a trial, and {tolerance:.2g} is rounding"
    )


def _make_rows(vocabulary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Two prompts of 9 and 6 tokens, with completions of 7, 4, 1 and of 5 and 2 tokens."""
    generator = torch.Generator().manual_seed(0)
    edge, width = 9, 7
    rows = [(0, 9, 7), (0, 9, 4), (0, 9, 1), (3, 6, 5), (3, 6, 2)]  # first of the prompt, lengths
    ids = torch.randint(vocabulary, (len(rows), edge + width), generator=generator)
    mask = torch.zeros_like(ids)
    for row, (first, prompt, completion) in enumerate(rows):
        ids[row, :edge] = ids[first, :edge]
        mask[row, edge - prompt : edge + completion] = 1
    return ids.to(device), mask.to(device), width


def without_wrapper(model: Any) -> Any:
    """Return the model into which peft has put its layers; the model itself if it has none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_prompt_ties(model: Any) -> str | None:
    """Return why an adapter must see the prompt whole; None if it need not.

    Source: peft 0.21, `PeftModelForCausalLM.forward`, and `alora_invocation_tokens` of its `LoraConfig`.
    """
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        if adapter.is_prompt_learning:
            return "the adapter puts tokens of its own before the prompt"
        if getattr(adapter, "alora_invocation_tokens", None):
            return "the adapter begins at tokens that it looks for in the prompt"
    return None


def draw_tokens(probabilities: torch.Tensor) -> torch.Tensor:
    """Draw one token of each row by its probabilities.

    `torch.multinomial` takes a random number for every word of the vocabulary; this takes one for every row,
    looked up in the running sum. In float64, so that the smallest probability keeps its share.

    Args:
        probabilities: `[sequences, vocabulary] float32`, each row adding up to 1.

    Returns:
        `[sequences, 1] int64`.

    Raises:
        RuntimeError: The probabilities are not numbers.
    """
    reached = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = reached[:, -1:]
    if not torch.isfinite(total).all():
        raise RuntimeError(NO_NUMBERS)
    return torch.searchsorted(reached, torch.rand_like(total) * total, right=True)
