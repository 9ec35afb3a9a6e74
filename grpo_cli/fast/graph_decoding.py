"""Samples with one step of fixed shapes for every token, which a GPU replays as a CUDA graph.

The distribution is that of `decoding.py`, but adapters are merged in a copy of the weights, as for vLLM: in 16
bits the sum is rounded. Graphs live as long as a batch is sampled, so that learning has their memory.

Source: torch 2.13, `torch.cuda.CUDAGraph`; Maddison et al. 2014 (arXiv:1411.0030), section 2 (Gumbel-max trick).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch.nn.functional import pad
from transformers.cache_utils import Cache, StaticLayer

from grpo_cli.fast.attention import grouped_heads
from grpo_cli.fast.decoding import (
    NO_NUMBERS,
    Decoding,
    Sampled,
    entropy,
    has_dropout,
    pad_prompts,
    read_prompts,
    without_wrapper,
)
from grpo_cli.models.weights import merge_copy
from grpo_cli.upstream.transformers import attention_name, cache_argument

MODELS = frozenset(
    {"gemma", "gpt2", "granite", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"}
)
"""The `model_type`s that are tested. Routers of experts and other positions may need values on the host."""
_CHECK_EVERY = 32
"""Tokens between two checks whether all rows have ended: each waits for the GPU."""
_ROOM = 512
"""Tokens that the first cache has room for. Each further cache has twice as many, for the rows that are left."""
_WARM_UP = 2
"""Tokens before the capture, in which libraries allocate what a graph must not hold."""
_ALIGNMENT = 64
"""The cache's length is a multiple of it, as attention kernels want their masks."""
Past = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, `[sequences, key heads, tokens, width]`."""


def graph_unsupported_reason(model: Any) -> str | None:
    """Return why a token cannot be one replayed CUDA graph; None if it can."""
    bare = without_wrapper(model)
    if bare.config.model_type not in MODELS:
        return f"not tested with models of the type {bare.config.model_type}"
    if (attention := attention_name(bare)) != "sdpa":
        return f"attention {attention} needs other masks"
    if getattr(bare, "is_quantized", False):
        return "adapters cannot be merged in a copy of quantized weights"
    if has_dropout(model):
        return "dropout in an adapter ends when it is merged"
    return None if bare.device.type == "cuda" else "there is no GPU"


def cached_tokens(prompt_tokens: int, completion_tokens: int) -> int:
    """Return the most tokens of a row whose keys and values are held: of a cache and of the next one."""
    most, before, held = 0, prompt_tokens, prompt_tokens
    for room in _rooms(completion_tokens):
        before += room
        most, held = max(most, held + _align(before)), _align(before)
    return most


def _rooms(tokens: int) -> Iterator[int]:
    """Return the tokens that each cache adds room for, until there is room for all."""
    room = _ROOM
    while tokens > 0:
        yield min(room, tokens)
        tokens, room = tokens - room, 2 * room


def _align(tokens: int) -> int:
    return -(-tokens // _ALIGNMENT) * _ALIGNMENT


@torch.no_grad()
def decode_with_graphs(
    model: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    width: int = 1,
    entropies: bool = True,
) -> Sampled:
    """Sample a completion for each prompt; arguments and result as for `decode`.

    On a CPU the steps are computed one by one, without a graph.
    """
    # One column is for the cache, so that it is not empty.
    longest = -(-max(2, *map(len, prompts)) // width) * width
    ids, mask = pad_prompts(prompts, longest, decoding.pad_token_id, model.device)
    with grouped_heads(), merged_adapters(model):
        layers = iter(read_prompts(model, prompts, ids, mask).layers)
        past = ((layer.keys, layer.values) for layer in layers)
        return _continue(model, ids, mask, past, decoding, entropies=entropies)


def _continue(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    past: Past,
    decoding: Decoding,
    *,
    entropies: bool,
) -> Sampled:
    """Append to prompts that have been read; repeat with more room for the rows that have not ended."""
    sampled = Sampled([[] for _ in ids], [[] for _ in ids])
    rows, left = list(range(len(ids))), decoding.max_new_tokens
    for room in _rooms(left):
        steps = _Steps(model, ids, mask, past, decoding, room, entropies=entropies)
        new, noted, ends = steps.run()
        going = []
        for place, (row, tokens, is_end) in enumerate(zip(rows, new, ends, strict=True)):
            length = is_end.index(True) + 1 if True in is_end else None
            sampled.completion_ids[row] += tokens[:length]
            sampled.entropies[row] += noted[place][:length]
            if length is None:
                going.append(place)
        rows, left = [rows[place] for place in going], left - room
        if not rows or left == 0:
            break
        keep = torch.tensor(going, device=ids.device)
        mask = torch.cat([mask, mask.new_ones(len(mask), room)], dim=1)[keep]
        ids, past = steps.select(keep)
    return sampled


class _Steps:
    """What a step reads and writes, at addresses that stay."""

    def __init__(
        self,
        model: Any,
        ids: torch.Tensor,
        mask: torch.Tensor,
        past: Past,
        decoding: Decoding,
        room: int,
        *,
        entropies: bool,
    ) -> None:
        rows, self._before = ids.shape
        self._model, self._decoding, self._room = model, decoding, room
        length = _align(self._before + room)
        self._token = ids[:, -1:].clone()  # [sequences, 1] int64
        self._position = mask.sum(dim=1, keepdim=True) - 1  # [sequences, 1] int64
        self._column = torch.tensor([self._before - 1], device=ids.device)  # of the token
        # Columns without a token repeat one, which a penalty on repetition counts anyway.
        self._ids = torch.cat([ids, self._token.expand(-1, length - self._before)], dim=1)
        self._cache = Cache(layers=[_FixedLayer(*each, length, self._column) for each in past])
        self._cache_argument = {str(cache_argument(model)): self._cache}
        hidden = pad(mask, (0, length - self._before))[:, None, None] == 0
        # Not a mask of bool, which attention would convert in every layer.
        bias = torch.zeros_like(hidden, dtype=self._cache.layers[0].keys.dtype)
        self._bias = bias.masked_fill_(hidden, -torch.inf)
        self._scores = torch.zeros(rows, 1, device=ids.device)
        """Sums of the scores of the drawn tokens, which show whether one was not a number."""
        self._entropies = self._scores.new_zeros(rows, length) if entropies else None

    def run(self) -> tuple[list[list[int]], list[list[float]], list[list[bool]]]:
        """Sample until all rows have ended or the room is used up.

        Returns:
            Tokens of each row, their entropies if they were requested, and whether each ends the row; those behind
            an end count for nothing.

        Raises:
            RuntimeError: The probabilities are not numbers.
        """
        step: Callable[[], None] = self._step
        for done in range(1, self._room + 1):
            if done == _WARM_UP + 1:
                step = capture(step, self._ids.device)
            step()
            new = slice(self._before, self._before + done)
            if done % _CHECK_EVERY == 0 and bool(self._find_ends(new).any(dim=1).all()):
                break
        if not self._scores.isfinite().all():
            raise RuntimeError(NO_NUMBERS)
        tokens = self._ids[:, new].tolist()
        ends = self._find_ends(new).tolist()
        if self._entropies is None:
            return tokens, [[] for _ in tokens], ends
        return tokens, self._entropies[:, new].tolist(), ends

    def _find_ends(self, new: slice) -> torch.Tensor:
        return self._decoding.find_ends(self._ids[:, : new.stop], new.start)

    def select(self, rows: torch.Tensor) -> tuple[torch.Tensor, Past]:
        """Return what the next steps of some rows begin with, once the room is used up.

        Returns:
            Their token ids, and keys and values of all but the last token.
        """
        width = self._before + self._room
        past = (
            (layer.keys[rows, :, : width - 1], layer.values[rows, :, : width - 1])
            for layer in self._cache.layers
        )
        return self._ids[rows, :width], past

    def _step(self) -> None:
        """Sample a token of each row. Nothing here may depend on values, since the graph repeats it as it is."""
        self._bias.index_fill_(3, self._column, 0.0)
        output = self._model(
            input_ids=self._token,
            attention_mask=self._bias,
            position_ids=self._position,
            use_cache=True,
            logits_to_keep=1,
            **self._cache_argument,
        )
        logits = output.logits[:, -1].float()
        self._column += 1
        self._position += 1
        if self._entropies is not None:
            whole = (logits / self._decoding.temperature).softmax(dim=-1)
            self._entropies.index_copy_(1, self._column, entropy(whole)[:, None])
        scores = self._decoding.adjust(self._ids, logits)
        if not self._decoding.greedy:
            # The highest of the scores with Gumbel noise is distributed by their softmax.
            scores = scores - torch.empty_like(scores).exponential_().log_()
        highest, self._token[:] = scores.max(dim=-1, keepdim=True)
        self._scores += highest
        self._ids.index_copy_(1, self._column, self._token)


class _FixedLayer(StaticLayer):
    """Keys and values of a layer, which writes at the column of all layers instead of counting for itself."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, length: int, column: torch.Tensor
    ) -> None:
        super().__init__(max_cache_len=length)
        room = (0, 0, 0, length - keys.shape[2])
        self.keys, self.values = pad(keys, room), pad(values, room)
        self.cumulative_length = column
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a token, and return those of all columns."""
        self.keys.index_copy_(2, self.cumulative_length, key_states)
        self.values.index_copy_(2, self.cumulative_length, value_states)
        return self.keys, self.values


def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return what repeats a step: the replay of its CUDA graph, which draws on torch's generator; or the step."""
    if device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU meanwhile: a reward model, or NCCL's watchdog.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


@contextmanager
def merged_adapters(model: Any) -> Iterator[None]:
    """Compute with LoRA adapters merged in copies of their layers' weights; the weights stay untouched."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    bases = [layer.get_base_layer() for layer in layers]
    weights = [dict(base.named_parameters(recurse=False)) for base in bases]
    try:
        for layer, base in zip(layers, bases, strict=True):
            for name, total in merge_copy(layer).items():
                setattr(base, name, torch.nn.Parameter(total, requires_grad=False))
            layer.merged_adapters.extend(layer.active_adapters)
        yield
    finally:
        for layer, base, own in zip(layers, bases, weights, strict=True):
            layer.merged_adapters.clear()
            for name, weight in own.items():
                setattr(base, name, weight)
