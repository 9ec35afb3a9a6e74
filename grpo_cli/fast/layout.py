"""Where the tokens of a batch stand in one row: no padding, and every prompt but once.

Owns the arithmetic of indices. What attends to what with them is `attention.py`'s, what is computed from
the row `log_probs.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_FULL = 0.7
"""Share of a rectangle's width below which a completion begins a rectangle of its own."""


@dataclass(frozen=True)
class Block:
    """Completions of about the same length, whose attention is computed together.

    All tensors are on the model's device.
    """

    shape: tuple[int, int]
    """`(R, C)`: completions, and tokens of the longest."""
    prompt_of: torch.Tensor
    """`[R] int64`: which of the prompts a completion belongs to."""
    visible: torch.Tensor
    """`[R or 1, 1, C, P + C] bool`: which places of its prompt and of itself a completion's token sees."""


@dataclass(frozen=True)
class Layout:
    """One row of `T` tokens: `U` distinct prompts, and behind each its completions without their last token,
    which predicts nothing that is learned from.

    For attention the row is spread over rectangles, one of prompts `[U, P]` and one a block `[R, C]`, padded on
    the right; laid end to end they have `S` cells. All tensors are int64 and on the model's device.
    """

    tokens: torch.Tensor
    """`[1, T]`: token ids."""
    positions: torch.Tensor
    """`[1, T]`: the column of each token in the padded batch, which is its position for the model there too."""
    prompts: tuple[int, int]
    """`(U, P)`: distinct prompts, and tokens of the longest."""
    blocks: tuple[Block, ...]
    """The completions of more than one token."""
    places: torch.Tensor
    """`[S]`: the place in the row of what stands in each cell; in padding, some place."""
    padding: torch.Tensor
    """The cells that are padding."""
    cells: torch.Tensor
    """`[T]`: the cell of each token of the row."""
    scored: torch.Tensor
    """`[N]`: the places that predict the `N` tokens of completions."""
    targets: torch.Tensor
    """`[1, N]`: the predicted tokens."""
    origins: torch.Tensor
    """`[N]`: where in the flattened `[rows, completion columns]` of the padded batch they stand."""


def lay_out(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_width: int
) -> Layout | None:
    """Lays out a padded batch.

    Args:
        input_ids: `[rows, width] int64`: prompts, padded on the left, and completions, padded on the right.
        attention_mask: `[rows, width]`: 1 where there is a token.
        completion_width: Columns of completions.

    Returns:
        The layout; None where tokens and padding alternate, or no completion has a token.
    """
    ids, present = input_ids.cpu().numpy(), attention_mask.cpu().numpy().astype(bool)
    edge = ids.shape[1] - completion_width
    prompt_lengths, lengths = present[:, :edge].sum(1), present[:, edge:].sum(1)
    if not lengths.any() or not _is_contiguous(present, edge, prompt_lengths, lengths):
        return None
    row = _Row(ids, edge)
    for rows in group_rows(ids[:, :edge], prompt_lengths):
        row.add(rows[0], int(prompt_lengths[rows[0]]), [(one, int(lengths[one])) for one in rows])
    return row.finish(input_ids.device)


def group_rows(prompt_ids: np.ndarray, prompt_lengths: np.ndarray) -> list[list[int]]:
    """Rows of equal prompts, in the order in which the prompts appear.

    Args:
        prompt_ids: `[rows, width] int64`, padded on the left.
        prompt_lengths: `[rows]`: tokens of each prompt.
    """
    width = prompt_ids.shape[1]
    found: dict[bytes, list[int]] = {}
    for row, length in enumerate(prompt_lengths):
        found.setdefault(prompt_ids[row, width - length :].tobytes(), []).append(row)
    return list(found.values())


def _is_contiguous(
    present: np.ndarray, edge: int, prompt_lengths: np.ndarray, lengths: np.ndarray
) -> bool:
    columns = np.arange(present.shape[1])
    first, behind = (edge - prompt_lengths)[:, None], (edge + lengths)[:, None]
    return bool(
        prompt_lengths.all() and (present == ((columns >= first) & (columns < behind))).all()
    )


class _Row:
    """Collects the row, prompt by prompt."""

    def __init__(self, ids: np.ndarray, edge: int) -> None:
        self._ids, self._edge, self._end = ids, edge, 0
        self._tokens: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._prompts: list[np.ndarray] = []
        self._completions: list[tuple[int, np.ndarray]] = []
        self._scored: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []
        self._origins: list[np.ndarray] = []

    def add(self, first: int, prompt_length: int, completions: Sequence[tuple[int, int]]) -> None:
        """Puts a prompt, which stands in row `first` of the batch, and its completions: rows and lengths."""
        width = self._ids.shape[1] - self._edge
        prompt = self._put(first, self._edge - prompt_length, self._edge)
        for row, length in completions:
            if length == 0:
                continue
            behind = self._edge + length
            places = self._put(row, self._edge, behind - 1)
            if length > 1:
                self._completions.append((len(self._prompts), places))
            self._scored.append(np.concatenate([prompt[-1:], places]))
            self._targets.append(self._ids[row, self._edge : behind])
            self._origins.append(row * width + np.arange(length))
        self._prompts.append(prompt)

    def _put(self, row: int, first: int, behind: int) -> np.ndarray:
        self._tokens.append(self._ids[row, first:behind])
        self._positions.append(np.arange(first, behind))
        places = np.arange(self._end, self._end + behind - first)
        self._end += behind - first
        return places

    def finish(self, device: torch.device) -> Layout:
        """The layout of all that was put."""

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device)

        rectangles = [self._prompts]
        blocks = []
        longest = max(map(len, self._prompts))
        for members in _bucket(self._completions):
            rectangles.append([places for _, places in members])
            width = len(rectangles[-1][0])
            visible = _see([len(self._prompts[number]) for number, _ in members], longest, width)
            blocks.append(
                Block(
                    (len(members), width),
                    tensor(np.array([number for number, _ in members])),
                    torch.from_numpy(visible).to(device),
                )
            )
        places, cells = _spread(rectangles, self._end)
        return Layout(
            tokens=tensor(np.concatenate(self._tokens))[None],
            positions=tensor(np.concatenate(self._positions))[None],
            prompts=(len(self._prompts), longest),
            blocks=tuple(blocks),
            places=tensor(np.maximum(places, 0)),
            padding=tensor(np.flatnonzero(places < 0)),
            cells=tensor(cells),
            scored=tensor(np.concatenate(self._scored)),
            targets=tensor(np.concatenate(self._targets))[None],
            origins=tensor(np.concatenate(self._origins)),
        )


def _bucket(completions: Sequence[tuple[int, np.ndarray]]) -> list[list[tuple[int, np.ndarray]]]:
    """Completions of about the same length together, the longest first."""
    buckets: list[list[tuple[int, np.ndarray]]] = []
    for one in sorted(completions, key=lambda one: -len(one[1])):
        if not buckets or len(one[1]) < _FULL * len(buckets[-1][0][1]):
            buckets.append([])
        buckets[-1].append(one)
    return buckets


def _see(prompt_lengths: Sequence[int], prompt_width: int, width: int) -> np.ndarray:
    """What each token of a completion sees: its prompt, and of its completion what is not behind it.

    The padding of a shorter completion stands behind all its tokens, so that none of them sees it.
    """
    # One mask serves all where their prompts are of one length.
    lengths = np.array(prompt_lengths[:1] if len(set(prompt_lengths)) == 1 else prompt_lengths)
    prompt = np.arange(prompt_width) < lengths.reshape(-1, 1, 1, 1)
    own = np.tril(np.ones((width, width), dtype=bool))[None, None]
    return np.concatenate(
        [
            np.broadcast_to(prompt, (len(lengths), 1, width, prompt_width)),
            np.broadcast_to(own, (len(lengths), 1, width, width)),
        ],
        axis=-1,
    )


def _spread(
    rectangles: Sequence[Sequence[np.ndarray]], tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The place in the row of every cell, -1 in padding; and the cell of every place."""
    places = np.full(sum(len(rows) * max(map(len, rows)) for rows in rectangles), -1)
    cells = np.zeros(tokens, dtype=np.int64)
    offset = 0
    for rows in rectangles:
        width = max(map(len, rows))
        for row in rows:
            cells[row] = offset + np.arange(len(row))
            offset += width
    places[cells] = np.arange(tokens)
    return places, cells
