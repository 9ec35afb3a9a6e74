"""The layout of a batch as one row of tokens: no padding, and each distinct prompt once. Indices alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import embedding_bag

Padded = tuple[np.ndarray, np.ndarray]
"""A padded batch on the host: token ids `[rows, width] int64`, and 1 at tokens."""
_FULL = 0.7
"""A segment shorter than this share of a rectangle's width begins a rectangle of its own."""


@dataclass(frozen=True)
class Gather:
    """Copies rows by their index; the gradient of a row is the sum over its copies."""

    index: torch.Tensor
    """`[copies] int64`: the row of each."""
    copies: torch.Tensor
    """`[copies] int64`: the copies in the order of their rows."""
    starts: torch.Tensor
    """`[rows + 1] int64`: where those of each row begin."""

    @classmethod
    def of(cls, index: torch.Tensor, rows: int) -> "Gather":
        """Return the gathering of `index` from a number of rows."""
        ordered, copies = index.sort(stable=True)
        starts = torch.searchsorted(ordered, torch.arange(rows + 1, device=index.device))
        return cls(index, copies, starts)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[copies, …]` of `[rows, …]`."""
        gathered: torch.Tensor = _Gathered.apply(values, self)
        return gathered


class _Gathered(torch.autograd.Function):
    """Autograd's own gradient of indexing adds up in any order on a GPU, and is slow on a CPU."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, gather: Gather) -> torch.Tensor:
        ctx.gather = gather
        return values.index_select(0, gather.index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A bag of embeddings is a sum of rows, of 16 bits too in float32 and always in the same order.
        gather, flat = ctx.gather, grad.flatten(1)
        summed = embedding_bag(
            gather.copies, flat, gather.starts, mode="sum", include_last_offset=True
        )
        return summed.unflatten(1, grad.shape[1:]), None


@dataclass(frozen=True)
class Block:
    """Segments side by side, padded on the right, that see equally many tokens before themselves."""

    segments: int
    width: int
    """Tokens of the longest."""
    before: int
    """Tokens on the path of each before itself."""
    mask: torch.Tensor | None
    """What hides later tokens, for torch's attention; None if it is its `is_causal`."""


@dataclass(frozen=True)
class Rectangles:
    """Blocks end to end, for attention that knows no lengths; padding repeats a segment's last token."""

    blocks: tuple[Block, ...]
    queries: Gather
    """From the row to the cells of all `[segments, width]`."""
    keys: Gather
    """From the row to the cells of all `[segments, before + width]`."""
    outputs: Gather
    """From the cells of queries back to the row."""


@dataclass(frozen=True)
class Segments:
    """Segments of a row, end to end. A token sees its segment's path up to itself.

    A path is other tokens of the row, then the segment's own. The names are those of attention kernels and of TRL.
    """

    kv_index: torch.Tensor
    """`[K] int64`: the places in the row of all paths, end to end."""
    cu_seqlens_q: torch.Tensor
    """`[segments + 1] int32`: where segments begin in the row."""
    cu_seqlens_k: torch.Tensor
    """`[segments + 1] int32`: where their paths begin in `kv_index`."""
    max_seqlen_q: int
    max_seqlen_k: int
    tokens: int

    @cached_property
    def keys(self) -> Gather:
        """From the row to all paths."""
        return Gather.of(self.kv_index, self.tokens)

    @cached_property
    def rectangles(self) -> Rectangles:
        """The segments side by side."""
        return _spread(self)


@dataclass(frozen=True)
class Layout:
    """One row of `T` tokens: distinct prompts, each followed by its completions without their last token.

    The last token predicts nothing that is learned from. Tensors are int64 and on the model's device.
    """

    tokens: torch.Tensor
    """`[1, T]`: token ids."""
    positions: torch.Tensor
    """`[1, T]`: the column of each token in the padded batch, which is its position for the model there too."""
    segments: Segments
    """Prompts, which see themselves, and completions of more than one token, which see their prompt too."""
    scored: torch.Tensor
    """`[N]`: the places that predict the `N` tokens of completions."""
    targets: torch.Tensor
    """`[1, N]`: the predicted tokens."""
    origins: torch.Tensor
    """`[N]`: their indices in the flattened `[rows, completion columns]` of the padded batch."""


def read_padded(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Padded:
    """Return a padded batch on the host, read from the device in one copy."""
    ids, mask = torch.stack([input_ids, attention_mask.to(input_ids.dtype)]).cpu().numpy()
    return ids, mask


def lay_out(padded: Padded, completion_width: int, device: torch.device) -> Layout | None:
    """Lay out a padded batch.

    Args:
        padded: Prompts, padded on the left, and completions, padded on the right.

    Returns:
        The layout; None if tokens and padding alternate, or no completion has a token.
    """
    ids, present = padded[0], padded[1].astype(bool)
    width = ids.shape[1]
    edge = width - completion_width
    prompt_lengths, lengths = present[:, :edge].sum(1), present[:, edge:].sum(1)
    columns = np.arange(width)
    expected = (columns >= (edge - prompt_lengths)[:, None]) & (columns < (edge + lengths)[:, None])
    if not lengths.any() or not prompt_lengths.all() or (present != expected).any():
        return None
    return _lay_out(ids, prompt_lengths, lengths, edge, device)


def _lay_out(
    ids: np.ndarray,
    prompt_lengths: np.ndarray,
    lengths: np.ndarray,
    edge: int,
    device: torch.device,
) -> Layout:
    """Lay out `ids`, whose prompts end and whose completions begin at the column `edge`."""
    width = ids.shape[1]
    # Tokens of the row and predicted tokens, as indices in the flattened batch.
    sources, targets, end = list[np.ndarray](), list[np.ndarray](), 0
    spans, paths, scored = list[int](), list[np.ndarray](), list[np.ndarray]()

    def put(first: int, count: int) -> np.ndarray:
        nonlocal end
        sources.append(np.arange(first, first + count))
        end += count
        return np.arange(end - count, end)

    for same in group_rows(ids[:, :edge], prompt_lengths.tolist()):
        length = int(prompt_lengths[same[0]])
        prompt = put(same[0] * width + edge - length, length)
        spans.append(length)
        paths.append(prompt)
        for row, length in ((row, int(lengths[row])) for row in same if lengths[row]):
            places = put(row * width + edge, length - 1)
            if length > 1:
                spans.append(length - 1)
                paths.append(np.concatenate([prompt, places]))
            scored.append(np.concatenate([prompt[-1:], places]))
            targets.append(row * width + edge + np.arange(length))
    source, target = np.concatenate(sources), np.concatenate(targets)
    origins = target // width * (width - edge) + target % width - edge
    path_lengths = list(map(len, paths))
    starts, path_starts = (np.cumsum([0, *each]) for each in (spans, path_lengths))
    token_ids, positions, path, begins, path_begins, predicting, predicted, origins = upload(
        [
            ids.flat[source],
            source % width,
            np.concatenate(paths),
            starts,
            path_starts,
            np.concatenate(scored),
            ids.flat[target],
            origins,
        ],
        device,
    )
    segments = Segments(
        path, begins.int(), path_begins.int(), max(spans), max(path_lengths), len(source)
    )
    return Layout(token_ids[None], positions[None], segments, predicting, predicted[None], origins)


def upload(arrays: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    """Copy lists of int64 to a device in one piece; to a GPU from pinned memory, without waiting."""
    whole = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
    if device.type == "cuda":
        whole = whole.pin_memory()
    return list(whole.to(device, non_blocking=True).split([len(array) for array in arrays]))


def group_rows(prompt_ids: np.ndarray, prompt_lengths: Sequence[int]) -> list[list[int]]:
    """Return the rows of each distinct prompt, in the order in which the prompts appear.

    Args:
        prompt_ids: `[rows, width]`, padded on the left.
        prompt_lengths: `[rows]`: tokens of each prompt.
    """
    width = prompt_ids.shape[1]
    groups: dict[bytes, list[int]] = {}
    for row, length in enumerate(prompt_lengths):
        groups.setdefault(prompt_ids[row, width - length :].tobytes(), []).append(row)
    return list(groups.values())


def _spread(segments: Segments) -> Rectangles:
    """Put segments of similar length, with equally many tokens before them, side by side."""
    device = segments.kv_index.device
    starts, path_starts = (
        each.cpu().numpy().astype(np.int64)
        for each in (segments.cu_seqlens_q, segments.cu_seqlens_k)
    )
    path, lengths = segments.kv_index.cpu().numpy(), np.diff(starts)
    before = np.diff(path_starts) - lengths
    blocks, queries, keys, cells = [], [], [], np.zeros(segments.tokens, dtype=np.int64)
    cell = 0
    for chosen in _bucket(before, lengths):
        width, shared, own = int(lengths[chosen[0]]), int(before[chosen[0]]), lengths[chosen, None]
        columns = np.arange(width)
        places = starts[chosen, None] + np.minimum(columns, own - 1)
        cells[places[columns < own]] = cell + np.flatnonzero(columns < own)
        cell += places.size
        queries.append(places.ravel())
        seen = np.minimum(np.arange(shared + width), shared + own - 1)
        keys.append(path[path_starts[chosen, None] + seen].ravel())
        blocks.append(Block(len(chosen), width, shared, _make_mask(width, shared, device)))
    to_cells, to_keys = np.concatenate(queries), np.concatenate(keys)
    at_cells, at_keys, back = upload([to_cells, to_keys, cells], device)
    return Rectangles(
        tuple(blocks),
        Gather.of(at_cells, segments.tokens),
        Gather.of(at_keys, segments.tokens),
        Gather.of(back, cell),
    )


def _bucket(before: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """Return the numbers of the segments of each block, the longest first."""
    buckets: list[list[int]] = []
    order = sorted(range(len(lengths)), key=lambda number: (before[number], -lengths[number]))
    for _, same in groupby(order, key=lambda number: before[number]):
        longest = 0
        for number in same:
            if lengths[number] < _FULL * longest or not longest:
                longest = lengths[number]
                buckets.append([])
            buckets[-1].append(number)
    return buckets


def _make_mask(width: int, before: int, device: torch.device) -> torch.Tensor | None:
    if not before:
        return None
    if device.type != "cpu":
        return causal_lower_right(width, before + width)
    # Of a mask of booleans, each layer would make and keep one of sums.
    return torch.full((width, before + width), -torch.inf).triu(before + 1)
